"""A run as columns: what is read, followed and thinned is what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config import Choice
from evenstep.errors import JournalError, JournalFormatError
from evenstep.journal import Journal, Record, read
from evenstep.observe.history import History, RunWindow
from evenstep.observe.history.lines import JournalLines
from evenstep.observe.tally import Tally
from evenstep.simulate.run import run
from evenstep.simulate.scenario import load_scenario
from evenstep.types import StepDone
from tests.observe.runs import SETTINGS, random_records, write_journal

SPOT = Path(__file__).parents[2] / "scenarios" / "spot.yaml"
seeds = st.integers(0, 10_000)


def history_of(records: list[Record], **options: Any) -> History:
    history = History(SETTINGS, **options)
    for record in records:
        history.add(record)
    return history


def whole(history: History, points: int = 10**9) -> RunWindow:
    return history.between(*history.span, points)


def assert_same(one: History, other: History) -> None:
    """They show the same."""
    assert one.span == other.span
    assert one.totals == other.totals
    assert one.workers == other.workers
    assert one.roster.__dict__ == other.roster.__dict__
    assert one.decisions.__dict__ == other.decisions.__dict__
    mine, others = whole(one), whole(other)
    for name in RunWindow.__slots__:
        np.testing.assert_array_equal(getattr(mine, name), getattr(others, name), err_msg=name)
    np.testing.assert_array_equal(one.estimates(*one.span, 99), other.estimates(*one.span, 99))


def steps_of(records: list[Record]) -> list[tuple[float, StepDone]]:
    return [(r.at_s, r.event) for r in records if isinstance(r.event, StepDone)]


@given(seed=seeds)
def test_unthinned_every_step_is_there_as_it_was_reported(seed: int) -> None:
    records = random_records(seed)
    seen, steps = whole(history_of(records)), steps_of(records)
    assert seen.at_s.tolist() == [at_s for at_s, _ in steps]
    assert seen.samples.tolist() == [event.steps.samples for _, event in steps]
    assert seen.num_steps.tolist() == [event.steps.num for _, event in steps]
    for i, (_, event) in enumerate(steps):
        there = {report.worker: report for report in event.reports}
        for j, worker in enumerate(seen.workers):
            if worker in there:
                assert seen.share[i, j] == there[worker].samples
                assert seen.compute_s[i, j] == pytest.approx(there[worker].compute_s, rel=1e-6)
                assert seen.wait_s[i, j] == pytest.approx(there[worker].wait_s, rel=1e-6)
            else:
                assert np.isnan(seen.share[i, j])


@given(seed=seeds, points=st.integers(1, 12))
def test_a_thinned_point_has_the_totals_means_and_extremes_of_its_steps(
    seed: int, points: int
) -> None:
    records = random_records(seed)
    history = history_of(records)
    fine, thin = whole(history), whole(history, points)
    assert thin.num_steps.sum() == fine.num_steps.sum()
    first = 0
    for i in range(len(thin)):
        end = int(np.searchsorted(fine.at_s, thin.at_s[i], "right"))
        of = slice(first, end)
        num = fine.num_steps[of]
        assert thin.num_steps[i] == num.sum()
        assert thin.samples[i] == fine.samples[of].sum()
        assert thin.seconds[i] == pytest.approx(fine.seconds[of].sum())
        assert thin.idle_s[i] == pytest.approx(fine.idle_s[of].sum())
        assert thin.longest_s[i] == fine.longest_s[of].max()
        assert thin.shortest_s[i] == fine.shortest_s[of].min()
        for j in range(len(thin.workers)):
            known = np.isfinite(fine.compute_s[of, j])
            if not known.any():
                assert np.isnan(thin.compute_s[i, j])
                continue
            column = fine.compute_s[of, j][known].astype(float)
            mean_s = np.average(column, weights=num[known])
            assert thin.compute_s[i, j] == pytest.approx(mean_s, rel=1e-5)
            assert thin.longest_compute_s[i, j] == pytest.approx(column.max())
        first = end
    assert first == len(fine)


@given(seed=seeds)
def test_a_journal_reads_like_its_records_one_by_one(seed: int, tmp_path_factory: Any) -> None:
    records = random_records(seed)
    path = write_journal(tmp_path_factory.mktemp("run") / "run.jsonl", records)
    assert_same(History.read(path), history_of(records))


@given(seed=seeds, data=st.data())
def test_a_growing_journal_is_followed_like_a_whole_one(
    seed: int, data: Any, tmp_path_factory: Any
) -> None:
    path = write_journal(tmp_path_factory.mktemp("run") / "run.jsonl", random_records(seed))
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    cuts = data.draw(st.lists(st.integers(header, len(content)), max_size=5))
    growing = path.with_name("growing.jsonl")
    growing.write_bytes(content[:header])
    history = History.read(growing)
    for cut in [*sorted(cuts), len(content)]:
        growing.write_bytes(content[:cut])  # in place: the same file, longer
        history.follow()
        assert history.problems == ([] if content[cut - 1 : cut] == b"\n" else [TORN])
    assert_same(history, History.read(path))


TORN = "the last line is not complete and was left out"


def test_the_figures_are_those_that_the_live_summary_showed(tmp_path: Path) -> None:
    run(load_scenario(SPOT, ["steps=120"]), Choice("auto"), journal=tmp_path / "run.jsonl")
    _, records = read(tmp_path / "run.jsonl")
    tally = Tally()
    for record in records:
        tally.add(record)
    assert History.read(tmp_path / "run.jsonl").totals == tally.totals
    assert tally.totals.part_of_limit > 0.5


def test_a_forecast_is_shown_beside_the_step_that_it_was_made_for(tmp_path: Path) -> None:
    run(load_scenario(SPOT, ["steps=60"]), Choice("auto"), journal=tmp_path / "run.jsonl")
    _, records = read(tmp_path / "run.jsonl")
    steps = [r for r in records if isinstance(r.event, StepDone)]
    seen = whole(History.read(tmp_path / "run.jsonl"))
    made, came = steps[30], steps[31]
    worker = came.event.reports[0].worker  # type: ignore[union-attr]
    column = seen.workers.index(worker)
    assert seen.forecast[31, column] == pytest.approx(made.event.forecasts[0])  # type: ignore
    assert seen.pace[31, column] == pytest.approx(came.paces[0])  # type: ignore[index]


def test_memory_is_bounded_and_nothing_is_lost_from_totals_and_extremes() -> None:
    records = random_records(3, 2000)
    small, full = history_of(records, max_cells=4000), history_of(records)
    few, all_ = whole(small), whole(full)
    assert len(few) < len(all_)
    assert small.totals == full.totals
    assert few.num_steps.sum() == all_.num_steps.sum()
    assert few.longest_s.max() == all_.longest_s.max()
    assert few.samples.sum() == all_.samples.sum()


def test_numbers_behind_a_decision_are_those_of_the_step_it_was_made_on(tmp_path: Path) -> None:
    run(load_scenario(SPOT, ["steps=60"]), Choice("auto"), journal=tmp_path / "run.jsonl")
    history = History.read(tmp_path / "run.jsonl")
    plan = next(d for d in history.decisions.kept if d.event.startswith("step"))
    _, records = read(tmp_path / "run.jsonl")
    event = next(r.event for r in records if r.at_s == plan.at_s)
    assert isinstance(event, StepDone)
    numbers = {row["worker"]: row for row in history.numbers(plan)}
    for report, forecast in zip(event.reports, event.forecasts or (), strict=True):
        row = numbers[report.worker]
        assert row["compute_s"] == pytest.approx(report.compute_s, rel=1e-6)
        assert row["before"] == report.samples
        assert row["forecast"] == pytest.approx(forecast, rel=1e-6)
    assert sum(row["after"] for row in numbers.values()) == 192
    assert history.decisions.get(plan.index) is plan
    assert history.decisions.get(history.decisions.num) is None


def test_a_torn_line_is_left_out_and_said(tmp_path: Path) -> None:
    records = random_records(1)
    path = write_journal(tmp_path / "run.jsonl", records)
    path.write_bytes(path.read_bytes()[:-5])
    history = History.read(path)
    assert history.problems == [TORN]
    assert_same(history, history_of(records[:-1]))


def test_a_damaged_line_ends_what_is_read_and_is_named(tmp_path: Path) -> None:
    records = random_records(1)
    path = write_journal(tmp_path / "run.jsonl", records)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[20] = lines[20].replace(b'"at":', b'"at":9')
    path.write_bytes(b"".join(lines))
    history = History.read(path)
    [problem] = history.problems
    assert "line 21: message: is damaged" in problem or "line 21" in problem
    assert_same(history, history_of(records[:19]))
    assert history.follow() == 0


def test_a_line_that_makes_no_sense_is_damage_too(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "run.jsonl", random_records(1, 5))
    line = (
        b'{"at":99.0,"event":{"type":"StepDone","step":1,"generation":1,"seconds":1.0,'
        b'"reports":[["w0",-5,0.1,0.0,1.0,1.0,0.0,0.0]]}}\n'
    )
    path.write_bytes(path.read_bytes() + line)
    history = History.read(path)
    assert "samples" in history.problems[0]
    assert "-5" in history.problems[0]
    assert_same(history, history_of(random_records(1, 5)))


def test_reports_of_older_versions_are_shorter_and_read(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "run.jsonl", random_records(1, 1))
    line = (
        b'{"at":99.0,"event":{"type":"StepDone","step":1,"generation":1,"seconds":1.0,'
        b'"reports":[["w0",5,0.25]]},"actions":[]}\n'
    )
    path.write_bytes(path.read_bytes() + line)
    history = History.read(path)
    assert not history.problems
    assert whole(history).compute_s.tolist() == [[0.25]]


@pytest.mark.parametrize(
    ("content", "error", "problem"),
    [
        (b"", JournalError, "no complete header"),
        (b'{"format":1', JournalError, "no complete header"),
        (b'{"format":2,"settings":{}}\n', JournalFormatError, "format 2"),
        (b"no journal\n", JournalError, "not one line of JSON"),
    ],
)
def test_what_is_no_journal_of_this_version_is_refused(
    content: bytes, error: type[Exception], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(error, match=problem):
        History.read(tmp_path / "run.jsonl")


def test_a_folder_without_a_journal_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"has no journal.jsonl"):
        History.read(tmp_path)


def test_a_journal_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "run.jsonl", random_records(1))
    history = History.read(path)
    path.unlink()
    write_journal(path, random_records(2))
    history.follow()
    assert_same(history, history_of(random_records(2)))


def test_a_journal_that_cannot_be_read_for_a_while_is_read_on(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "journal.jsonl", random_records(1))
    content = path.read_bytes()
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:30]))
    history = History.read(path)
    path.rename(tmp_path / "elsewhere")
    assert history.follow() == 0
    assert "cannot be read" in history.problems[0]
    (tmp_path / "elsewhere").rename(path)
    with path.open("r+b") as file:
        file.write(content)
    assert history.follow() > 0
    assert not history.problems


def test_nothing_of_a_journal_is_read_in_the_place_of_another(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "journal.jsonl", random_records(1))
    lines = JournalLines(path)
    assert list(lines.new())
    write_journal(tmp_path / "other.jsonl", random_records(2, num=200)).replace(path)
    assert not list(lines.new())
    assert not lines.problem
    assert lines.is_replaced


def test_a_run_that_has_not_begun_has_no_steps(tmp_path: Path) -> None:
    Journal.create(tmp_path / "run.jsonl", SETTINGS).close()
    history = History.read(tmp_path / "run.jsonl")
    assert len(whole(history)) == 0
    assert history.totals.num_steps == 0


def test_a_zoom_shows_the_step_and_the_limit_that_are_under_way_at_its_edges(
    tmp_path: Path,
) -> None:
    run(load_scenario(SPOT, ["steps=60"]), Choice("auto"), journal=tmp_path / "run.jsonl")
    history = History.read(tmp_path / "run.jsonl")
    fine = whole(history)
    middle = (fine.from_s[30] + fine.at_s[30]) / 2
    later = middle + 0.3 * (fine.at_s[30] - middle)
    zoomed = history.between(middle, later, 100)
    assert zoomed.step.tolist() == [30.0]
    told = history.estimates(middle, later, 100)
    before = [row for row in history.estimates(*history.span, 9999) if row[0] <= middle]
    assert told.tolist() == [[middle, *before[-1][1:].tolist()]]
