"""A part of `python -m bench.fuzz`: damaged and hostile input for every decoder."""

from __future__ import annotations

import pytest
from bench.fuzz import main
from bench.strangers import at_the_ports_of_a_run


def test_mutated_input_is_refused_by_every_decoder() -> None:
    assert main(["--inputs", "4000", "--no-ports"]) == 0


@pytest.mark.long
def test_a_million_mutated_inputs_are_refused(seed: int) -> None:
    assert main(["--seed", str(seed), "--no-ports"]) == 0


@pytest.mark.long
def test_strangers_at_its_ports_do_no_harm_to_a_run() -> None:
    """How much they slow it down is measured by `python -m bench.fuzz`."""
    assert "no worker lost" in at_the_ports_of_a_run().line
