"""A notice that this worker's machine will be taken away drains the worker, as SIGTERM does."""

from __future__ import annotations

import logging

from evenstep.launch.notices.watch import NoticeWatch, make_notice
from evenstep.messages import Leaving
from evenstep.train.roster.control import Control

log = logging.getLogger("evenstep")


def watch_notices(kind: str, control: Control) -> NoticeWatch | None:
    """Watch for notices of this kind, as EVENSTEP_NOTICE names it; None: for none."""
    if not kind:
        return None

    def leave(why: str) -> None:
        log.warning("leaving at the end of a step: %s", why)
        control.send(Leaving(why=why))

    return NoticeWatch(make_notice(kind), leave)
