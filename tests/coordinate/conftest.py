"""A coordinator without sockets, processes or time of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from evenstep.coordinate.events import Terms
from tests.coordinate.replayed import replayed
from tests.coordinate.situations import Make
from tests.coordinate.world import World


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a world. Whatever happened in it, its record replays with the same effects."""
    made: list[World] = []

    def world(**terms: Any) -> World:
        made.append(World(tmp_path, replace(Terms(gather_s=5.0), **terms)))
        return made[-1]

    yield world
    for one in made:
        one.close()
        replayed(tmp_path)
