"""`evenstep run`: a coordinator, and workers on this machine."""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from evenstep.cli.place import outward
from evenstep.cli.signals import Requests
from evenstep.config import Settings
from evenstep.coordinate.addresses import EVERYWHERE
from evenstep.coordinate.events import (
    Adopted,
    Dying,
    EvictAsked,
    Exited,
    KillAsked,
    StartAsked,
    StopAsked,
)
from evenstep.coordinate.run_folder import RunFolder
from evenstep.coordinate.service import Service
from evenstep.coordinate.terms import MAX_WORKERS, Ending, Terms
from evenstep.engine import assemble
from evenstep.errors import ConfigError
from evenstep.journal import read
from evenstep.launch.local import LocalLauncher, worker_environment
from evenstep.launch.logs import show_log
from evenstep.strict import build, override
from evenstep.types import MOST_SAMPLES, WorkerId, listed

log = logging.getLogger("evenstep")

FAILED = 1
LAST_S = 10.0  # for the others to end when one has failed
LEAVE_S = 60.0  # for a worker that has left the run to end its process
AWAIT_S = 5.0  # between two looks at who is still awaited
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("script", type=FILE)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--workers",
    metavar="N|MIN:MAX",
    help="How many to start here; MIN:MAX also bounds the run.  [default: 1]",
)
@click.option("--min", "least", type=click.IntRange(min=1), help="Below it the run pauses.")
@click.option("--run", "folder", type=click.Path(path_type=Path), help="The run's new folder.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with a run's folder.")
@click.option(
    "--restarts",
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    help="Workers started in place of lost ones, in all.",
)
@click.option("--policy", help="How the batch is shared.")
@click.option(
    "--scale",
    metavar="NAME[:KEY=VALUE]",
    help="Search for the best number of workers: efficiency, utility:linear=Y0,X0 or your own.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="[KIND=]PRICE",
    help="Price of a worker-hour, for all kinds or for one.  [default: 1]",
)
@click.option(
    "--spares",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Workers scaled away that stay ready, to come back without start-up.",
)
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a setting.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="0: any that is free.")
@click.option(
    "--lease",
    default=3600.0,
    show_default=True,
    type=POSITIVE,
    help="Seconds that workers go on without a coordinator.",
)
@click.option(
    "--checkpoint-every", default=60.0, show_default=True, type=POSITIVE, help="In seconds."
)
@click.option(
    "--keep", default=3, show_default=True, type=click.IntRange(min=1), help="Checkpoints kept."
)
@click.option("--tls-cert", type=FILE, help="Speak TLS with this certificate (PEM).")
@click.option("--tls-key", type=FILE)
@click.pass_context
def command(ctx: click.Context, /, script: Path, args: tuple[str, ...], **options: Any) -> None:
    """Train SCRIPT ARGS on workers that may come, go and die.

    SCRIPT is started as `python SCRIPT ARGS` for each worker; options of run go before it. Ctrl-C
    or SIGTERM ends the run in order, with a checkpoint; a second one, a second later or more, kills
    it. Exit code 0: trained to the end, or stopped in order. 1: the script failed, or no worker is
    left.
    """
    old = _opened(options["folder"], options["resume"])
    num, least, most = _sizes(options["workers"], _before(old))
    told = []
    if options["policy"] is not None:
        told.append(f"policy={_named('--policy', options['policy'])}")
    if options["least"]:
        told.append(f"workers.min={options['least']}")
    if options["scale"] is not None:
        told.append(_scaling(_named("--scale", options["scale"]), num, most))
    bounds = () if most == MAX_WORKERS else (f"workers.max={most}", f"scaling.min_workers={least}")
    resumed = old is not None and old.journal.exists()
    sets = (*told, *options["sets"])
    settings = _checked(sets, bounds, resumed=resumed)
    tls = _tls(options["tls_cert"], options["tls_key"])
    prices = _prices(options["prices"])
    folder = old or RunFolder.make(options["folder"] or _new(script))
    try:
        folder.write_tls_ca(options["tls_cert"])
        terms = Terms(
            run=str(folder.path),
            lease_s=options["lease"],
            checkpoint_every_s=options["checkpoint_every"],
            checkpoints_kept=options["keep"],
            sets=(*bounds, *sets),
            min_workers=least,
            max_workers=most,
            restarts=options["restarts"],
            spares=options["spares"],
            prices=prices,
        )
        show_log()
        # MIN:MAX leaves the number open, and so does a run that goes on as it was.
        asked = ":" not in (options["workers"] or ":")
        if max(1, num) < settings.workers.min:
            log.warning("%s", _too_few(num, settings.workers.min, folder.path))
        run = Run(folder, terms, num, [str(script), *args], asked=asked)
        ending = asyncio.run(run.to_its_end(options["host"], options["port"], tls))
    except BaseException:
        if old is None and not folder.address():  # nobody has listened: there is no run in it
            folder.discard()
        raise
    finally:
        folder.close()
    newest = folder.newest_checkpoint()
    saved = f"newest checkpoint: {newest}" if newest else "there is no checkpoint"
    why = ending.why.rstrip(".")
    click.echo(f"evenstep: {why}; run folder: {folder.path}; {saved}", err=True)
    if ending.told:
        click.echo(ending.told.rstrip(), err=True)
    ctx.exit(0 if ending.ok else FAILED)


class Run:
    """A coordinator, and what it launches here, from the first worker to the last."""

    def __init__(
        self,
        folder: RunFolder,
        terms: Terms,
        num: int,
        command: list[str],
        *,
        asked: bool,
        clock: Callable[[], float] = time.monotonic,
        leave_s: float = LEAVE_S,
    ) -> None:
        self._clock, self._leave_s = clock, leave_s
        self._folder, self._num, self._asked, self._command = folder, num, asked, command
        most = f":{terms.max_workers}" if terms.max_workers < MAX_WORKERS else ""
        about = {"script": Path(command[0]).name, "workers": f"{num}{most}"}
        self._service = Service(folder, terms, about)
        self._requests = Requests(clock)
        self._launcher: LocalLauncher
        self._killed = False
        self._cut_short = ""  # scripts that a signal ended after training

    async def to_its_end(self, host: str, port: int, tls: ssl.SSLContext | None) -> Ending:
        """Train. Nothing that was started here is left when it ends, however it ends."""
        address = await self._listen(host, port, tls)
        self._launcher = launcher = self._make_launcher(host, address)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)
        try:
            click.echo(f"evenstep: run {self._folder.path}, coordinator at {address}", err=True)
            service = self._service
            for worker, pid in self._folder.outlived().items():
                launcher.adopt(worker, pid)
                service.handle(Adopted(worker=worker))
            service.handle(StartAsked(num_workers=self._num, explicit=self._asked))
            ending = await service.ending()
            for worker in service.state.running_processes - service.state.rostered:
                launcher.stop(worker)
            if ending.ok:
                await self._await_processes()
            await launcher.close(0.0 if self._killed else LAST_S)
            ending = await service.ending()  # a script may fail after training, too
            if ending.ok and self._cut_short:
                return replace(ending, why=f"{ending.why}; {self._cut_short}")
            return ending
        finally:
            await launcher.close()
            await self._service.close()

    async def _await_processes(self) -> None:
        """Wait for the workers' processes after the run's end.

        A script that has trained to the end may do whatever comes after, for as long as it takes.
        A worker that has left before that is ended after a bound.
        """
        launcher = self._launcher
        until_s = self._clock() + self._leave_s
        named: set[WorkerId] = set()
        while not await launcher.wait(min(AWAIT_S, self._leave_s)):
            if launcher.running != named:
                named = launcher.running
                log.info("waiting for the processes of %s to end", listed(sorted(named)))
            if self._clock() >= until_s:
                state = self._service.state
                left = launcher.running - state.finished - state.evicted
                for worker in sorted(left):
                    told = "%s has left the run but is still running after %g s: terminating it"
                    log.warning(told, worker, self._leave_s)
                    self._service.handle(EvictAsked(workers=(worker,)))

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> str:
        before = self._folder.address().rpartition(":")[2]
        if not port and before.isdecimal():  # where workers that outlived a coordinator look
            with suppress(OSError):
                return await self._service.open(host, int(before), tls)
        try:
            return await self._service.open(host, port, tls)
        except OSError as e:
            raise ConfigError("--host, --port", f"cannot listen at {host}:{port}: {e}") from None

    def _make_launcher(self, host: str, address: str) -> LocalLauncher:
        port = address.rpartition(":")[2]
        env = worker_environment(
            os.environ,
            coordinator=f"{EVERYWHERE[host]}:{port}" if host in EVERYWHERE else address,
            token_file=self._folder.path / "token",
            address=outward(host, host),
            tls_ca=self._folder.tls_ca(),
            num_workers=self._num,
        )
        service = self._service
        launcher = LocalLauncher(
            [sys.executable, *self._command],
            env=env,
            logs=self._folder.logs,
            name=service.processes.name,
            on_dying=lambda worker, number: service.handle(Dying(worker=worker, signal=number)),
            on_end=lambda worker, code, output: service.handle(
                Exited(worker=worker, code=code, output=output)
            ),
            out=sys.stdout,
        )
        service.processes.launcher = launcher
        return launcher

    def on_signal(self, number: int) -> None:
        """First request: stop gracefully; second: kill. After the run: terminate the scripts."""
        if not self._requests.count_signal():
            return
        name, service = signal.Signals(number).name, self._service
        ending, running = service.state.ending, sorted(service.state.running_processes)
        if ending is None and self._requests.num == 1:
            log.info("%s: ending at the step's end, with a checkpoint; again to kill", name)
            service.handle(StopAsked(why=name))
        elif ending is not None and ending.ok and not self._cut_short:
            log.info("%s: the run is over; scripts that still run are ended; again to kill", name)
            if running:
                self._cut_short = f"{name} ended scripts that still ran: {listed(running)}"
            service.handle(EvictAsked(workers=tuple(running)))
        else:
            log.info("%s: killed", name)
            why = f"killed by {name} before it could end in order"
            service.handle(KillAsked(why=why))
            self._killed = True
            for worker in running:
                self._launcher.kill(worker)


def _opened(new: Path | None, old: Path | None) -> RunFolder | None:
    if new is not None and old is not None:
        raise ConfigError("--run, --resume", "give one of them: a new folder, or one to go on with")
    return RunFolder.open(old) if old is not None else None


def _new(script: Path) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{now}-{script.stem}"


def _before(folder: RunFolder | None) -> str:
    """How many workers a run was given that is resumed."""
    if folder is None or not folder.journal.exists():
        return ""
    return str(read(folder.journal)[0].about.get("workers", ""))


def _sizes(told: str | None, began: str) -> tuple[int, int, int]:
    """How many to start, and the fewest and the most; of a run that goes on, as it began."""
    num, many = _numbers(told or began or "1")
    least, most = _numbers(began) if began else (num, many)
    if many and (num, many) != (least, most):
        raise ConfigError(
            "--workers",
            f"MIN:MAX stays as the run began, {began}; a number alone says how many to start: "
            f"got {told}",
        )
    if most and num > most:
        raise ConfigError("--workers", f"at most {most}, as the run began: got {num}")
    return num, least if most else 1, most or MAX_WORKERS


def _numbers(text: str) -> tuple[int, int]:
    """How many to start, and the most; 0: no bound."""
    few, colon, many = text.partition(":")
    if not few.isdecimal() or (colon and not many.isdecimal()):
        raise ConfigError("--workers", f"expected as 3 or 2:8, got {text!r}")
    if colon and not 1 <= int(few) <= int(many):
        raise ConfigError("--workers", f"need 1 <= MIN <= MAX, got {text!r}")
    return int(few), int(many or 0)


def _too_few(num: int, least: int, folder: Path) -> str:
    return (
        f"--workers starts {num} of the {least} workers that the run needs (workers.min). "
        f"It pauses until {least - num} more have joined: `evenstep scale {folder} {least}` "
        "starts them here, `evenstep join` on another machine"
    )


def _named(flag: str, text: str) -> str:
    if not text.strip():
        raise ConfigError(flag, "is empty; give a name, or leave the option out")
    return text


def _scaling(text: str, few: int, many: int) -> str:
    """The heuristic and its options, as a setting."""
    if few == many:
        raise ConfigError("--scale", f"needs room to move: --workers {few}:{few + 4}, say")
    name, _, more = text.partition(":")
    choice: dict[str, Any] = {"name": name}
    if more:
        key, equals, value = more.partition("=")
        if not equals:
            raise ConfigError("--scale", f"expected as efficiency:threshold=0.1, got {text!r}")
        try:
            choice[key] = float(value)
        except ValueError:
            choice[key] = value
    return f"scaling.heuristic={msgspec.json.encode(choice).decode()}"


def _prices(texts: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    prices: dict[str, float] = {}
    for text in texts:
        kind, _, number = text.rpartition("=")
        try:
            prices[kind] = float(number)
        except ValueError:
            raise ConfigError("--price", f"expected as 0.9 or KIND=0.9, got {text!r}") from None
        if not 0 <= prices[kind] < math.inf:
            raise ConfigError("--price", f"must not be negative: {number}")
    return tuple(prices.items())


def _checked(sets: tuple[str, ...], bounds: tuple[str, ...], *, resumed: bool) -> Settings:
    """The settings with the command line's put over them, checked before anything starts."""
    if sets and resumed:
        raise ConfigError(sets[0].partition("=")[0], "stays as the run's journal has it")
    # The script's own are not known yet: its batch, and how long the job is.
    plain = override({"batch": {"size": MOST_SAMPLES}, "samples": 1}, (*bounds, *sets))
    settings = build(Settings, plain, source="--set")
    if settings.batch.size != MOST_SAMPLES:
        raise ConfigError("batch.size", "is the script's own: set it there", "--set")
    assemble(settings)
    return settings


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert, --tls-key", "give both, or neither")
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError("--tls-cert, --tls-key", f"cannot be used: {e}") from None
    return context
