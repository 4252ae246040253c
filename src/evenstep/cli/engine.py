"""What `evenstep run --on ENGINE` adds: a launcher, what it is told, and what its news mean."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstep.coordinate import events as ev
from evenstep.coordinate.service import Service
from evenstep.errors import ConfigError
from evenstep.launch import requests as news
from evenstep.launch.console import ConsoleOutput
from evenstep.launch.engines import check_name, make_launcher
from evenstep.launch.kinds import parse_kinds
from evenstep.launch.local import tail
from evenstep.launch.remote import LIMIT_S, RemoteWorkers
from evenstep.ports import EngineJob, WorkerKind
from evenstep.strict import require_name

OF_ENGINES = ("partition", "address")  # options that are an engine's own


@dataclass(frozen=True, kw_only=True)
class ChosenEngine:
    """An engine, as the command line names it."""

    name: str
    kinds: Mapping[str, WorkerKind]
    options: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = LIMIT_S

    async def workers(
        self, service: Service, command: Sequence[str], coordinator: str
    ) -> RemoteWorkers:
        """The run's workers on this engine, told to membership. `coordinator`: where they reach it.

        Raises ConfigError if the engine cannot be used from here.
        """
        folder = service.folder
        job = EngineJob(
            run=run_name(folder.path, folder.token),
            folder=folder.path,
            command=tuple(command),
            env={
                "EVENSTEP_COORDINATOR": coordinator,
                "EVENSTEP_TOKEN_FILE": str(folder.path / "token"),
            },
            token=f"{folder.token} {folder.fingerprint}".rstrip(),
            kinds=self.kinds,
            options=self.options,
        )
        launcher = await asyncio.to_thread(make_launcher, self.name, job)
        return RemoteWorkers(
            launcher,
            engine=self.name,
            kinds=list(self.kinds),
            logs=folder.logs,
            console=ConsoleOutput(sys.stdout),
            tell=lambda item: service.handle(as_input(item, folder.logs)),
            limit_s=self.limit_s,
        )


def run_name(folder: Path, token: str) -> str:
    """A name for an engine's lists, which anyone may read: the folder's, and a few bits of a hash.

    The token tells apart two runs in folders of the same name; 32 bits do not give it away.
    """
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-")[:40]
    unique = hashlib.blake2b(token.encode(), digest_size=4, person=b"evenstep-run")
    return f"{plain}-{unique.hexdigest()}"


def as_input(item: news.News, logs: Path) -> ev.AnyInput:
    """The engine's news as membership hears of them."""
    match item:
        case news.RequestUnmet(workers=workers, cause=cause):
            return ev.NotStarted(workers=workers, cause=cause)
        case news.WorkerRuns(worker=worker):
            return ev.Begun(workers=(worker,))
        case news.WorkerFound(worker=worker):
            return ev.Adopted(worker=worker)
        case news.WorkerLeaves(worker=worker, why=why):
            return ev.Preempted(worker=worker, why=why)
        case news.WorkerEnded(worker=worker, exit_code=code, why=why):
            # Ended by the engine is like ended by a signal: no fault of the script.
            code = -signal.SIGKILL if code is None else code
            output = tail(logs / f"{worker}.log")
            return ev.Exited(worker=worker, code=code, why=why, output=output)


def choose_engine(options: dict[str, Any]) -> ChosenEngine | None:
    """The engine that workers run on; None: this machine."""
    name = require_name("--on", options["on"])
    given = {key: options[key] for key in OF_ENGINES if options[key]}
    if name == "local":
        if options["kinds"] or given:
            flag = "kind" if options["kinds"] else next(iter(given))
            raise ConfigError(
                f"--{flag}", "is for workers on an engine: add --on slurm or --on ray"
            )
        return None
    check_name(name)
    kinds = parse_kinds(options["kinds"])
    return ChosenEngine(name=name, kinds=kinds, options=given, limit_s=options["pending_s"])


def worker_prices(
    texts: tuple[str, ...], kinds: tuple[WorkerKind, ...]
) -> tuple[tuple[str, float], ...]:
    """--price options as (kind, price of a worker-hour); kind "" stands for all others."""
    prices = {kind.name: kind.price for kind in kinds if kind.price is not None}
    for text in texts:
        kind, _, number = text.rpartition("=")
        try:
            prices[kind] = float(number)
        except ValueError:
            raise ConfigError("--price", f"expected PRICE or KIND=PRICE, got {text!r}") from None
        if not 0 <= prices[kind] < math.inf:
            raise ConfigError("--price", f"must be 0 or more and finite, got {number}")
    return tuple(prices.items())
