"""Torch objects that must not be destroyed in a forked process.

Their destructors join threads. A forked process, such as a DataLoader's worker, has none of its
parent's threads, so it would crash as soon as it collected such an object.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

T = TypeVar("T")

_alive: set[weakref.ref[Any]] = set()
_held: list[list[Any]] = []  # one entry per fork under way; kept for good in the forked process


def never_freed_in_forks(thing: T) -> T:
    """Mark an object that owns threads, or keeps one alive that does; returns it."""
    _alive.add(weakref.ref(thing, _alive.discard))
    return thing


def _hold() -> None:
    _held.append([ref() for ref in _alive.copy()])  # a copy: other threads add to it


os.register_at_fork(before=_hold, after_in_parent=_held.pop)
