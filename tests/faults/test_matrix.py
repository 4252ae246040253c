"""The matrix of docs/loops.md: each script trains as plain torch does in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.matrix.__main__ import link, merge
from bench.matrix.cases import CASES, Case
from bench.matrix.cells import COLUMNS, Failed, Ways
from bench.testbed.live_run import LiveRun

SHORT = {("ema", "torchrun"), ("ema", "kill -9"), ("simclr", "alone"), ("simclr", "resume")}


def cells() -> list[Any]:
    return [
        pytest.param(
            case,
            column,
            id=f"{case.name}-{column}",
            marks=[pytest.mark.long] * ((case.name, column) not in SHORT),
        )
        for case in CASES
        for column in COLUMNS
        if column not in case.refused
    ]


@pytest.mark.parametrize(("case", "column"), cells())
def test_a_script_trains_as_plain_torch_does(
    case: Case, column: str, tmp_path: Path, seed: int
) -> None:
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    ways = Ways(case, tmp_path / "ways", np.random.default_rng((seed, CASES.index(case))))
    ways.measure(column)


def test_a_script_that_trains_differently_is_seen(tmp_path: Path) -> None:
    """Against the plain script of another case, which has an equal model."""
    cases = {case.name: case for case in CASES}
    other = replace(cases["ema"], plain=cases["attempt"].plain)
    with pytest.raises(Failed, match="ema, alone: relative error"):
        Ways(other, tmp_path / "ways", np.random.default_rng(0)).measure("alone")


def test_rows_that_were_not_run_stay_in_the_table() -> None:
    first, second, third = CASES[:3]
    old = [["script", "alone"], [link(third), "old"], [link(first), "old"]]
    new = {first.name: [link(first), "new"], second.name: [link(second), "new"]}
    expected = [[link(first), "new"], [link(second), "new"], [link(third), "old"]]
    assert merge(old, new) == expected


def test_lines_that_were_added_removed_or_replaced_are_counted_once_each(tmp_path: Path) -> None:
    def script(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(['"""A script."""', *lines]))
        return path

    plain = script("plain.py", "kept", "removed", "kept_too", "replaced", "kept_to_the_end")
    changed = script("script.py", "kept", "kept_too", "by_another", "kept_to_the_end", "added")
    assert replace(CASES[0], plain=plain, script=changed).lines_changed == 3


class Ended(LiveRun):
    """A run whose coordinator answers that it is over, instead of with a status."""

    returncode = 1

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        return {"problem": "the run is over"}

    def status(self) -> dict[str, Any]:
        return self.ask("status")


def test_a_run_that_ends_early_is_told_by_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the run ended with 1: .*the run is over"):
        Ended(tmp_path).until_training(2)
