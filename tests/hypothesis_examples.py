"""Number of hypothesis examples: few in `make test`, ten times as many in `make test-long`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "evenstep")


def examples(num: int, **more: Any) -> settings:
    """`hypothesis.settings` with `num` examples in `make test`."""
    return settings(max_examples=num * (10 if PROFILE == "long" else 1), **more)
