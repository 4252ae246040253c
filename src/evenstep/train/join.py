"""`evenstep.join()`: take part in a run, whatever kind of run this process was started in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigError
from evenstep.launch.environment import StaticRank, read_environment
from evenstep.launch.logs import show_log_by_default
from evenstep.strict import override, whole
from evenstep.train.roster.fixed import FixedSession
from evenstep.train.session import Session


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
    the variable EVENSTEP_SET, as "policy=uniform;straggler.replace=true", which is put over them.
    `cap` is the largest share that fits this worker's memory; `kind` names workers that are alike,
    for prices and for telling stragglers, instead of the device's own name. `journal` is for a
    fixed roster; an elastic run keeps its own in its folder.
    """
    where = read_environment(os.environ)
    told = [part for part in os.environ.get("EVENSTEP_SET", "").split(";") if part]
    plain = override({"policy": policy, **settings}, told)
    if not isinstance(kind, str):
        raise ConfigError("kind", f"expected a name, got {kind!r}")
    own: dict[str, Any] = {
        "cap": None if cap is None else whole("cap", cap, 1),
        "min_share": whole("min_share", min_share, 0),
        "seed": whole("seed", seed),
        "kind": kind,
    }
    if isinstance(where, StaticRank):
        return FixedSession(where, plain, journal=journal, **own)
    from evenstep.train.roster.elastic import ElasticSession

    show_log_by_default()
    return ElasticSession(where, plain, **own)
