"""`evenstep report`: files for people, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from evenstep.cli.main import main
from evenstep.coordinate.run_folder import JOURNAL
from evenstep.observe.history import history

SPOT = str(Path(__file__).parents[2] / "scenarios" / "spot.yaml")


def report(*args: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, args)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "spot.jsonl"
    args = ["simulate", SPOT, "--policy", "auto", "--set", "steps=150", "--journal", str(path)]
    assert CliRunner().invoke(main, args).exit_code == 0
    return path


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """The folder of a run."""
    run = tmp_path / "a"
    run.mkdir()
    (run / JOURNAL).write_bytes(recorded.read_bytes())
    return run


def test_the_journal_of_a_folder_is_found_where_runs_write_it() -> None:
    assert history.JOURNAL == JOURNAL


def test_a_report_lies_in_the_folder_of_its_run(folder: Path) -> None:
    result = report(folder)
    assert (result.exit_code, result.output) == (0, f"{folder / 'report.html'}\n")
    assert "<h1>a</h1>" in (folder / "report.html").read_text()


def test_a_report_on_a_journal_lies_beside_it(recorded: Path) -> None:
    assert report(recorded).output == f"{recorded.with_suffix('.html')}\n"


def test_two_runs_are_compared_in_a_file_that_is_named(
    folder: Path, recorded: Path, tmp_path: Path
) -> None:
    both = tmp_path / "both.html"
    assert report(folder, recorded, "-o", both).exit_code == 0
    text = both.read_text()
    assert "Comparison" in text
    assert "Workers of a<" in text
    assert "Workers of spot<" in text


def test_runs_of_one_name_are_told_apart_by_their_paths(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "a"
    other.parent.mkdir()
    folder.rename(other)
    folder.mkdir()
    (folder / JOURNAL).write_bytes((other / JOURNAL).read_bytes())
    data = json.loads(report(folder, other, "--json").stdout)
    assert [run["name"] for run in data["runs"]] == [str(folder), str(other)]


def test_everything_can_be_had_as_json_and_csv(folder: Path, tmp_path: Path) -> None:
    result = report(folder, "--json", "--csv", tmp_path / "tables")
    assert json.loads(result.stdout)["runs"][0]["totals"]["num_steps"] == 150
    assert (tmp_path / "tables" / "workers.csv").read_text().startswith("run,worker,kind,")
    assert not (folder / "report.html").exists()


def test_each_picture_is_a_file_for_a_paper(folder: Path, tmp_path: Path) -> None:
    result = report(folder, "--svg", tmp_path / "pictures")
    written = result.output.splitlines()
    assert str(tmp_path / "pictures" / "throughput.svg") in written
    for path in written:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_torn_journal_is_reported_as_far_as_it_goes(folder: Path) -> None:
    journal = folder / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-4])
    result = report(folder)
    assert result.exit_code == 0
    assert "the last line is not complete" in result.stderr
    assert "the last line is not complete" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "has no journal.jsonl: it is no run, or has not begun"),
        (b"", "has no complete header; is this a journal?"),
        (b'{"format":7,"settings":{}}\n', "has format 7; this evenstep reads 1"),
    ],
)
def test_what_is_no_run_is_said_in_a_line(content: bytes | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / JOURNAL).write_bytes(content)
    result = report(tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("evenstep: ")
    assert told in result.stderr
    assert not (tmp_path / "report.html").exists()


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = report(tmp_path / "nothing.jsonl")
    assert result.exit_code == 2
    assert "nothing.jsonl: cannot be read: No such file" in result.stderr


def test_a_folder_that_cannot_be_written_is_named(recorded: Path, tmp_path: Path) -> None:
    target = tmp_path / "missing" / "report.html"
    result = report(recorded, "-o", target)
    assert result.exit_code == 2
    assert f"{target}: cannot be written: No such file" in result.stderr
