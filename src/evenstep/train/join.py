"""`evenstep.join()`: take part in a run, whatever kind of run this process was started in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigError
from evenstep.launch.environment import CoordinatorAddress, StaticRank, read_environment
from evenstep.launch.logs import show_log_by_default
from evenstep.strict import override, whole
from evenstep.train.comm.host import ALONE, Host
from evenstep.train.job import Job, Options
from evenstep.train.roster.fixed import FixedRoster
from evenstep.train.session import Session
from evenstep.verify.probe import Probe


def join(
    *,
    policy: str | dict[str, Any] = "auto",
    cap: int | None = None,
    min_share: int = 1,
    seed: int = 0,
    kind: str = "",
    journal: Path | None = None,
    **settings: Any,
) -> Session:
    """Take part in a run: alone, as a rank under torchrun, or as a worker of `evenstep run`.

    `policy` and further `settings` are those of the config tree and count on the leader; so does
    the variable EVENSTEP_SET, as "policy=uniform;straggler.replace=true", which overrides them.
    `cap` is the largest share that fits this worker's memory; `kind` names workers that are alike,
    for prices and for detecting stragglers, instead of the device's own name. `journal` is for a
    fixed roster; an elastic run keeps its own in its folder.
    """
    options = read_options(policy, cap, min_share, seed, kind, settings)
    where = read_environment(os.environ)
    if isinstance(where, StaticRank):
        return fixed_session(where, options, journal=journal)
    show_log_by_default()
    return elastic_session(where, options)


def read_options(
    policy: str | dict[str, Any] = "auto",
    cap: int | None = None,
    min_share: int = 1,
    seed: int = 0,
    kind: str = "",
    settings: dict[str, Any] | None = None,
) -> Options:
    """The arguments of `join`, checked."""
    overrides = [part for part in os.environ.get("EVENSTEP_SET", "").split(";") if part]
    if not isinstance(kind, str) or not kind.isprintable():
        raise ConfigError("kind", f"expected a name, got {kind!r}")
    return Options(
        settings=override({"policy": policy, **(settings or {})}, overrides),
        cap=None if cap is None else whole("cap", cap, 1),
        min_share=whole("min_share", min_share, 0),
        seed=whole("seed", seed),
        kind=kind,
    )


def fixed_session(
    place: StaticRank, options: Options | None = None, *, journal: Path | None = None
) -> Session:
    """A session alone, or as a rank under torchrun."""
    job = Job(options or Options())
    probe = Probe.from_environment(os.environ, place.rank)
    return Session(job, FixedRoster(place, job, journal=journal, observer=probe), probe)


def elastic_session(
    where: CoordinatorAddress, options: Options | None = None, host: Host = ALONE
) -> Session:
    """A session of a run with a coordinator; `host`: of which this process is a part."""
    from evenstep.train.roster.elastic import ElasticRoster

    job = Job(options or Options(), host)
    return Session(job, ElasticRoster(where, job))
