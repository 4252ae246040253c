"""Names beside a plot area: how much room they get, and how long ones are shortened."""

from __future__ import annotations

from collections.abc import Sequence

LEFT, MAX_LEFT = 74.0, 116.0
"""The left edge of a plot area: usually, and beside long names."""

CHAR = 6.6
"""Width of a character of the usual size, about."""


def margin(names: Sequence[str]) -> float:
    """The left edge of a plot area beside which names have room."""
    return max(LEFT, min(MAX_LEFT, 14.0 + CHAR * max(map(len, names), default=0)))


def num_characters(left: float) -> int:
    """How many fit beside a plot area with this left edge."""
    return int((left - 10) / CHAR)


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many characters, cut in the middle; different ones stay different.

    All are cut at one place, as near to the middle as keeps them apart; if there is none, they are
    numbered.
    """
    distinct = list(dict.fromkeys(names))
    middle = (most - 1) // 2
    for tail in sorted(range(most), key=lambda tail: (abs(tail - middle), -tail)):
        short = {name: _cut(name, most, tail) for name in distinct}
        if len(set(short.values())) == len(distinct):
            return [short[name] for name in names]
    numbers = {name: f"…{i}" for i, name in enumerate(distinct, 1)}
    return [f"{name[: max(0, most - len(numbers[name]))]}{numbers[name]}" for name in names]


def _cut(name: str, most: int, tail: int) -> str:
    if len(name) <= most:
        return name
    return f"{name[: most - 1 - tail]}…{name[len(name) - tail :]}"
