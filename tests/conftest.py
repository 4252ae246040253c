"""Settings that all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.hypothesis_examples import PROFILE

# A slow machine is not a wrong program: time is measured in bench/, never asserted here.
settings.register_profile(
    "evenstep",
    deadline=None,
    max_examples=30,
    derandomize=True,  # the same cases every time, on every machine
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    settings.get_profile("evenstep"),
    derandomize=False,
    max_examples=500,
    print_blob=True,
)
settings.load_profile(PROFILE)


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed of the long tests: EVENSTEP_SEED, which `make test-long` draws and prints."""
    return int(os.environ.get("EVENSTEP_SEED", "0"))
