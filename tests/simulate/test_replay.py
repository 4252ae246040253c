"""The journal of any simulated run replays to the same actions."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from evenstep.config import Choice, Settings
from evenstep.decide.batching import POLICIES
from evenstep.decide.machine import decide
from evenstep.engine import assemble
from evenstep.errors import PausedError
from evenstep.journal import Journal, read
from evenstep.simulate.replay import replay
from evenstep.simulate.run import run
from evenstep.simulate.scenario import Scenario
from evenstep.strict import build
from evenstep.types import Plan, Stay, StepDone
from tests.hypothesis_examples import examples

times = st.floats(0.05, 3.0)
changes = st.fixed_dictionaries(
    {"factor": st.floats(0.3, 4), "at_s": times, "announced": st.booleans()},
    optional={"ramp_s": times},
)
groups = st.fixed_dictionaries(
    {
        "kind": st.sampled_from("ab"),
        "count": st.integers(1, 3),
        "fixed_s": st.floats(0.001, 0.1),
        "per_sample_s": st.floats(0.0001, 0.01),
        "jitter": st.sampled_from([0, 0.05]),
        "cores": st.integers(1, 4),
        "stagger_s": st.sampled_from([0, 0.4]),
        "changes": st.lists(changes, max_size=2),
    },
    optional={
        "cap": st.integers(10, 60),
        "fails_at_s": times,
        "leaves_at_s": times,
        "joins_at_s": st.just(0.04),
        "floor_s": st.floats(0.01, 0.1),
        "startup_s": times,
    },
)
brains = st.fixed_dictionaries(
    {
        "batch": st.just({"size": 40}) | st.just({"per_worker": 10, "limit": 60}),
        "policy": st.sampled_from(sorted({*POLICIES} - {"fixed"})),
    },
    optional={
        "plan_delay_steps": st.integers(0, 2),
        "workers": st.fixed_dictionaries({"min": st.integers(1, 2)}),
        "scaling": st.just({"heuristic": "efficiency", "period_steps": 3, "step_workers": 1}),
        "straggler": st.just({"replace": True, "warmup_steps": 3}),
    },
)
stories = st.fixed_dictionaries(
    {
        "workers": st.lists(groups, min_size=1, max_size=3),
        "pool": st.lists(groups, max_size=1),
        "settings": brains,
        "steps": st.integers(1, 25),
        "seed": st.integers(0, 9),
        "asks": st.lists(
            st.fixed_dictionaries({"at_s": times, "num_workers": st.integers(1, 6)}), max_size=2
        ),
        "regroup_s": st.sampled_from([0, 0.02]),
        "detect_s": st.sampled_from([0, 0.1]),
    }
)
reusing_the_folder = examples(
    40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def recorded(data: dict[str, Any], path: Path) -> bytes:
    """The journal of a run, also if it stays paused at the end."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(PausedError):
        run(build(Scenario, data), journal=path)
    return path.read_bytes()


@reusing_the_folder
@given(data=stories)
def test_a_simulated_run_replays_to_the_same_actions(tmp_path: Path, data: dict[str, Any]) -> None:
    recorded(data, tmp_path / "j")
    header, records = read(tmp_path / "j")
    for record, actions in replay(records, header.settings):
        assert actions == record.actions


@reusing_the_folder
@given(data=stories)
def test_two_runs_write_the_same_bytes(tmp_path: Path, data: dict[str, Any]) -> None:
    assert recorded(data, tmp_path / "j") == recorded(data, tmp_path / "j")


@reusing_the_folder
@given(data=stories)
def test_steps_are_committed_once_in_order_and_each_has_the_whole_batch(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    recorded(data, tmp_path / "j")
    records = list(read(tmp_path / "j")[1])
    steps = [r.event for r in records if isinstance(r.event, StepDone)]
    assert [s.step for s in steps] == list(range(len(steps)))
    assert [r.at_s for r in records] == sorted(r.at_s for r in records)
    fixed = data["settings"]["batch"].get("size")
    for step in steps:
        samples = sum(r.samples for r in step.reports)
        assert samples == fixed if fixed else 0 < samples <= 60


STORY = {
    "steps": 30,
    "settings": {"batch": {"size": 40}, "policy": "proportional"},
    "workers": [
        {"kind": "a", "fixed_s": 0.01, "per_sample_s": 0.001},
        {"kind": "b", "fixed_s": 0.01, "per_sample_s": 0.003, "fails_at_s": 0.5},
        {"kind": "b", "fixed_s": 0.01, "per_sample_s": 0.003, "joins_at_s": 0.2},
    ],
}


def test_other_settings_show_what_would_have_been_decided(tmp_path: Path) -> None:
    recorded(STORY, tmp_path / "j")
    header, records = read(tmp_path / "j")
    other = msgspec.structs.replace(header.settings, policy=Choice("uniform"))
    planned = [a for _, now in replay(records, other) for a in now if isinstance(a, Plan)]
    assert planned
    for plan in planned:
        assert max(plan.shares.values()) - min(plan.shares.values()) <= 1


def test_steps_count_even_if_other_settings_number_generations_differently(
    tmp_path: Path,
) -> None:
    recorded(STORY, tmp_path / "j")
    header, records = read(tmp_path / "j")
    plain = msgspec.to_builtins(header.settings)
    stricter = build(Settings, {**plain, "workers": {"min": 3}})
    generations = [a.generation for r in records for a in r.actions if isinstance(a, Plan)]
    now = [a for _, acts in replay(records, stricter) for a in acts if isinstance(a, Plan)]
    assert max(generations) == 3
    assert {a.generation for a in now} == {1}
    assert len(now) > 1  # of the second recorded generation


def test_forecasts_come_from_the_record_unless_made_anew(tmp_path: Path) -> None:
    workers = [{"count": 3, "fixed_s": 0.01, "per_sample_s": 0.001, "jitter": 0.2}]
    brain = {"batch": {"size": 100}, "policy": "predictive", "forecaster": "last"}
    recorded({"steps": 30, "settings": brain, "workers": workers}, tmp_path / "j")
    header, records = read(tmp_path / "j")
    other = msgspec.structs.replace(header.settings, forecaster=Choice("ema", {"alpha": 0.01}))
    kept = [now for _, now in replay(records, other)]
    anew = [now for _, now in replay(records, other, forecast_anew=True)]
    assert kept == [r.actions for r in records]
    assert anew != kept


SETTLED = {
    "steps": 60,
    "settings": {
        "batch": {"size": 40},
        "scaling": {"heuristic": "efficiency", "period_steps": 2, "settle_steps": 4},
        "workers": {"max": 2},
    },
    "workers": [{"count": 2, "fixed_s": 0.01, "per_sample_s": 0.001}],
}


def test_a_decision_to_stay_is_recorded_when_its_reason_changes(tmp_path: Path) -> None:
    recorded(SETTLED, tmp_path / "j")
    actions = [action for record in read(tmp_path / "j")[1] for action in record.actions]
    reasons = [action.reason for action in actions if isinstance(action, Stay)]
    assert reasons
    assert len(set(reasons)) == len(reasons)


def test_a_journal_that_repeats_decisions_to_stay_replays_to_the_same_actions(
    tmp_path: Path,
) -> None:
    """As older versions wrote it."""
    recorded(SETTLED, tmp_path / "j")
    header, records = read(tmp_path / "j")
    cluster = assemble(header.settings)
    with Journal.create(tmp_path / "old", header.settings) as journal:
        for record in records:
            cluster, actions = decide(cluster, record.event)
            journal.append(record.at_s, record.event, actions)
    assert (tmp_path / "old").read_bytes().count(b"Stay") > 10
    for record, actions in replay(read(tmp_path / "old")[1], header.settings):
        assert actions == record.actions
