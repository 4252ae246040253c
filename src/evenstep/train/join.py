"""`evenstep.join()`: take part in a run, whatever kind of run this process was started in."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigError
from evenstep.launch.environment import CoordinatorAddress, read_environment
from evenstep.launch.logs import show_log_by_default
from evenstep.launch.ranks import StaticRank
from evenstep.observe.feed import SinkFeed
from evenstep.observe.sinks import SinkChoice, open_sinks
from evenstep.strict import override, whole
from evenstep.train.comm.host import ALONE, Host
from evenstep.train.job import Job, Options
from evenstep.train.roster.fixed import FixedRoster
from evenstep.train.session import Session
from evenstep.verify.probe import Probe
from evenstep.verify.records import ENV_VARIABLE

log = logging.getLogger("evenstep")


def join(
    *,
    policy: str | dict[str, Any] = "auto",
    cap: int | None = None,
    min_share: int = 1,
    seed: int = 0,
    kind: str = "",
    journal: Path | None = None,
    sinks: str | Sequence[SinkChoice] = (),
    **settings: Any,
) -> Session:
    """Take part in a run: alone, as a rank under torchrun, or as a worker of `evenstep run`.

    `policy` and further `settings` are those of the config tree and count on the leader; so does
    the variable EVENSTEP_SET, as "policy=uniform;straggler.replace=true", which overrides them.
    `cap` is the largest share that fits this worker's memory; `kind` names workers that are alike,
    for prices and for detecting stragglers, instead of the device's own name. `journal` and
    `sinks` are for a fixed roster; an elastic run keeps its own journal, and has `evenstep run
    --sink`. A sink takes the run's figures: "jsonlines:figures.jsonl", or a function that makes one
    of your own, called on rank 0.
    """
    options = read_options(policy, cap, min_share, seed, kind, settings)
    where = read_environment(os.environ)
    if isinstance(where, StaticRank):
        session = fixed_session(where, options, journal=journal, sinks=sinks)
        # `evenstep verify` trains a few steps of its own, which are no news.
        if session.is_leader and ENV_VARIABLE not in os.environ:
            show_log_by_default()
        return session
    show_log_by_default()
    if sinks:
        log.warning("sinks of evenstep.join are not used here: give them to `evenstep run --sink`")
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
    place: StaticRank,
    options: Options | None = None,
    *,
    journal: Path | None = None,
    sinks: str | Sequence[SinkChoice] = (),
) -> Session:
    """A session alone, or as a rank under torchrun."""
    job = Job(options or Options())
    probe = Probe.from_environment(os.environ, place.rank)
    # `evenstep verify` trains a few steps of its own, which are no news.
    used = sinks if place.rank == 0 and probe is None else ()
    feed = SinkFeed(open_sinks(used, "sinks"))
    roster = FixedRoster(place, job, journal=journal, sinks=feed, observer=probe)
    return Session(job, roster, probe)


def elastic_session(
    where: CoordinatorAddress, options: Options | None = None, host: Host = ALONE
) -> Session:
    """A session of a run with a coordinator; `host`: of which this process is a part."""
    from evenstep.train.roster.elastic import ElasticRoster

    job = Job(options or Options(), host)
    return Session(job, ElasticRoster(where, job))
