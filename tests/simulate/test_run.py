"""The engine on a virtual clock: time, cost and membership add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.config import Choice
from evenstep.errors import EvenstepError, PausedError
from evenstep.journal import Record, read
from evenstep.simulate.result import Result, settled
from evenstep.simulate.run import LIMIT, compare_policies, run
from evenstep.simulate.scenario import Scenario, load_scenario
from evenstep.strict import build
from evenstep.types import Drain, Joined, LaunchFailed, Left, Lost, StepDone

SCENARIOS = Path(__file__).parents[2] / "scenarios"
UNIFORM = Choice("uniform")


def make_scenario(*workers: dict[str, Any], **changes: Any) -> Scenario:
    settings = {"batch": {"size": 12}, "policy": "uniform", **changes.pop("settings", {})}
    length = {} if "samples" in changes else {"steps": 10}
    return build(Scenario, {**length, "settings": settings, "workers": workers, **changes})


def recorded(scenario: Scenario, path: Path) -> tuple[Result, list[Record]]:
    result = run(scenario, journal=path)
    return result, list(read(path)[1])


def kinds(records: list[Record]) -> list[str]:
    return [type(r.event).__name__ for r in records]


def test_a_step_takes_as_long_as_its_slowest_worker_and_the_reduction() -> None:
    result = run(
        make_scenario(
            {"fixed_s": 0.1, "per_sample_s": 0.01},
            {"fixed_s": 0.2, "per_sample_s": 0.02, "price": 3600},
            communication={"latency_s": 0.05},
        )
    )
    assert result.step_s == pytest.approx(np.full(10, 0.2 + 6 * 0.02 + 0.1))
    assert result.time_s == pytest.approx(4.2)
    assert result.samples == 120
    assert result.wait_fraction == pytest.approx((0.32 - 0.16) / 2 / 0.42)
    assert result.cost == pytest.approx(4.2 + 4.2 / 3600)


def test_a_run_can_end_after_a_number_of_samples() -> None:
    result = run(make_scenario({"fixed_s": 1}, samples=25))
    assert result.num_steps == 3
    assert result.samples == 36


def test_the_limit_of_four_uneven_workers_equals_the_result_by_hand() -> None:
    limit = run(load_scenario(SCENARIOS / "four-uneven.yaml"), LIMIT)
    assert limit.step_s == pytest.approx(np.full(300, 0.0230 + 0.0078), abs=1e-4)
    assert limit.settled_step == 0


def test_every_policy_gets_the_same_noise() -> None:
    group = {"count": 3, "fixed_s": 0.1, "jitter": 0.2}
    uniform, static, limit = compare_policies(make_scenario(group), [UNIFORM, Choice("static")])
    assert uniform.step_s.tolist() == static.step_s.tolist()
    assert limit.policy == "limit"
    assert limit.achieved == 1.0


def test_without_noise_no_fixed_shares_beat_the_limit() -> None:
    for name in ("four-uneven", "bert-like", "knee"):
        scenario = load_scenario(SCENARIOS / f"{name}.yaml", ["steps=30"])
        for result in compare_policies(
            scenario, [UNIFORM, Choice("static"), Choice("proportional")]
        ):
            assert (result.expected_s >= result.limit_s * (1 - 1e-12)).all()


def test_a_lost_worker_voids_its_step_and_costs_the_detection_time(tmp_path: Path) -> None:
    scenario = make_scenario(
        {"fixed_s": 1, "count": 2},
        {"fixed_s": 1, "kind": "spot", "fails_at_s": 3.25},
        detect_s=0.5,
        regroup_s=0.25,
    )
    result, records = recorded(scenario, tmp_path / "j")
    assert result.num_void_steps == 1
    assert result.num_steps == 10
    assert result.time_s == pytest.approx(3.75 + 0.25 + 7)
    lost = next(r for r in records if isinstance(r.event, Lost))
    assert lost.at_s == pytest.approx(3.75)
    steps = [r.event.step for r in records if isinstance(r.event, StepDone)]
    assert steps == list(range(10))


def test_workers_join_and_leave_between_steps(tmp_path: Path) -> None:
    scenario = make_scenario(
        {"fixed_s": 1, "count": 2},
        {"fixed_s": 1, "kind": "late", "joins_at_s": 2.5, "leaves_at_s": 5.5},
        regroup_s=0.25,
    )
    result, records = recorded(scenario, tmp_path / "j")
    assert result.num_void_steps == 0
    assert result.time_s == pytest.approx(10 + 2 * 0.25)
    at = {type(r.event): r.at_s for r in records}
    assert at[Joined] == pytest.approx(3.0)
    assert at[Left] == pytest.approx(6.25)
    sizes = [len(r.event.reports) for r in records if isinstance(r.event, StepDone)]
    assert sizes == [2, 2, 2, 3, 3, 3, 2, 2, 2, 2]


def test_launched_workers_start_up_then_join_and_cost_from_the_launch_on(tmp_path: Path) -> None:
    scenario = make_scenario(
        {"fixed_s": 1, "price": 0},
        pool=[{"fixed_s": 1, "kind": "pool", "count": 2, "startup_s": 2.5, "price": 3600}],
        asks=[{"at_s": 1, "num_workers": 4}],
    )
    result, records = recorded(scenario, tmp_path / "j")
    assert kinds(records)[:6] == [
        "Joined", "StepDone", "SizeAsked", "StepDone", "LaunchFailed", "StepDone"
    ]  # fmt: skip
    failed = next(r.event for r in records if isinstance(r.event, LaunchFailed))
    assert failed.num_workers == 1
    joined = [r for r in records if isinstance(r.event, Joined)]
    assert [(r.at_s, len(r.event.workers)) for r in joined if isinstance(r.event, Joined)] == [
        (0, 1),
        (4, 2),
    ]
    assert result.cost == pytest.approx(2 * (result.time_s - 1))


def test_a_drained_worker_leaves_after_one_more_step_and_its_slot_is_free_again(
    tmp_path: Path,
) -> None:
    scenario = make_scenario(
        {"fixed_s": 1, "count": 2},
        asks=[{"at_s": 2, "num_workers": 1}, {"at_s": 5, "num_workers": 2}],
    )
    _, records = recorded(scenario, tmp_path / "j")
    left = [(r.at_s, r.event.workers) for r in records if isinstance(r.event, Left)]
    assert left == [(3, ("cpu-1",))]
    joined = [[w.id for w in r.event.workers] for r in records if isinstance(r.event, Joined)]
    assert joined == [["cpu-0", "cpu-1"], ["cpu-1.2"]]


def test_a_worker_drained_at_the_end_of_a_step_takes_one_more_step(tmp_path: Path) -> None:
    scenario = make_scenario(
        {"per_sample_s": 0.001, "count": 3},
        communication={"latency_s": 1},
        settings={
            "workers": {"max": 3},
            "scaling": {"heuristic": "efficiency", "period_steps": 2, "step_workers": 1},
        },
        steps=40,
    )
    _, records = recorded(scenario, tmp_path / "j")
    named = kinds(records)
    drains = [i for i, r in enumerate(records) for a in r.actions if isinstance(a, Drain)]
    assert drains
    for i in drains:
        assert named[i : i + 3] == ["StepDone", "StepDone", "Left"]


def test_an_unused_slot_is_launched_before_a_used_one(tmp_path: Path) -> None:
    scenario = make_scenario(
        {"fixed_s": 1, "count": 2},
        pool=[{"fixed_s": 1, "kind": "pool"}],
        asks=[{"at_s": 2, "num_workers": 1}, {"at_s": 5, "num_workers": 2}],
    )
    _, records = recorded(scenario, tmp_path / "j")
    joined = [[w.id for w in r.event.workers] for r in records if isinstance(r.event, Joined)]
    assert joined == [["cpu-0", "cpu-1"], ["pool-0"]]


def test_the_slot_of_a_failed_worker_is_not_used_again(tmp_path: Path) -> None:
    scenario = make_scenario(
        {"fixed_s": 1},
        {"fixed_s": 1, "kind": "spot", "fails_at_s": 2.5},
        asks=[{"at_s": 5, "num_workers": 2}],
    )
    _, records = recorded(scenario, tmp_path / "j")
    assert kinds(records).count("LaunchFailed") == 1
    assert kinds(records).count("Joined") == 1


def test_below_the_minimum_the_clock_advances_until_workers_join() -> None:
    scenario = make_scenario(
        {"fixed_s": 1},
        {"fixed_s": 1, "kind": "spot", "fails_at_s": 2.5},
        {"fixed_s": 1, "kind": "late", "joins_at_s": 20},
        settings={"workers": {"min": 2}},
    )
    assert run(scenario).time_s == pytest.approx(20 + 8)


def test_a_paused_run_that_nothing_can_resume_raises() -> None:
    scenario = make_scenario(
        {"fixed_s": 1}, {"fixed_s": 1, "fails_at_s": 2.5}, settings={"workers": {"min": 2}}
    )
    with pytest.raises(PausedError, match=r"is paused at 2\.5 s, after 2 steps"):
        run(scenario)


def test_plans_take_effect_after_the_prefetched_steps(tmp_path: Path) -> None:
    scenario = make_scenario(
        {"per_sample_s": 0.01},
        {"per_sample_s": 0.02},
        settings={"policy": "proportional", "plan_delay_steps": 2},
    )
    _, records = recorded(scenario, tmp_path / "j")
    shares = [
        r.event.reports[0].samples for r in records if isinstance(r.event, StepDone) and r.actions
    ]
    given = [r.event.reports[0].samples for r in records if isinstance(r.event, StepDone)]
    assert shares
    assert given[:3] == [6, 6, 6]
    assert given[3] > 6


def test_free_cpu_in_a_report_is_for_the_next_step(tmp_path: Path) -> None:
    change = {"factor": 2, "at_s": 3, "until_s": 5, "announced": True}
    _, records = recorded(make_scenario({"fixed_s": 1, "changes": [change]}), tmp_path / "j")
    steps = [r.event for r in records if isinstance(r.event, StepDone)]
    slowed = [s.reports[0].compute_s for s in steps]
    reported = [s.reports[0].free_cpu for s in steps]
    assert slowed[:6] == [1, 1, 1, 2, 1, 1]
    assert reported[:5] == [1 / s for s in slowed[1:6]]


def test_a_wrong_policy_leaves_no_journal(tmp_path: Path) -> None:
    with pytest.raises(EvenstepError, match="did you mean uniform"):
        compare_policies(make_scenario({"fixed_s": 1}), [Choice("unifrom")], journal=tmp_path / "j")
    with pytest.raises(EvenstepError, match="records one run, not 2"):
        compare_policies(
            make_scenario({"fixed_s": 1}), [UNIFORM, Choice("static")], journal=tmp_path / "j"
        )
    assert not (tmp_path / "j").exists()


def test_a_wrong_policy_is_refused_before_any_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.simulate.run.run", lambda *_, **__: pytest.fail("it was run"))
    with pytest.raises(EvenstepError, match="did you mean uniform"):
        compare_policies(make_scenario({"fixed_s": 1}), [UNIFORM, Choice("unifrom")])


def test_settled_is_the_first_step_after_which_nearly_all_are_near_the_limit() -> None:
    def at(text: str) -> int | None:
        return settled(np.array([c == "+" for c in text]))

    assert at("+" * 40) == 0
    assert at("-" * 40) is None
    assert at("-----" + "+" * 40) == 5
    assert at("-----" + "+" * 20 + "-" + "+" * 20) == 5
    assert at("+" * 30 + "-" * 10) is None
    assert at("-" * 30 + "+" * 10) is None  # too few to tell
    assert at("+++") == 0
