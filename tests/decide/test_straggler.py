"""Straggler detection from reports alone, with shares that follow each worker's speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenstep.config import StragglerSettings
from evenstep.decide.straggler import Stragglers, give_up, judge
from evenstep.types import StepReport, Worker, WorkerId
from tests.hypothesis_examples import examples

ON = StragglerSettings(replace=True)

Slowdown = Callable[[int], float]
"""Slowdown factor of a worker by step."""


class Cluster:
    """Workers on affine curves, one per kind, with shares that equalise their times step by step.

    The seconds of a share are slowdown * (offset + share): `offset` is the kind's fixed part.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        slowdowns: Mapping[int, Slowdown | float] | None = None,
        offsets: dict[str, float] | None = None,
        *,
        balanced: bool = True,
        noise: float = 0.0,
        batch: int = 0,
        straggler: StragglerSettings = ON,
        report_every: int = 1,
    ) -> None:
        self.roster = [Worker(id=f"w{i}", kind=k) for i, k in enumerate(kinds)]
        self.slowdowns = {f"w{i}": s for i, s in (slowdowns or {}).items()}
        self.offsets, self.balanced, self.noise = offsets or {}, balanced, noise
        self.batch = batch or 1000 * len(kinds)
        self.shares: dict[WorkerId, int] = {}
        self.straggler, self.memory = straggler, Stragglers()
        self.report_every = report_every  # steps between reports; the others are quiet
        self.step, self.rng = 0, np.random.default_rng(5)
        self.named: list[tuple[int, WorkerId]] = []
        self.reasons: list[str] = []

    def seconds(self, worker: Worker, share: int) -> float:
        slowdown = self.slowdowns.get(worker.id, 1.0)
        factor = slowdown if isinstance(slowdown, float) else slowdown(self.step)
        jitter = float(np.exp(self.rng.normal(0, self.noise))) if self.noise else 1.0
        return factor * (self.offsets.get(worker.kind, 0.0) + share) * jitter

    def run(self, steps: int) -> Cluster:
        for _ in range(steps):
            ids = [w.id for w in self.roster]
            if set(self.shares) != set(ids):
                self.shares = dict.fromkeys(ids, self.batch // len(ids))
            reports = [
                StepReport(w.id, self.shares[w.id], self.seconds(w, self.shares[w.id]))
                for w in self.roster
            ]
            self.memory, who, reason = judge(
                *(self.memory, self.straggler, self.roster, reports), num_steps=self.report_every
            )
            if who is not None:
                self.named.append((self.step, who))
            if reason:
                self.reasons.append(reason)
            if self.balanced:
                speed = {r.worker: r.samples / r.compute_s for r in reports}
                total = sum(speed.values())
                self.shares = {w: max(1, round(self.batch * speed[w] / total)) for w in ids}
            self.step += 1
        return self

    def swap(self, leaver: WorkerId, joiner: Worker) -> None:
        self.roster = [*(w for w in self.roster if w.id != leaver), joiner]


def test_a_worker_far_slower_than_its_kind_is_named_after_its_share_adapted() -> None:
    cluster = Cluster("aaaa", {2: lambda step: 2.0 if step >= 50 else 1.0}).run(200)
    # The EWMA takes six steps to fall from 1 below 0.8, then twenty consecutive steps pass.
    assert cluster.named == [(74, "w2")]
    (reason,) = cluster.reasons
    assert reason.startswith("replace w2: 0.5")
    assert reason.endswith(
        "< 0.80 of the usual speed of a workers for 20 steps, last with a share of 571"
    )


def test_no_worker_is_judged_while_replacement_is_off() -> None:
    off = StragglerSettings()
    cluster = Cluster("aaaa", {2: 4.0}, straggler=off).run(100)
    assert cluster.named == []
    assert cluster.memory == Stragglers()


def test_the_leader_is_never_named() -> None:
    assert Cluster("aaaa", {0: 4.0}).run(200).named == []


def test_a_slowdown_of_all_workers_replaces_none() -> None:
    slow: Slowdown = lambda step: 3.0 if step >= 50 else 1.0  # noqa: E731
    assert Cluster("aaaa", dict.fromkeys(range(4), slow)).run(300).named == []
    assert Cluster("abcd", dict.fromkeys(range(4), slow)).run(300).named == []


@pytest.mark.parametrize("kinds", ["aaaa", "abcd", "ab"])
@pytest.mark.parametrize("balanced", [True, False])
def test_a_single_pause_replaces_no_worker(kinds: str, balanced: bool) -> None:
    for who in range(len(kinds)):
        pause = {who: lambda step: 100.0 if step == 60 else 1.0}
        assert Cluster(kinds, pause, {"a": 300.0}, balanced=balanced).run(300).named == []


def test_a_slow_first_step_replaces_no_worker() -> None:
    for kinds in ("aaaa", "ab"):
        cold = {1: lambda step: 50.0 if step == 0 else 1.0}
        assert Cluster(kinds, cold, balanced=False).run(100).named == []


def test_a_kind_that_is_slower_than_another_has_no_stragglers() -> None:
    assert Cluster("aaabbb", {3: 5.0, 4: 5.0, 5: 5.0}).run(200).named == []


def test_the_slowest_of_several_is_named_first_and_one_at_a_time() -> None:
    cluster = Cluster("a" * 8, {2: 2.0, 5: 3.0, 6: 3.0}).run(400)
    assert [who for _, who in cluster.named] == ["w5"]


@given(
    offset=st.floats(0.0, 3000.0),
    factor=st.floats(1.0, 1.2),
    num_workers=st.integers(3, 8),
    balanced=st.booleans(),
)
@examples(50)
def test_a_small_share_with_a_fixed_cost_is_no_straggler(
    offset: float, factor: float, num_workers: int, balanced: bool
) -> None:
    cluster = Cluster("a" * num_workers, {1: factor}, {"a": offset}, balanced=balanced)
    assert cluster.run(150).named == []


def test_samples_per_second_would_have_named_it() -> None:
    """The error that the measure avoids: 17 % slower, but only 54 % of the samples per second."""
    cluster = Cluster("aaaa", {1: 1.2}, {"a": 2000.0}).run(150)
    assert cluster.shares["w1"] < 0.6 * cluster.shares["w2"]
    assert cluster.named == []
    assert cluster.memory.traces["w1"].ratio == pytest.approx(1 / 1.2, rel=0.02)


@given(
    offset=st.floats(0.0, 3000.0),
    factor=st.floats(1.4, 5.0),
    num_workers=st.integers(3, 8),
    balanced=st.booleans(),
    onset=st.integers(0, 60),
)
@example(offset=0.0, factor=1.5, num_workers=3, balanced=True, onset=1)  # at its second step
@examples(50)
def test_a_worker_slower_by_two_fifths_is_named_at_any_fixed_cost(
    offset: float, factor: float, num_workers: int, balanced: bool, onset: int
) -> None:
    slow = {1: lambda step: factor if step >= onset else 1.0}
    cluster = Cluster("a" * num_workers, slow, {"a": offset}, balanced=balanced).run(onset + 100)
    assert [who for _, who in cluster.named] == ["w1"]


@pytest.mark.parametrize(("factor", "expected"), [(1.0, []), (1.1, []), (1.6, ["w1"])])
def test_noise_of_ten_per_cent_changes_no_verdict(factor: float, expected: list[str]) -> None:
    for offset in (0.0, 1000.0):
        slow = {1: lambda step: factor if step >= 100 else 1.0}
        cluster = Cluster("a" * 6, slow, {"a": offset}, noise=0.1).run(400)
        assert [who for _, who in cluster.named] == expected


def test_without_moving_shares_the_fixed_cost_is_unknown_and_excuses_a_small_share() -> None:
    """Fixed shares: a slowness that a fixed cost could explain names no straggler."""

    def verdict(factor: float) -> list[tuple[int, WorkerId]]:
        cluster = Cluster("aaaa", {3: factor}, {"a": 500.0}, balanced=False)
        cluster.shares = {"w0": 1500, "w1": 1500, "w2": 1500, "w3": 200}
        return cluster.run(100).named

    assert verdict(1.0) == verdict(2.0) == []
    assert verdict(5.0) == [(20, "w3")]  # longer than the others, for fewer samples


def offsets_shown(shares: Sequence[int], factors: Sequence[float]) -> tuple[float, ...]:
    """Offset estimates of a kind with a fixed cost of 2000 samples as one worker's share moves."""
    cluster = Cluster("aa", {1: lambda step: factors[step]}, {"a": 2000.0}, balanced=False)
    for share in shares:
        cluster.shares = {"w0": 1000, "w1": share}
        cluster.run(1)
    return cluster.memory.offsets.get("a", ())


def test_a_moved_share_gives_one_estimate_of_the_fixed_cost() -> None:
    shown = offsets_shown([1000, 1000, 700, 700, 700], [1, 1, 1, 1, 1])
    assert shown == pytest.approx([2000])
    assert offsets_shown([1000, 1000, 900, 900], [1, 1, 1, 1]) == ()


def test_the_first_step_at_a_new_share_does_not_count() -> None:
    shown = offsets_shown([1000, 1000, 700, 700, 700], [1, 1, 1.1, 1, 1])
    assert shown == pytest.approx([2000])
    assert offsets_shown([1000, 1300, 900, 1200], [1, 1, 1, 1]) == ()  # none held twice


def test_a_change_of_the_worker_gives_no_offset() -> None:
    # It slows down and gets a smaller share: the estimate uses the slow steps.
    assert offsets_shown([1000, 1000, 1000, 700, 700], [1, 1, 3, 3, 3]) == pytest.approx([2000])
    # It pauses once and gets a smaller share: no estimate, since no curve is that steep.
    assert offsets_shown([1000, 1000, 1000, 700, 700], [1, 1, 3, 1, 1]) == ()


def test_a_noisy_step_before_a_move_is_replaced_by_the_median() -> None:
    shown = offsets_shown([1000] * 4 + [750] * 2, [1, 1, 1, 1.2, 1, 1])
    assert shown == pytest.approx([2000])


def test_the_only_worker_of_a_kind_is_compared_with_its_own_past() -> None:
    slow = {1: lambda step: 2.0 if step >= 100 else 1.0}
    for kinds in ("ab", "abc", "aab"):
        who = kinds.index("b")
        cluster = Cluster(kinds, {who: slow[1]}, {"a": 100.0, "b": 400.0}).run(200)
        assert [name for _, name in cluster.named] == [f"w{who}"]


def test_the_only_worker_of_a_kind_that_was_always_slow_is_no_straggler() -> None:
    assert Cluster("ab", {1: 10.0}).run(200).named == []


def test_a_worker_alone_is_never_named() -> None:
    assert Cluster("a", {0: lambda step: 1.0 + step}).run(100).named == []


def test_a_worker_whose_share_fell_to_zero_keeps_its_last_ratio() -> None:
    cluster = Cluster("aaaa", {1: lambda step: 20.0 if step >= 50 else 1.0}, balanced=False)
    cluster.run(52)  # two slow steps, then a share of zero
    cluster.shares = {"w0": 1333, "w1": 0, "w2": 1333, "w3": 1334}
    cluster.slowdowns["w1"] = 1.0
    assert [who for _, who in cluster.run(60).named] == ["w1"]


def test_a_substitute_that_is_as_slow_starts_a_cooldown() -> None:
    cluster = Cluster("aaaa", {2: 2.0, 9: 2.0}).run(30)
    assert [who for _, who in cluster.named] == ["w2"]
    cluster.swap("w2", Worker(id="w9", kind="a"))
    cluster.run(200)
    assert [who for _, who in cluster.named] == ["w2"]
    assert cluster.reasons[1].startswith("w9 is no faster than the worker it replaced: 0.")
    assert cluster.reasons[1].endswith("< 0.80; no replacement for 200 steps")
    cluster.run(50)
    assert [who for _, who in cluster.named] == ["w2", "w9"]


def test_after_a_good_substitute_the_next_straggler_is_named() -> None:
    cluster = Cluster("a" * 6, {2: 3.0, 4: 2.0}).run(30)
    cluster.swap("w2", Worker(id="w9", kind="a"))
    cluster.run(19)
    assert [who for _, who in cluster.named] == ["w2"]
    cluster.run(2)
    assert [who for _, who in cluster.named] == ["w2", "w4"]


def test_the_substitute_is_a_joiner_of_the_same_kind() -> None:
    cluster = Cluster("aaaab", {2: 2.0, 9: 2.0}).run(30)
    cluster.roster.append(Worker(id="w8", kind="b"))  # an unrelated joiner
    cluster.swap("w2", Worker(id="w9", kind="a"))
    cluster.run(1)
    assert cluster.memory.substitute == "w9"


def test_a_named_worker_that_leaves_without_a_substitute_ends_the_attempt() -> None:
    cluster = Cluster("a" * 6, {2: 3.0, 4: 2.0}).run(30)
    cluster.roster = [w for w in cluster.roster if w.id != "w2"]
    assert [who for _, who in cluster.run(1).named] == ["w2", "w4"]


def test_a_substitute_that_is_lost_ends_the_attempt() -> None:
    cluster = Cluster("a" * 6, {2: 3.0, 4: 2.0}).run(30)
    cluster.swap("w2", Worker(id="w9", kind="a"))
    cluster.run(5)
    cluster.roster.pop()
    assert [who for _, who in cluster.run(1).named] == ["w2", "w4"]


def test_giving_up_starts_a_cooldown() -> None:
    cluster = Cluster("aaaa", {2: 2.0}).run(30)
    cluster.memory = give_up(cluster.memory, ON)
    start = cluster.step
    cluster.run(ON.cooldown_steps + 1)
    assert cluster.named[1:] == [(start + ON.cooldown_steps, "w2")]


def test_quiet_steps_count_as_steps() -> None:
    cluster = Cluster("aaaa", {2: 2.0}, balanced=False, report_every=10).run(10)
    assert cluster.named == [(3, "w2")]  # under the threshold for 1, 11 and 21 steps
    cluster.memory = give_up(cluster.memory, ON)
    cluster.run(30)
    assert cluster.named[1:] == [(10 + ON.cooldown_steps // 10, "w2")]


def test_quiet_steps_before_a_slow_step_do_not_count_as_slow() -> None:
    at_once = msgspec.structs.replace(ON, alpha=1.0)
    pause = {2: lambda step: 5.0 if step == 30 else 1.0}
    cluster = Cluster("aaaa", pause, balanced=False, straggler=at_once, report_every=100)
    assert cluster.run(60).named == []


def test_the_traces_of_workers_that_left_are_dropped() -> None:
    cluster = Cluster("aaaa").run(10)
    cluster.roster.pop()
    assert list(cluster.run(1).memory.traces) == ["w0", "w1", "w2"]


def test_reports_of_unknown_workers_are_ignored() -> None:
    cluster = Cluster("aa").run(3)
    stranger = StepReport("w7", 10, 1.0)
    memory, who, _ = judge(cluster.memory, ON, cluster.roster, [stranger])
    assert who is None
    assert list(memory.traces) == ["w0", "w1"]


def test_judging_does_not_modify_its_state_in_place() -> None:
    cluster = Cluster("aaaa", {2: 2.0}).run(10)
    memory, traces = cluster.memory, dict(cluster.memory.traces)
    cluster.run(10)
    assert memory.traces == traces


def test_a_custom_threshold_and_alpha_are_used() -> None:
    strict = msgspec.structs.replace(ON, threshold=0.95, alpha=1.0, warmup_steps=3)
    cluster = Cluster("aaaa", {1: 1.1}, balanced=False, straggler=strict)
    assert cluster.run(10).named == [(3, "w1")]
