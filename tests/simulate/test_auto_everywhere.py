"""The promises of docs/policies.md about `auto`, on every shipped scenario."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from evenstep.config import Choice
from evenstep.simulate.result import Result
from evenstep.simulate.run import compare_policies, run
from evenstep.simulate.scenario import Scenario, load_scenario

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"
OTHERS = ("uniform", "static", "proportional", "predictive", "curve", "shift")
SHORTER = {"thousand": ["steps=60"]}


@cache
def load(name: str) -> Scenario:
    return load_scenario(SCENARIOS / f"{name}.yaml", SHORTER.get(name, []))


def named(*, static: bool) -> list[str]:
    found = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    return [name for name in found if not static or _nothing_changes(load(name))]


def _nothing_changes(scenario: Scenario) -> bool:
    fates = ("changes", "leaves_at_s", "fails_at_s", "joins_at_s")
    return not any(getattr(group, fate) for group in scenario.workers for fate in fates)


def after_ten(result: Result) -> float:
    return float(np.sum(result.step_s[10:]))


@pytest.mark.parametrize("name", named(static=True))
def test_auto_is_within_two_per_cent_of_the_limit_ten_steps_after_equal_shares(name: str) -> None:
    scenario = load(name)
    auto = run(scenario, Choice("auto", {"start": "uniform"}))
    limit = run(scenario, Choice("limit"))
    assert after_ten(auto) <= 1.02 * after_ten(limit)


# The slowest scenarios, several seconds each, are left to `make test-long`.
SLOW = {
    "bert-like",
    "equal",
    "interference",
    "interference-unannounced",
    "knee",
    "noisy",
    "omnilearn",
    "quota-change",
    "spot",
    "thermal",
    "thousand",
    "two-cards",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in named(static=False)],
)
def test_auto_is_never_more_than_one_per_cent_behind_another_policy(name: str) -> None:
    *results, auto, _ = compare_policies(load(name), [Choice(p) for p in (*OTHERS, "auto")])
    best = max(results, key=lambda r: r.samples_per_s)
    assert auto.samples_per_s >= 0.99 * best.samples_per_s, best.policy
