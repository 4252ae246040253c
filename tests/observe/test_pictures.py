"""Pictures of a run: well-formed, safe to show under a strict policy, and true."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config import BatchSettings, Choice, Settings
from evenstep.journal import Record
from evenstep.observe.history import History
from evenstep.observe.pictures import (
    PICTURES,
    View,
    draw_alike,
    picture,
    standalone_stylesheet,
    stylesheet,
    whole,
)
from evenstep.observe.pictures.labels import shortened
from evenstep.observe.pictures.plot import Plot, drawn
from evenstep.observe.pictures.svg import element, escape
from evenstep.observe.pictures.ticks import clock, short, time_ticks, value_ticks
from evenstep.simulate.run import run
from evenstep.simulate.scenario import load_scenario
from evenstep.types import Joined, Plan, Regroup, StepDone, StepReport, Worker
from tests.observe.runs import SETTINGS, random_records

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def history_of(records: list[Record]) -> History:
    history = History(SETTINGS)
    for record in records:
        history.add(record)
    return history


@pytest.fixture(scope="module")
def spot(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A simulated run with joins, leaves and losses."""
    path = tmp_path_factory.mktemp("spot") / "run.jsonl"
    run(load_scenario(SCENARIOS / "spot.yaml", ["steps=250"]), Choice("auto"), journal=path)
    return History.read(path)


@given(
    seed=st.integers(0, 10_000),
    num=st.integers(0, 60),
    width=st.integers(200, 1000),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_every_picture_of_any_run_is_well_formed_and_has_no_style_of_its_own(
    seed: int, num: int, width: int, part: tuple[float, float]
) -> None:
    history = history_of(random_records(seed, num))
    begin_s, end_s = history.span
    low, high = sorted(begin_s + p * (end_s - begin_s) for p in part)
    for view in (whole(history, width), View(begin_s=low, end_s=high, width=width)):
        for one in PICTURES:
            svg = one.draw(history, view)
            if not svg:
                continue
            root = ElementTree.fromstring(svg)
            for part_of in root.iter():
                assert part_of.tag != "style"
                assert "style" not in part_of.attrib
                assert not any(name.startswith("on") for name in part_of.attrib)
            assert "nan" not in re.sub(r">[^<]*<", "><", svg)
            assert "http" not in svg
            assert float(root.attrib["data-begin"]) == view.begin_s
            assert root.attrib["data-picture"] == one.name
            inside = ElementTree.fromstring(one.draw(history, view, standalone=True))
            assert inside.tag == "{http://www.w3.org/2000/svg}svg"


def test_a_picture_without_data_is_left_out() -> None:
    assert [p.name for p in PICTURES if p.draw(History(), whole(History()))] == []


def test_a_run_is_drawn_with_all_that_happened(spot: History) -> None:
    drawn = [p.name for p in PICTURES if p.draw(spot, whole(spot))]
    assert drawn == [
        *("throughput", "shares", "step-time", "roster", "cluster-size", "cost", "forecasts"),
    ]
    roster = picture("roster").draw(spot, whole(spot))
    for worker in spot.workers:
        assert f'data-worker="{worker}"' in roster
    assert "lost at" in roster
    assert "left at" in roster


def test_marks_carry_the_numbers_of_their_decisions(spot: History) -> None:
    svg = picture("throughput").draw(spot, whole(spot))
    numbers = [int(n) for n in re.findall(r'data-decision="(\d+)"', svg)]
    assert numbers
    for number in numbers:
        decision = spot.decisions.get(number)
        assert decision is not None
        assert escape(decision.reason) in svg
    regroups = [d.index for d in spot.decisions.kept if d.kind == "regroup"]
    assert set(regroups) <= set(numbers)


def test_the_plot_area_says_where_a_time_is(spot: History) -> None:
    root = ElementTree.fromstring(picture("roster").draw(spot, whole(spot)))
    left, right = float(root.attrib["data-left"]), float(root.attrib["data-right"])
    begin_s, end_s = float(root.attrib["data-begin"]), float(root.attrib["data-end"])
    lost = next(p for p in spot.roster.presences if p.end == "lost")
    assert lost.end_s is not None
    bar = next(g for g in root.iter("g") if g.attrib.get("data-worker") == lost.worker)
    rect = next(iter(bar.iter("rect")))
    ends_at = float(rect.attrib["x"]) + float(rect.attrib["width"])
    expected = (lost.end_s - begin_s) / (end_s - begin_s) * (right - left)
    assert ends_at == pytest.approx(expected, abs=0.2)


def test_all_pictures_of_a_run_have_one_time_axis(spot: History) -> None:
    drawn = [p.draw(spot, whole(spot)) for p in PICTURES]
    roots = [ElementTree.fromstring(svg) for svg in drawn if svg]
    edges = {(root.attrib["data-left"], root.attrib["data-right"]) for root in roots}
    assert len(edges) == 1


def test_shares_are_stacked_up_to_the_batch(spot: History) -> None:
    plot = picture("shares").plot(spot, whole(spot))
    assert plot is not None
    total = np.sum([series.values for series in plot.series], axis=0)
    assert total.tolist() == [192.0] * len(total)
    assert plot.top == 192.0


def test_runs_side_by_side_have_a_common_scale(spot: History) -> None:
    begin_s = spot.span[0]
    slow = View(begin_s=begin_s, end_s=begin_s + 1.0)
    for name in ("throughput", "step-time"):
        alone = [picture(name).plot(spot, view) for view in (whole(spot), slow)]
        tops = [plot.top for plot in alone if plot is not None]
        both = draw_alike(picture(name), [(spot, whole(spot)), (spot, slow)])
        assert tops[0] != tops[1]
        assert both[tops.index(max(tops))] == picture(name).draw(
            spot, (whole(spot), slow)[tops.index(max(tops))]
        )
        assert both[tops.index(min(tops))] != picture(name).draw(
            spot, (whole(spot), slow)[tops.index(min(tops))]
        )


def test_of_a_thousand_workers_some_are_shown_and_the_rest_together() -> None:
    ids = [f"w{i}" for i in range(1000)]
    history = History(Settings(batch=BatchSettings(size=1000)))
    history.add(
        Record(
            at_s=0.0,
            event=Joined(workers=tuple(Worker(id=w) for w in ids)),
            actions=(
                Regroup(generation=1, roster=tuple(ids), reason="joined"),
                Plan(generation=1, from_step=0, shares=dict.fromkeys(ids, 1), reason="equal"),
            ),
        )
    )
    for step in range(3):
        reports = tuple(StepReport(w, 1, 0.01 + i * 1e-5) for i, w in enumerate(ids))
        done = StepDone(step=step, generation=1, seconds=0.03, reports=reports)
        history.add(Record(at_s=1.0 + step, event=done))
    for name in ("shares", "step-time"):
        svg = picture(name).draw(history, whole(history))
        assert "989 others" in svg
        assert "one by one" in svg
        assert len(svg) < 60_000
    assert "w999" in picture("step-time").draw(history, whole(history))
    assert "960 workers" in picture("roster").draw(history, whole(history))


def test_text_from_outside_is_escaped() -> None:
    evil = "<script>alert('\"&')</script>\x00\x1b\ud800"
    assert escape(evil) == (
        "&lt;script&gt;alert(&#39;&quot;&amp;&#39;)&lt;/script&gt;\ufffd\ufffd\ufffd"
    )
    made = element("g", element("title", evil), aria_label=evil)
    assert ElementTree.fromstring(made).attrib["aria-label"].startswith("<script>")


def test_both_style_sheets_name_every_class_that_pictures_use(spot: History) -> None:
    used = set()
    for one in PICTURES:
        for group in re.findall(r'class="([^"]*)"', one.draw(spot, whole(spot))):
            used |= set(group.split())
    colours = {c for c in used if re.fullmatch(r"[fs](\d+|-\w+)", c)}
    assert len(colours) > 10
    for sheet in (stylesheet(), standalone_stylesheet()):
        for name in colours:
            assert f".{name} {{" in sheet
        assert "var(" not in sheet  # unknown to programs that typeset papers


@given(begin_s=st.floats(0, 1e6), length_s=st.floats(1e-2, 1e7), most=st.integers(2, 12))
def test_ticks_lie_in_the_window_and_are_not_too_many(
    begin_s: float, length_s: float, most: int
) -> None:
    ticks, unit = time_ticks(begin_s, begin_s + length_s, most)
    slack = 1e-6 * length_s + 1e-9 * begin_s
    assert all(begin_s - slack <= t <= begin_s + length_s + slack for t in ticks)
    assert len(ticks) <= most + 1
    assert len({clock(t, unit) for t in ticks}) == len(ticks) or length_s < 1 < begin_s
    assert value_ticks(length_s, 4)[-1] <= length_s * 1.001


@pytest.mark.parametrize(
    ("at_s", "unit", "text"),
    [
        (12.5, "s", "12.5"),
        (205.0, "min", "3:25"),
        (205.5, "min", "3:25.5"),
        (7500.0, "h", "2:05"),
        (129600.0, "days", "1.5"),
    ],
)
def test_times_are_written_as_people_read_them(at_s: float, unit: str, text: str) -> None:
    assert clock(at_s, unit) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.25"), (3400, "3,400"), (25_000, "25k"), (1.2e6, "1.2M")]
)
def test_values_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    "names",
    [
        ["on-demand-0", "on-demand-1"],
        [f"machine-{i}-in-a-cluster-with-a-long-name" for i in range(30)],
        [f"cluster-with-a-long-name-worker-{i}-of-many" for i in range(30)],
        ["x" * 64, "x" * 63, "x" * 30 + "y" + "x" * 33],
    ],
)
def test_different_names_stay_different_when_they_are_shortened(names: list[str]) -> None:
    short = shortened(names, 16)
    assert len(set(short)) == len(names)
    assert max(map(len, short)) <= 16
    for name, shown in zip(names, short, strict=True):
        assert shown == name or "…" in shown


def test_cost_and_worker_hours_have_scales_of_their_own() -> None:
    def run_of(price_per_hour: float, hours: float) -> History:
        worker = Worker(id="w0", price_per_hour=price_per_hour)
        records = [Record(at_s=0.0, event=Joined(workers=(worker,)))]
        done = StepDone(step=0, generation=1, seconds=1.0, reports=(StepReport("w0", 4, 1.0),))
        return history_of([*records, Record(at_s=hours * 3600, event=done)])

    def axis(svg: str) -> str:
        return "".join(re.findall(r'class="soft num">([^<]*)<', svg))

    cost, free = picture("cost"), run_of(1.0, 2.0)
    paid, cheap = run_of(40.0, 2.0), run_of(0.5, 2.0)
    alone = axis(draw_alike(cost, [(free, whole(free))])[0])
    beside, _ = draw_alike(cost, [(free, whole(free)), (paid, whole(paid))])
    assert "worker-hours: 2 so far" in beside
    assert axis(beside) == alone
    one, other = draw_alike(cost, [(cheap, whole(cheap)), (paid, whole(paid))])
    assert axis(one) == axis(other)


def test_a_cluster_that_never_changes_has_its_size_drawn() -> None:
    history = history_of(random_records(3, 1))
    assert "workers" in picture("cluster-size").draw(history, whole(history))


@given(length_s=st.floats(0.2, 1e6))
def test_a_phone_has_at_least_four_labels_on_its_time_axis(length_s: float) -> None:
    view = View(begin_s=0.0, end_s=length_s, width=350)
    svg = ElementTree.fromstring(drawn(Plot(layers=()), view, "x", "x", "x"))
    labels = [
        (float(text.attrib["x"]), text.text or "")
        for text in svg.iter("text")
        if text.attrib.get("text-anchor") == "middle"
    ]
    assert len(labels) >= 4
    for (x, text), (next_x, next_text) in pairwise(labels):
        assert next_x - x > 5.5 * (len(text) + len(next_text)) / 2


def test_times_are_counted_from_the_beginning_of_the_run() -> None:
    begun = history_of([Record(at_s=r.at_s + 1000.0, event=r.event) for r in random_records(3, 9)])
    first_s, last_s = begun.span
    for one in PICTURES:
        if svg := one.draw(begun, whole(begun)):
            labels = re.findall(r'text-anchor="middle"[^>]*>([\d.]+)<', svg)
            assert float(labels[0]) == 0.0
            assert float(labels[-1]) <= last_s - first_s
