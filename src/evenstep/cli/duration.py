"""Durations on the command line: 90s, 10m, 1h, or a number of seconds."""

from __future__ import annotations

import re

import click

SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Its seconds; the type of an option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise click.BadParameter(f"expected a duration such as 90s, 10m or 1h, got {text!r}")
    return float(found[1]) * SECONDS[found[2]]
