"""How many cases a property is tried on: few for every change, ten times as many at night."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "evenstep")


def examples(num: int, **more: Any) -> settings:
    """As `hypothesis.settings`, with so many cases in `make test`."""
    return settings(max_examples=num * (10 if PROFILE == "long" else 1), **more)
