"""`evenstep simulate`: a table for people, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from evenstep.cli.main import main
from evenstep.cli.table import table
from evenstep.decide.batching import POLICIES
from evenstep.journal import read
from tests.decide.uncapped import Uncapped

FOUR = str(Path(__file__).parents[2] / "scenarios" / "four-uneven.yaml")


def simulate(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *args])


def rows(result: Result) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in result.output.splitlines()[2:]}


def test_the_table_names_the_scenario_and_each_policy() -> None:
    result = simulate(FOUR, "--policy", "uniform, static,uniform", "--set", "steps=20")
    assert result.exit_code == 0
    first, head, *lines = result.output.splitlines()
    assert first.startswith("four-uneven: 4 workers (1 quick, 1 middling, 1 slow, 1 late); ")
    assert first.endswith("batch 128; 20 steps; seed 0")
    assert head.split() == ["policy", "time", "of", "limit", "wait", "cost", "settled"]
    assert [line.split()[0] for line in lines] == ["uniform", "static", "limit"]
    assert rows(result)["uniform"][1:4] == ["1.20", "s", "51.5%"]
    assert rows(result)["limit"][3] == "100.0%"


def test_another_seed_draws_other_random_numbers() -> None:
    noisy = FOUR.replace("four-uneven", "noisy")
    args = (noisy, "--policy", "uniform", "--set", "steps=20")
    assert simulate(*args).output == simulate(*args, "--seed", "0").output
    assert rows(simulate(*args, "--seed", "1")) != rows(simulate(*args))


def test_a_run_is_recorded_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    result = simulate(FOUR, "--policy", "static", "--set", "steps=5", "--journal", str(path))
    assert result.exit_code == 0
    assert f"recorded in {path}" in result.output
    header, records = read(path)
    assert header.settings.policy.name == "static"
    assert header.about["seed"] == 0
    assert len(list(records)) == 6


def test_options_of_a_policy_are_kept_when_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    sets = ("--set", "steps=5", "--set", "settings.policy={name: proportional, dead_band: 0.2}")
    simulate(FOUR, "--policy", "proportional", *sets, "--journal", str(path))
    assert read(path)[0].settings.policy.options == {"dead_band": 0.2}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("none.yaml",), "cannot be read: No such file"),
        (
            (FOUR, "--set", "setings.batch.size=3"),
            "unknown setting setings; did you mean settings?",
        ),
        ((FOUR, "--set", "settings.batch.sise=3"), "unknown setting settings.batch.sise; did you"),
        ((FOUR, "--set", "steps=many"), 'steps: expected int, got "many"'),
        ((FOUR, "--set", "workers.9.price=2"), "workers.9: there are 4 entries, counted from 0"),
        ((FOUR, "--set", "steps.more=2"), "steps.more: cannot be set within 300"),
        ((FOUR, "--set", "steps"), "expected path=value, got 'steps' (--set)"),
        ((FOUR, "--policy", "unifrom"), "policy: unknown name 'unifrom'; did you mean uniform?"),
        ((FOUR, "--policy", "automatic"), "unknown name 'automatic'; did you mean auto?"),
        ((FOUR, "--policy", ""), "--policy: is empty; give a name, or leave the option out"),
        (
            (FOUR, "--set", "settings.batch.size=-5"),
            "settings.batch.size: must not be negative, got -5",
        ),
        ((FOUR, "--set", "settings.batch.size=0"), "1 or more: got size 0 and per_worker 0"),
        ((FOUR, "--set", "steps=-3"), "steps: must be 0 or more, got -3"),
        ((FOUR, "--set", "steps=0"), "1 or more: got steps 0 and samples 0"),
        ((FOUR, "--policy", "auto,static", "--journal", "{tmp}/j"), "records one run, not 2"),
        ((FOUR, "--policy", "static", "--journal", "{tmp}/no/j"), "No such file"),
        ((FOUR, "--set", "settings.workers.min=9"), "no later event can resume it"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_no_files(
    tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = simulate(*(a.replace("{tmp}", str(tmp_path)) for a in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("evenstep: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_ignores_caps_is_named_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "uncapped", Uncapped)
    result = simulate(FOUR, "--policy", "uncapped", "--set", "workers.3.cap=8")
    assert result.exit_code == 2
    assert "policy uncapped gave worker late-0 32 samples, more than its cap of 8" in result.stderr


def test_an_existing_journal_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("precious")
    result = simulate(FOUR, "--policy", "static", "--set", "steps=5", "--journal", str(path))
    assert result.exit_code == 2
    assert "not overwritten" in result.stderr
    assert path.read_text() == "precious"


def test_table_columns_are_as_wide_as_needed() -> None:
    assert table(("a", "bb"), [("ccc", "d"), ("e", "ffff")]) == "a      bb\nccc     d\ne    ffff"
