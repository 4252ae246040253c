"""`Balancer`: reports in, shares out, no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Balancer
from evenstep.decide.batching import POLICIES
from evenstep.errors import ConfigError, InvalidInputError, PausedError
from evenstep.journal import Journal, read
from evenstep.types import Worker
from tests.hypothesis_examples import examples

PACE = {"a": 0.001, "b": 0.002, "c": 0.004}


def train(balancer: Balancer, num_steps: int) -> dict[str, int]:
    for _ in range(num_steps):
        for worker, share in balancer.shares().items():
            balancer.report(worker, 0.001 + PACE[worker] * share if share else 0.0)
    return balancer.shares()


def test_shares_follow_speed() -> None:
    shares = train(Balancer(700, PACE), 10)
    assert abs(shares["a"] - 400) <= 2
    assert abs(shares["b"] - 200) <= 2


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "fixed"])
def test_every_policy_keeps_the_batch(policy: str) -> None:
    balancer = Balancer(700, PACE, policy=policy)
    assert sum(train(balancer, 20).values()) == 700


def test_options_of_a_policy_are_given_with_its_name() -> None:
    balancer = Balancer(21, ["a", "b", "c"], policy={"name": "fixed", "shares": [2, 4, 15]})
    assert balancer.shares() == {"a": 2, "b": 4, "c": 15}


def test_caps_are_kept() -> None:
    balancer = Balancer(700, [Worker(id="a", cap=250), Worker(id="b"), Worker(id="c")])
    assert train(balancer, 15)["a"] == 250


def test_workers_come_and_go() -> None:
    balancer = Balancer(600, ["a", "b"])
    train(balancer, 5)
    balancer.join("c")
    assert sum(train(balancer, 8).values()) == 600
    balancer.leave("a")
    shares = train(balancer, 8)
    assert shares.keys() == {"b", "c"}
    assert abs(shares["b"] - 400) <= 5


def test_a_step_may_miss_a_report() -> None:
    balancer = Balancer(700, PACE)
    balancer.shares()
    balancer.report("a", 0.4)
    assert sum(balancer.shares().values()) == 700


def test_number_types_of_other_libraries_are_accepted(tmp_path: Path) -> None:
    with Balancer(np.int64(700), PACE, journal=tmp_path / "journal.jsonl") as balancer:
        for worker, share in balancer.shares().items():
            balancer.report(worker, np.float32(0.1), samples=np.int64(share))
        assert sum(balancer.shares().values()) == 700
    Journal.resume(tmp_path / "journal.jsonl").close()


def test_a_join_completes_the_reported_step() -> None:
    balancer = Balancer(700, ["a", "b"])
    balancer.report("a", 0.1)
    balancer.report("b", 0.4)
    balancer.join("c")
    shares = balancer.shares()
    assert shares["a"] > 2 * shares["b"]


def test_a_pause_is_raised_until_it_is_over() -> None:
    balancer = Balancer(8, [Worker(id="a", cap=4), Worker(id="b", cap=4)])
    with pytest.raises(PausedError):
        balancer.leave("b")
    with pytest.raises(PausedError, match="does not fit 1 workers"):
        balancer.shares()
    balancer.join(Worker(id="c", cap=6))
    assert balancer.shares() == {"a": 4, "c": 4} or sum(balancer.shares().values()) == 8


def test_the_last_plan_says_why() -> None:
    balancer = Balancer(700, PACE)
    train(balancer, 3)
    assert "is slowest" in balancer.reason


def test_a_run_can_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    train(Balancer(700, PACE, journal=path), 4)
    _, records = read(path)
    assert len(list(records)) == 5  # the join and four steps


def test_caps_that_cannot_hold_the_batch_are_refused_with_the_numbers() -> None:
    with pytest.raises(PausedError, match="a batch of 700 does not fit 1 workers that hold 10"):
        Balancer(700, [Worker(id="a", cap=10)])


def test_a_refused_start_leaves_no_journal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean auto"):
        Balancer(700, PACE, policy="atuo", journal=tmp_path / "journal.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("worker", "seconds", "says"),
    [
        ("x", 0.1, "no worker x; the workers are a, b, c"),
        ("a", -0.1, "compute_s"),
        ("a", float("nan"), "compute_s"),
        ("a", 0.0, "is 0 for 234 samples"),
    ],
)
def test_an_invalid_report_is_refused(worker: str, seconds: float, says: str) -> None:
    balancer = Balancer(700, PACE)
    with pytest.raises(InvalidInputError, match=says):
        balancer.report(worker, seconds)
    assert sum(train(balancer, 2).values()) == 700


def test_reporting_twice_is_refused() -> None:
    balancer = Balancer(700, PACE)
    balancer.report("a", 0.1)
    with pytest.raises(InvalidInputError, match="a has already reported this step"):
        balancer.report("a", 0.1)


@pytest.mark.parametrize("workers", [[], ["a", "a"], "gpu", [0, 1]])
def test_workers_must_be_distinct_and_at_least_one(workers: list[str]) -> None:
    with pytest.raises(InvalidInputError):
        Balancer(8, workers)


@pytest.mark.parametrize("batch", [0, -3])
def test_a_batch_must_be_one_or_more(batch: int) -> None:
    with pytest.raises(ConfigError, match="batch"):
        Balancer(batch, ["a"])


def test_an_argument_of_the_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="batch: expected a whole number, 1 or more, got '5'"):
        Balancer("5", ["a"])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="workers: expected a list of names, got 3"):
        Balancer(5, 3)  # type: ignore[arg-type]
    balancer = Balancer(700, PACE)
    with pytest.raises(ConfigError, match="seconds: expected a number, got 'fast'"):
        balancer.report("a", "fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"samples: expected a whole number, got 1\.5"):
        balancer.report("a", 0.1, samples=1.5)  # type: ignore[arg-type]
    assert sum(train(balancer, 2).values()) == 700


@examples(50)
@given(st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=3), st.integers(3, 5000))
def test_any_speeds_keep_the_batch(pace: list[float], batch: int) -> None:
    balancer = Balancer(batch, PACE)
    for _ in range(4):
        for (worker, share), per_sample in zip(balancer.shares().items(), pace, strict=True):
            balancer.report(worker, per_sample * share)
    assert sum(balancer.shares().values()) == batch


def test_a_decision_imports_nothing() -> None:
    # NumPy imports parts of itself on first use: that must not happen during a decision.
    code = (
        "import sys, evenstep; b = evenstep.Balancer(512, ['a', 'b', 'c'])\n"
        "before = set(sys.modules)\n"
        "for step in range(20):\n"
        "    for i, (worker, share) in enumerate(b.shares().items()):\n"
        "        b.report(worker, 0.001 + 0.001 * share * (1 + i))\n"
        "assert not set(sys.modules) - before, set(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_torch_is_never_imported() -> None:
    code = (
        "import sys, evenstep; b = evenstep.Balancer(8, ['a', 'b']);"
        "b.report('a', 1.0); b.shares();"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
