"""A run for which no coordinator answers, in words: the same in `evenstep top` and on the page."""

from __future__ import annotations

TRAINED = "trained to the end"


def ended(left_because: str) -> tuple[str, str]:
    """State and reason of a run whose last workers have left in order, as its journal has it."""
    if left_because == TRAINED:
        return "finished", left_because
    return "stopped", left_because.removeprefix("stopped: ")


def unanswered(run: str = "RUN") -> str:
    """What to know if the journal does not show the end."""
    return (
        "no coordinator answers; workers may train on for up to the lease; "
        f"`evenstep run --resume {run}` goes on with the run"
    )
