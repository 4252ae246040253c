"""The report on a run: one file that needs nothing else, and hides nothing."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from evenstep.config import Choice
from evenstep.journal import Record
from evenstep.observe.history import History
from evenstep.observe.report.csv_files import write_csv
from evenstep.observe.report.page import page
from evenstep.observe.report.tables import as_data, workers
from evenstep.observe.summary import figures
from evenstep.simulate.run import run
from evenstep.simulate.scenario import load_scenario
from evenstep.types import Joined, Left, StepDone, StepReport, Worker
from tests.observe.runs import random_records, write_journal

SPOT = Path(__file__).parents[2] / "scenarios" / "spot.yaml"


class Seen(HTMLParser):
    """What a browser would fetch, run and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[History]:
    """The same scenario with two policies."""
    made = []
    for policy in ("auto", "uniform"):
        path = tmp_path_factory.mktemp("runs") / f"{policy}.jsonl"
        run(load_scenario(SPOT, ["steps=200"]), Choice(policy), journal=path)
        made.append(History.read(path))
    return made


def test_a_report_is_one_file_without_scripts_or_anything_from_outside(
    runs: list[History],
) -> None:
    for histories in (runs[:1], runs):
        text = page(histories)
        seen = Seen(text)
        assert not seen.open
        assert not {"script", "link", "img", "iframe", "object", "embed"} & set(seen.tags)
        assert not re.search(r"https?:|//|@import|url\(", text)
        for name, value in seen.attributes:
            assert name not in ("src", "style", "srcset")
            assert not name.startswith("on")
            if name == "href":
                assert value is not None
                assert value.startswith("#")


def test_links_of_marks_lead_to_the_decisions_table(runs: list[History]) -> None:
    seen = Seen(page(runs))
    ids = {value for name, value in seen.attributes if name == "id"}
    links = {value for name, value in seen.attributes if name == "href" and value}
    assert links
    assert {link.removeprefix("#") for link in links} <= ids


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    history = History.read(write_journal(tmp_path / "x.jsonl", random_records(5, 80)))
    history.name = "<script>alert(1)</script>"
    text = page([history])
    assert "<script" not in text
    assert "<b>" not in text
    assert "<slowest>" not in text
    assert "<made>" not in text
    shown = "".join(Seen(text).text)
    assert "<script>alert(1)</script>" in shown
    assert "w1 is <slowest> & so on" in shown


def test_the_figures_are_those_of_the_summary(runs: list[History]) -> None:
    shown = Seen(page(runs[:1])).text
    for name, text in figures(runs[0].totals):
        assert name in shown
        assert text in shown


def test_two_runs_are_compared_figure_by_figure(runs: list[History]) -> None:
    shown = Seen(page(runs)).text
    assert "Comparison" in shown
    for history in runs:
        for _, text in figures(history.totals):
            assert text in shown


def test_problems_are_shown(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "x.jsonl", random_records(5))
    path.write_bytes(path.read_bytes()[:-3])
    assert "the last line is not complete" in page([History.read(path)])


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    history = History.read(write_journal(tmp_path / "x.jsonl", []))
    assert "no steps yet" in page([history])


def test_steps_of_the_workers_add_up(runs: list[History]) -> None:
    totals = runs[0].totals
    rows = workers(runs[0])
    assert max(row["num_steps"] for row in rows) == totals.num_steps
    samples = sum(row["num_steps"] * row["mean_share"] for row in rows)
    assert samples == pytest.approx(totals.samples, rel=1e-5)
    assert {row["end"] for row in rows} == {"", "left", "lost"}


def test_a_worker_that_comes_back_has_a_row_for_each_time_with_its_own_figures(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    history = History.read(write_journal(path, [*stay("w0", 0.0, 3), *stay("w0", 50.0, 5)]))
    rows = workers(history)
    assert [(row["num_steps"], row["end"]) for row in rows] == [(3, "left"), (5, "left")]
    assert [row["mean_share"] for row in rows] == [3, 5]


def stay(worker: str, begin_s: float, num: int) -> list[Record]:
    """A worker joins, takes as many steps as its share has samples, and leaves."""
    report = StepReport(worker=worker, samples=num, compute_s=0.5)
    step = StepDone(step=0, generation=0, seconds=1.0, reports=(report,))
    return [
        Record(at_s=begin_s, event=Joined(workers=(Worker(id=worker),))),
        *(Record(at_s=begin_s + i + 1, event=replace(step, step=i)) for i in range(num)),
        Record(at_s=begin_s + num, event=Left(workers=(worker,))),
    ]


def test_data_survives_json(runs: list[History]) -> None:
    data = json.loads(json.dumps(as_data(runs), allow_nan=False))
    assert [run["name"] for run in data["runs"]] == ["auto", "uniform"]
    first = data["runs"][0]
    assert first["totals"]["num_steps"] == 200
    assert {series["picture"] for series in first["series"]} >= {"throughput", "shares"}
    assert first["decisions"][0]["reason"]


def test_tables_are_csv_files_with_the_run_in_front(runs: list[History], tmp_path: Path) -> None:
    files = write_csv(runs, tmp_path / "tables")
    assert [f.name for f in files] == ["summary.csv", "workers.csv", "decisions.csv", "series.csv"]
    for path in files:
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file)
        assert head[0] == "run"
        assert {row[0] for row in rows} == {"auto", "uniform"}
        assert all(len(row) == len(head) for row in rows)
