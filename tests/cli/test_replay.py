"""`evenstep replay`: confirms recorded decisions, or shows the first difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from evenstep.cli.main import main

FOUR = str(Path(__file__).parents[2] / "scenarios" / "four-uneven.yaml")


def replay(path: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["replay", str(path), *args])


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "j.jsonl"
    args = ["simulate", FOUR, "--policy", "proportional", "--set", "steps=20"]
    assert CliRunner().invoke(main, [*args, "--journal", str(path)]).exit_code == 0
    return path


def test_an_unmodified_journal_replays_as_recorded(journal: Path) -> None:
    result = replay(journal)
    assert result.exit_code == 0
    assert result.output == "21 records, each decided as recorded\n"


def test_a_run_folder_can_be_given_instead_of_its_journal(journal: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    journal.rename(tmp_path / "run" / "journal.jsonl")
    result = replay(tmp_path / "run")
    assert result.exit_code == 0
    assert result.output == "21 records, each decided as recorded\n"


def test_a_folder_without_a_journal_names_the_file_that_is_missing(tmp_path: Path) -> None:
    result = replay(tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path / 'journal.jsonl'}: cannot be read: No such file" in result.stderr


def test_a_truncated_last_line_is_skipped_with_a_notice(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-5])
    result = replay(journal)
    assert result.exit_code == 0
    assert "the last line broke off" in result.output
    assert "20 records, each decided as recorded" in result.output


def test_a_difference_is_shown_and_fails(journal: Path) -> None:
    lines = journal.read_text().splitlines()
    record = json.loads(lines[1])
    del record["crc"]
    record["actions"][1]["shares"]["quick-0"] += 1
    lines[1] = json.dumps(record)
    journal.write_text("\n".join(lines) + "\n")
    result = replay(journal)
    assert result.exit_code == 1
    shown = result.output.splitlines()
    assert shown[0] == "record 1, at 0.000 s, Joined:"
    assert "quick-0" in shown[1]
    assert shown[1].startswith("  recorded  Regroup")
    assert shown[2].startswith("  now       Regroup")
    assert len(shown) == 3


def test_other_settings_show_what_would_have_been_decided(journal: Path) -> None:
    result = replay(journal, "--set", "policy=uniform")
    assert result.exit_code == 0
    assert "record 1, at 0.000 s, Joined:" in result.output
    assert "first different plan: record 1" in result.output
    assert "plans" in result.output
    assert "regroups  1 recorded, 1 now" in result.output


def test_an_option_of_the_recorded_policy_can_be_set(journal: Path) -> None:
    result = replay(journal, "--set", "policy.dead_band=0.9")
    assert result.exit_code == 0
    assert "records are decided differently" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--set", "policy.dead_bnd=0.9"), "dead_band"),
        (("--set", "workers.min.more=1"), "workers.min.more: cannot be set within 1"),
        (("--set", "polcy=auto"), "unknown setting polcy; did you mean policy? (--set)"),
    ],
)
def test_a_wrong_setting_is_an_error_of_one_line(
    journal: Path, args: tuple[str, ...], message: str
) -> None:
    result = replay(journal, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_damaged_record_is_named_by_its_line(journal: Path) -> None:
    lines = journal.read_text().splitlines()
    lines[6] = lines[6][:30]
    journal.write_text("\n".join(lines) + "\n")
    result = replay(journal)
    assert result.exit_code == 2
    assert "line 7: " in result.stderr


def test_a_missing_journal_is_an_error_of_one_line(tmp_path: Path) -> None:
    result = replay(tmp_path / "none")
    assert result.exit_code == 2
    assert "none: cannot be read: No such file" in result.stderr
