"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# A slow machine is not a wrong program: time is measured in bench/, never asserted here.
settings.register_profile("evenstep", deadline=None, print_blob=True)
settings.load_profile("evenstep")
