"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# CI tries the same cases every time, people's machines new ones. And a slow machine is not a wrong
# program: time is measured in bench/, never asserted here.
settings.register_profile(
    "evenstep", deadline=None, print_blob=True, derandomize="CI" in os.environ
)
settings.load_profile("evenstep")
