"""Names that carry their owner, so that the leftovers of a killed process can be found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

_NAME = re.compile(r"evenstep-(?P<pid>\d+)-(?P<started>\d+)-\d+")
_serial = count()


def new_name() -> str:
    """A name unique to this process, also among past and future ones."""
    # With the start time, because a pid can be reused.
    return f"evenstep-{os.getpid()}-{_started_ticks(os.getpid())}-{next(_serial)}"


def orphans(folder: Path) -> Iterator[Path]:
    """Entries of a folder whose owner is gone."""
    for path in sorted(folder.glob("evenstep-*")):
        named = _NAME.fullmatch(path.name)
        if named and _started_ticks(int(named["pid"])) != int(named["started"]):
            yield path


def _started_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 1 :].split()  # the name may hold anything
    return None if state in "ZX" else int(fields[18])
