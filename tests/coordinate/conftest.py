"""A coordinator without sockets, processes or time of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenstep.coordinate.member import Terms
from tests.coordinate.situations import Make
from tests.coordinate.world import World


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def world(**terms: Any) -> World:
        return World(tmp_path, replace(Terms(gather_s=5.0), **terms))

    return world
