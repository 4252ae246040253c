"""Names that carry their owner, so that what a killed process left can be told and removed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

_NAME = re.compile(r"evenstep-(?P<pid>\d+)-(?P<started>\d+)-\d+")
_serial = count()


def new_name() -> str:
    """A name that belongs to this process and to no other, before or after it."""
    # The start time too: a pid can be handed out again.
    return f"evenstep-{os.getpid()}-{_started_ticks(os.getpid())}-{next(_serial)}"


def orphans(folder: Path) -> Iterator[Path]:
    """Entries of a folder with such a name, whose owner is gone."""
    for path in sorted(folder.glob("evenstep-*")):
        named = _NAME.fullmatch(path.name)
        if named and _started_ticks(int(named["pid"])) != int(named["started"]):
            yield path


def _started_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it is gone or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 1 :].split()  # the name before may hold anything
    return None if state in "ZX" else int(fields[18])
