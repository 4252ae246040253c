"""The state machine: events in, actions out, and invariants over any history of events."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config import Settings
from evenstep.decide.batching import POLICIES
from evenstep.decide.cluster import Cluster
from evenstep.decide.machine import decide
from evenstep.engine import Engine, assemble
from evenstep.errors import ConfigError, InvalidInputError, PlanError
from evenstep.journal import Journal, read
from evenstep.strict import build
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    DrainAsked,
    Joined,
    Launch,
    LaunchFailed,
    Left,
    Lost,
    Pause,
    Plan,
    Regroup,
    SizeAsked,
    Stay,
    StepDone,
    StepReport,
    Steps,
    Worker,
)
from tests.hypothesis_examples import examples


def cluster_of(*names: str, **plain: Any) -> Cluster:
    """A cluster of these workers, by default with a batch of 96 in equal shares."""
    asked = {"batch": {"size": 96}, "policy": "uniform", **plain}
    cluster = assemble(build(Settings, asked))
    return decide(cluster, joined(*names))[0] if names else cluster


def joined(*names: str, **facts: Any) -> Joined:
    return Joined(workers=tuple(Worker(id=n, **facts) for n in names))


def step_done(cluster: Cluster, seconds: dict[str, float] | None = None) -> StepDone:
    """A step by the cluster's plan: a millisecond per sample, or as given."""
    times = seconds or {w: b / 1000 for w, b in cluster.shares.items()}
    reports = tuple(StepReport(w, b, times[w] if b else 0.0) for w, b in cluster.shares.items())
    return StepDone(
        step=cluster.step + 1,
        generation=cluster.generation,
        seconds=max(r.compute_s for r in reports) + 0.001,
        reports=reports,
    )


def run(cluster: Cluster, *events: AnyEvent) -> tuple[Cluster, list[AnyAction]]:
    said: list[AnyAction] = []
    for event in events:
        cluster, actions = decide(cluster, event)
        said.extend(actions)
    return cluster, said


def test_the_first_workers_make_a_generation_and_a_plan() -> None:
    cluster, actions = decide(cluster_of(), joined("b", "a", "c"))
    assert actions == (
        Regroup(generation=1, roster=("b", "a", "c"), reason="b, a, c joined"),
        Plan(
            generation=1,
            from_step=0,
            shares={"a": 32, "b": 32, "c": 32},
            reason="b, a, c joined; equal shares for 3 workers",
        ),
    )
    assert cluster.generation == 1


def test_a_lost_worker_s_share_goes_to_the_others_in_the_next_generation() -> None:
    _, actions = decide(cluster_of("a", "b", "c"), Lost(workers=("b",), cause="connection closed"))
    regroup, plan = actions
    assert regroup == Regroup(generation=2, roster=("a", "c"), reason="b lost: connection closed")
    assert isinstance(plan, Plan)
    assert plan.shares == {"a": 48, "c": 48}


def test_two_deaths_at_once_are_one_new_generation() -> None:
    cluster, actions = decide(cluster_of("a", "b", "c"), Lost(workers=("a", "b")))
    assert [type(a) for a in actions] == [Regroup, Plan]
    assert cluster.roster == ("c",)


def test_the_leader_stays_first_when_others_join_and_leave() -> None:
    cluster, _ = run(cluster_of("m", "z"), joined("a"), Left(workers=("z",)), joined("b"))
    assert cluster.roster == ("m", "a", "b")


def test_late_events_change_nothing() -> None:
    cluster = cluster_of("a", "b")
    after, _ = decide(cluster, Lost(workers=("b",)))
    for event in (Lost(workers=("b",)), Left(workers=("nobody",))):
        assert decide(after, event) == (after, ())


def test_a_step_of_the_previous_generation_counts_but_changes_no_plan() -> None:
    cluster = cluster_of("a", "b", policy="auto")
    after, _ = decide(cluster, Lost(workers=("b",)))
    counted, actions = decide(after, step_done(cluster, {"a": 0.1, "b": 0.9}))
    assert (counted.step, counted.samples, actions) == (0, 96, ())
    assert counted.plan == after.plan


def test_a_smaller_size_requested_while_launches_are_in_flight() -> None:
    cluster = cluster_of("a", "b", "c", "d", workers={"min": 2})
    cluster, said = run(cluster, SizeAsked(num_workers=8), SizeAsked(num_workers=2))
    assert [a.worker for a in said if isinstance(a, Drain)] == ["d", "c"]
    cluster, said = run(cluster, joined("e", "f", "g", "h"))
    assert [a.worker for a in said if isinstance(a, Drain)] == ["h", "g", "f", "e"]


def test_a_draining_straggler_gets_no_substitute() -> None:
    cluster = cluster_of("a", "b", "c", "d", straggler={"replace": True, "warmup_steps": 3})
    cluster, _ = decide(cluster, DrainAsked(worker="d"))
    slow = {"a": 0.024, "b": 0.024, "c": 0.024, "d": 0.24}
    for _ in range(60):
        cluster, actions = decide(cluster, step_done(cluster, slow))
        assert actions == ()


def test_fixed_shares_wait_for_all_their_workers() -> None:
    cluster = cluster_of(policy={"name": "fixed", "shares": [80, 16]})
    cluster, actions = decide(cluster, joined("a"))
    assert [type(a) for a in actions] == [Pause]
    cluster, _ = decide(cluster, joined("b"))
    assert cluster.shares == {"a": 80, "b": 16}


def test_gradient_noise_reaches_the_learning_rate() -> None:
    batch = {"per_worker": 32, "limit": 320, "lr_rule": "adascale"}
    cluster = cluster_of("a", "b", batch=batch)
    for _ in range(20):
        event = step_done(cluster)
        rows = tuple(msgspec.structs.replace(r, grad_squared_norm=3.0) for r in event.reports)
        cluster, _ = decide(
            cluster, msgspec.structs.replace(event, reports=rows, grad_squared_norm=2.0)
        )
    cluster, _ = decide(cluster, joined("c", "d"))
    assert cluster.plan is not None
    assert 1.0 < cluster.plan.lr_factor < 4.0


def test_a_step_counts_once() -> None:
    cluster = cluster_of("a", "b")
    event = step_done(cluster)
    after, _ = decide(cluster, event)
    assert (after.step, after.samples) == (0, 96)
    assert decide(after, event) == (after, ())


def all_lost_at_step_nine() -> Cluster:
    """Ten steps, then other workers that restart from a checkpoint of step 3."""
    cluster = cluster_of("a", "b", policy="auto")
    for _ in range(10):
        cluster, _ = decide(cluster, step_done(cluster))
    cluster, _ = run(cluster, Lost(workers=("a", "b")), joined("c", "d"))
    return cluster


def test_steps_repeated_from_a_checkpoint_are_balanced_and_not_counted_twice() -> None:
    cluster = all_lost_at_step_nine()
    assert (cluster.step, cluster.samples) == (9, 960)
    for step in range(4, 12):
        times = {w: b * (0.001 if w == "c" else 0.003) for w, b in cluster.shares.items()}
        event = step_done(replace(cluster, step=step - 1), times)
        cluster, _ = decide(cluster, event)
        assert cluster.step == step
        assert cluster.samples == 96 * (max(step, 9) + 1)
    assert cluster.shares["c"] > 2 * cluster.shares["d"]
    assert decide(cluster, event) == (cluster, ())


def test_steps_repeated_from_a_checkpoint_are_forecast(tmp_path: Path) -> None:
    cluster = all_lost_at_step_nine()
    engine = Engine(cluster.settings)
    engine.cluster = cluster
    with Journal.create(tmp_path / "journal.jsonl", cluster.settings) as engine.journal:
        engine.handle(1.0, step_done(replace(cluster, step=3)))
    (record,) = read(tmp_path / "journal.jsonl")[1]
    assert isinstance(record.event, StepDone)
    assert record.event.forecasts is not None


def test_too_few_workers_pause_and_resume_when_enough_are_back() -> None:
    cluster = cluster_of("a", "b", workers={"min": 2})
    paused, actions = decide(cluster, Lost(workers=("a",)))
    assert actions == (Pause(reason="a lost; 1 of the 2 workers needed"),)
    assert paused.shares == {}
    counted, actions = decide(paused, step_done(cluster))  # committed before the loss
    assert (counted.step, counted.shares, actions) == (0, {}, ())
    again, actions = decide(paused, joined("c"))
    assert again.generation == 2  # the pause used no generation number
    assert [type(a) for a in actions] == [Regroup, Plan]


def test_a_batch_that_the_caps_cannot_hold_pauses_with_the_numbers() -> None:
    cluster, _ = decide(cluster_of(), joined("a", "b", cap=64))
    _, actions = decide(cluster, Lost(workers=("a",)))
    assert len(actions) == 1
    assert isinstance(actions[0], Pause)
    assert "a batch of 96 does not fit 1 workers that hold 64 in total" in actions[0].reason


def test_the_learning_rate_follows_a_batch_that_grows_with_the_workers() -> None:
    batch = {"per_worker": 32, "limit": 96, "lr_rule": "linear"}
    cluster = cluster_of("a", batch=batch)
    assert cluster.plan is not None
    assert (cluster.plan.batch, cluster.plan.lr_factor) == (32, 1.0)
    cluster, _ = run(cluster, joined("b", "c", "d"))
    assert cluster.plan is not None
    assert (cluster.plan.batch, cluster.plan.lr_factor) == (96, 3.0)


def test_duplicate_workers_are_refused_without_side_effects() -> None:
    cluster = cluster_of("a", "b")
    with pytest.raises(InvalidInputError, match="worker b exists already"):
        decide(cluster, joined("c", "b"))
    with pytest.raises(InvalidInputError, match="worker c exists already"):
        decide(cluster, joined("c", "c"))
    assert cluster.roster == ("a", "b")


def test_an_operator_s_size_is_reached_by_launching_or_draining() -> None:
    cluster = cluster_of("a", "b", "c", workers={"min": 1, "max": 5})
    more, actions = decide(cluster, SizeAsked(num_workers=9))
    why = "size 9 requested; 1 to 5 are possible: 5"
    assert actions == (Launch(num_workers=2, reason=why),)
    assert decide(more, SizeAsked(num_workers=5))[1] == ()  # already launching
    fewer, actions = decide(cluster, SizeAsked(num_workers=1))
    assert [a.worker for a in actions if isinstance(a, Drain)] == ["c", "b"]
    assert decide(fewer, DrainAsked(worker="c"))[1] == ()  # already draining


def test_draining_an_unknown_worker_is_an_error_that_names_the_workers() -> None:
    with pytest.raises(InvalidInputError, match="no worker x; the workers are a, b"):
        decide(cluster_of("a", "b"), DrainAsked(worker="x"))


def test_a_failed_launch_is_recorded_as_a_decision_to_stay() -> None:
    cluster, _ = decide(cluster_of("a"), SizeAsked(num_workers=3))
    cluster, actions = decide(cluster, LaunchFailed(num_workers=2, cause="no quota"))
    assert cluster.launching == 0
    assert actions == (
        Stay(reason="2 of 2 launched workers did not start: no quota; continuing without them"),
    )


def test_the_search_launches_workers_and_says_why() -> None:
    cluster = cluster_of(
        "a",
        "b",
        workers={"min": 1, "max": 8},
        scaling={"heuristic": "efficiency", "step_workers": 2, "period_steps": 5},
    )
    said: list[AnyAction] = []
    for _ in range(7):
        cluster, actions = decide(cluster, step_done(cluster))
        said += actions
    assert said == [Launch(num_workers=2, reason="only 2 workers measured; try 4")]


SEARCH = {"heuristic": "efficiency", "step_workers": 2, "period_steps": 5, "settle_steps": 5}


def test_the_search_launches_no_more_workers_than_the_batch_can_serve() -> None:
    cluster = cluster_of("a", "b", batch={"size": 9, "min_share": 2}, scaling=SEARCH)
    while not cluster.launching:
        cluster, actions = decide(cluster, step_done(cluster))
    cluster, _ = decide(cluster, joined("c", "d"))  # a batch of nine gives four workers two each
    for _ in range(60):
        cluster, actions = decide(cluster, step_done(cluster))
        assert not any(isinstance(action, Launch | Pause) for action in actions)


def test_the_search_drains_no_worker_that_the_batch_needs() -> None:
    cluster = cluster_of(scaling=SEARCH, workers={"max": 4})
    cluster, _ = decide(cluster, joined("a", "b", "c", "d", cap=32))  # three hold 96 samples
    sizes = sizes_of_a_search(cluster, 60, cap=32)
    assert (min(sizes), sizes[-1]) == (3, 3)
    _, actions = decide(cluster, SizeAsked(num_workers=1))
    (gone,) = actions
    assert isinstance(gone, Drain)
    assert gone.reason.startswith("size 1 requested; 3 to 4 are possible: 3")


def test_the_short_last_batch_of_an_epoch_counts_by_its_samples() -> None:
    cluster = cluster_of("a", scaling=SEARCH)
    for samples in (96, 96, 48):  # the first step of a roster is not counted
        report = StepReport("a", samples, samples / 1000)
        step = StepDone(
            step=cluster.step + 1, generation=1, seconds=samples / 1000, reports=(report,)
        )
        cluster, _ = decide(cluster, step)
    (known,) = cluster.search.sizes
    assert known.samples_per_s == pytest.approx(1000)


def test_unreported_samples_are_counted_by_the_position() -> None:
    cluster = cluster_of("a", samples=10_000)
    cluster, _ = decide(cluster, step_done(cluster))
    assert cluster.samples == 96
    cluster, _ = decide(
        cluster, msgspec.structs.replace(step_done(cluster), step=50, position=4900)
    )
    assert cluster.samples == 4900


def test_with_no_samples_left_the_size_stays() -> None:
    scaling = {**SEARCH, "heuristic": {"name": "utility", "linear": "100,100"}}
    cluster = cluster_of("a", "b", samples=96, scaling=scaling)
    for _ in range(40):
        cluster, actions = decide(cluster, step_done(cluster))
        assert actions == ()


def test_consecutive_failed_launches_back_off() -> None:
    cluster = cluster_of("a", scaling=SEARCH)
    waits: list[int] = []
    while len(waits) < 3:
        cluster, actions = decide(cluster, step_done(cluster))
        if any(isinstance(action, Launch) for action in actions):
            waits.append(cluster.step)
            cluster, _ = decide(cluster, LaunchFailed(num_workers=2, cause="no quota"))
    first, second = waits[1] - waits[0], waits[2] - waits[1]
    assert second > 1.8 * first


def test_a_worker_of_another_kind_replaces_no_straggler() -> None:
    slow = {"replace": True, "warmup_steps": 3, "alpha": 1.0}
    cluster = cluster_of(straggler=slow)
    cluster, _ = decide(cluster, joined("a", "b", "c", kind="fast"))
    while not cluster.launching:
        cluster, actions = decide(cluster, step_done(cluster, {"a": 0.1, "b": 0.1, "c": 0.5}))
    other, actions = decide(cluster, joined("d", kind="slow"))
    assert [type(action) for action in actions] == [Regroup, Plan]
    assert other.stragglers.leaving is None
    _, actions = decide(cluster, joined("d", kind="fast"))
    assert [a.worker for a in actions if isinstance(a, Drain)] == ["c"]


def sizes_of_a_search(cluster: Cluster, num_steps: int, **facts: Any) -> list[int]:
    """The size of the cluster, step by step, if all sizes are equally fast."""
    sizes = []
    for step in range(num_steps):
        cluster, actions = decide(cluster, step_done(cluster, dict.fromkeys(cluster.shares, 0.1)))
        sizes.append(len(cluster.workers))
        for action in actions:
            if isinstance(action, Launch):
                names = (f"{step}-{n}" for n in range(action.num_workers))
                cluster, _ = decide(cluster, joined(*names, **facts))
            if isinstance(action, Drain):
                cluster, _ = decide(cluster, Left(workers=(action.worker,)))
    return sizes


def test_a_run_below_the_lower_bound_of_the_search_does_not_pause() -> None:
    scaling = {"heuristic": "efficiency", "step_workers": 2, "period_steps": 5, "settle_steps": 5}
    cluster = cluster_of(*"abcd", workers={"max": 8}, scaling={**scaling, "min_workers": 4})
    sizes = sizes_of_a_search(cluster, 60)
    assert (max(sizes), min(sizes), sizes[-1]) == (6, 4, 4)
    cluster, actions = decide(cluster, Lost(workers=("b", "c", "d")))
    assert [type(a) for a in actions] == [Regroup, Plan]
    assert sizes_of_a_search(cluster, 60)[-1] == 4
    free = cluster_of(*"abcd", workers={"max": 8}, scaling=scaling)
    assert min(sizes_of_a_search(free, 60)) == 1


def test_a_straggler_is_drained_only_when_its_substitute_has_joined() -> None:
    cluster = cluster_of("a", "b", "c", "d", straggler={"replace": True, "warmup_steps": 3})
    slow = {"a": 0.024, "b": 0.024, "c": 0.024, "d": 0.24}
    said: list[AnyAction] = []
    for _ in range(60):
        cluster, actions = decide(cluster, step_done(cluster, slow))
        said += actions
    assert [type(a) for a in said] == [Launch]
    assert "replace d" in said[0].reason
    cluster, actions = decide(cluster, joined("e"))
    assert actions[-1] == Drain(worker="d", reason="replaced by e")


def test_a_straggler_is_judged_by_quiet_steps_too() -> None:
    cluster = cluster_of("a", "b", "c", "d", straggler={"replace": True})
    slow = {"a": 0.024, "b": 0.024, "c": 0.024, "d": 0.24}
    said: list[AnyAction] = []
    for _ in range(5):
        event = step_done(cluster, slow)
        quiet = Steps(num=9, seconds=9 * event.seconds, samples=9 * 96)
        cluster, actions = decide(cluster, msgspec.structs.replace(event, quiet=quiet))
        said += actions
    assert [type(a) for a in said] == [Launch]


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "fixed"])
def test_workers_that_differ_end_with_uneven_shares(policy: str) -> None:
    """All but the baseline give more to a worker of twice the cores or speed."""
    cluster = cluster_of(policy=policy)
    cluster, _ = decide(
        cluster, Joined(workers=(Worker(id="fast", cores=2.0), Worker(id="slow", cores=1.0)))
    )
    for _ in range(100):
        shares = cluster.shares
        times = {"fast": shares["fast"] / 2000, "slow": shares["slow"] / 1000}
        cluster, _ = decide(cluster, step_done(cluster, times))
    if policy == "uniform":
        assert cluster.shares == {"fast": 48, "slow": 48}
    else:
        assert abs(cluster.shares["fast"] - 64) <= 2


NAMES = [f"w{i}" for i in range(8)]
histories = st.lists(
    st.tuples(
        st.sampled_from(["join", "left", "lost", "step", "step", "step", "size", "drain", "fail"]),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        st.floats(0.1, 10),
    ),
    max_size=40,
)


def event_of(
    cluster: Cluster, what: str, names: list[str], x: float, count: int
) -> AnyEvent | None:
    """A valid event for this cluster, or None."""
    there = [n for n in cluster.roster if n.split("-")[0] in names]
    if what == "join":
        facts = {"cores": x, "kind": f"k{int(x) % 2}", "cap": max(1, int(x * 60))}
        return joined(*(f"{n}-{count}" for n in names), **facts)
    if what in ("left", "lost"):
        kind = Left if what == "left" else Lost
        return kind(workers=tuple(there or names))
    if what == "size":
        return SizeAsked(num_workers=max(1, int(x)))
    if what == "drain" and there:
        return DrainAsked(worker=there[0])
    if what == "fail":
        return LaunchFailed(num_workers=int(x) + 1, cause="none to be had")
    if what == "step" and cluster.shares:
        times = {
            w: 0.001 + b * 0.001 * (x if w.split("-")[0] in names else 1.0)
            for w, b in cluster.shares.items()
        }
        return step_done(cluster, times)
    return None


@examples(150)
@given(histories, st.sampled_from([p for p in POLICIES if p != "fixed"]), st.booleans())
def test_any_history_keeps_the_batch_and_consecutive_generations(
    history: list[tuple[str, list[str], float]], policy: str, growing: bool
) -> None:
    batch = {"per_worker": 40, "limit": 200} if growing else {"size": 96}
    scaling = {"heuristic": "efficiency", "step_workers": 1, "period_steps": 2}
    cluster = cluster_of(policy=policy, batch=batch, workers={"min": 2, "max": 9}, scaling=scaling)
    generations: list[int] = []
    for count, (what, names, x) in enumerate(history):
        event = event_of(cluster, what, names, x, count)
        if event is None:
            continue
        cluster, actions = decide(cluster, event)
        for action in actions:
            assert action.reason
            if isinstance(action, Regroup):
                generations.append(action.generation)
                assert set(action.roster) == set(cluster.workers)
            if isinstance(action, Plan):
                assert action.generation == generations[-1] == cluster.generation
                assert action.from_step == cluster.step + 1
                assert action.shares.keys() == cluster.workers.keys()
                assert action.batch == cluster.batch
                caps = {i: w.cap or action.batch for i, w in cluster.workers.items()}
                assert all(0 <= b <= caps[w] for w, b in action.shares.items())
            if isinstance(action, Drain):
                assert action.worker in cluster.workers
        assert cluster.draining <= cluster.workers.keys()
    assert generations == list(range(1, len(generations) + 1))


@pytest.mark.parametrize(
    ("plain", "says"),
    [
        ({"plan_delay_steps": -5}, "plan_delay_steps: must not be negative, got -5"),
        ({"batch": {"size": 10**30}}, "batch.size: must be at most"),
        ({"batch": {"size": 8, "min_share": 9}}, "batch.min_share: must lie in [0, 8]"),
        ({"scaling": {"look_again": float("nan")}}, "scaling.look_again: must be above 0"),
        (
            {"workers": {"max": 3}, "scaling": {"min_workers": 4}},
            "scaling.min_workers: must be at most workers.max, 3: got 4",
        ),
        ({"scaling": {"min_workers": 0}}, "scaling.min_workers: must be 1 or more"),
        ({"policy": "autoo"}, "policy: unknown name 'autoo'; did you mean auto?"),
        ({"policy": {"name": "shift", "windw": 3}}, "unknown setting policy.windw; did you mean"),
        (
            {"policy": {"name": "proportional", "dead_band": "x"}},
            "policy.dead_band: expected float",
        ),
        ({"scaling": {"heuristic": "magic"}}, "scaling.heuristic: unknown name 'magic'"),
        ({"batch": {"size": 96, "lr_rule": "liner"}}, "did you mean linear?"),
        (
            {"scaling": {"heuristic": {"name": "utility", "linear": "10,3600"}}},
            "samples: must be set: utility needs the length of the job",
        ),
    ],
)
def test_a_wrong_setting_names_its_path_and_suggests_the_right_one(
    plain: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_of("a", **plain)
    assert says in str(caught.value)


# A user's own policy.


class Given(msgspec.Struct, frozen=True):
    """Returns the given shares unchecked."""

    shares: Any

    def first_shares(self, memory: Any, fleet: Any, batch: int) -> Any:
        return None, (self.shares, "given")


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        (np.array([48, 48]), "gave worker b 48 samples, more than its cap of 32."),
        (np.array([97, -1]), "gave worker a 97 samples, more than the batch of 96."),
        (np.array([96, 0]), "gave worker b 0 samples, under min_share, 1."),
        (np.array([64, 31]), "assigned 95 samples of a batch of 96."),
        (np.array([96]), "gave [96], not one integer for each of 2 workers."),
        (np.array([64.0, 32.0]), "gave [64.0, 32.0], not one integer for each"),
    ],
)
def test_shares_that_break_a_rule_name_the_policy_the_worker_and_the_numbers(
    monkeypatch: pytest.MonkeyPatch, shares: Any, says: str
) -> None:
    monkeypatch.setitem(POLICIES, "given", Given)
    own = {"name": "given", "shares": shares}
    cluster = cluster_of(policy=own, batch={"size": 96, "min_share": 1})
    with pytest.raises(PlanError) as caught:
        decide(cluster, Joined(workers=(Worker(id="a"), Worker(id="b", cap=32))))
    assert f"policy given {says}" in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), PlanError)


def test_shares_may_be_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "given", Given)
    cluster = cluster_of("a", "b", policy={"name": "given", "shares": [64, 32]})
    assert cluster.shares == {"a": 64, "b": 32}
