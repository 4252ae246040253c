"""Named points at which tests inject faults. In a user's run nothing happens there."""

from __future__ import annotations

from collections.abc import Callable

_handler: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Training has come to a point where a fault is worth testing. Never inside a step."""
    if _handler is not None:
        _handler(name)


def on_failpoint(handler: Callable[[str], None] | None) -> None:
    """Call this with a point's name whenever one is reached in this process; None: never again."""
    global _handler
    _handler = handler
