"""A part of `python -m bench.fuzz`: damaged and hostile input for every decoder."""

from __future__ import annotations

import pytest
from bench.fuzz import main


def test_mutated_input_is_refused_by_every_decoder() -> None:
    assert main(["--inputs", "4000", "--no-ports"]) == 0


@pytest.mark.long
def test_a_million_mutated_inputs_are_refused(seed: int) -> None:
    assert main(["--seed", str(seed)]) == 0
