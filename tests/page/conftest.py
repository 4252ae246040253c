"""Journals to show, and their pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.config import Choice
from evenstep.simulate.run import run
from evenstep.simulate.scenario import load_scenario
from tests.page.served import Client, served

NUM_STEPS = 100
SPOT = Path(__file__).parents[2] / "scenarios" / "spot.yaml"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with joins and losses; not to be changed."""
    path = tmp_path_factory.mktemp("recorded") / "spot.jsonl"
    run(load_scenario(SPOT, [f"steps={NUM_STEPS}"]), Choice("auto"), journal=path)
    return path


@pytest.fixture
def journal(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copy(recorded, tmp_path / "spot.jsonl"))


@pytest.fixture
def page(journal: Path) -> Iterator[Client]:
    """Its page, seen by a browser that has the key."""
    with served(journal) as client:
        yield client
