"""Named points at which tests inject faults. In a user's run nothing happens there."""

from __future__ import annotations

from collections.abc import Callable

_handler: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """A named point where tests inject faults. Never on the hot path of a step."""
    if _handler is not None:
        _handler(name)


def on_failpoint(handler: Callable[[str], None] | None) -> None:
    """Install `handler`, called with the name of each failpoint reached; None removes it."""
    global _handler
    _handler = handler
