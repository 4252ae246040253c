"""The demo's cluster in the simulator: steps as uneven as CPU quotas make them."""

from __future__ import annotations

import pytest

from evenstep.config import Choice
from evenstep.simulate.run import compare_policies
from evenstep.simulate.scenario import Scenario
from evenstep.strict import build

CORES = (0.15, 0.3, 0.9)
SETTLE = 36  # steps before anything happens in the demo


@pytest.mark.parametrize("seed", range(3))
def test_auto_settles_within_5_percent_of_the_limit_noise_included(seed: int) -> None:
    workers = [
        {"kind": "cpu", "fixed_s": 0.003 / own, "per_sample_s": 0.0005 / own, "jitter": 0.045}
        for own in CORES
    ]
    scenario = build(
        Scenario,
        {
            "steps": 120,
            "seed": seed,
            "settings": {"batch": {"size": 1280, "min_share": 1}},
            "workers": workers,
        },
        source="test",
    )
    auto, _ = compare_policies(scenario, [Choice("auto")])
    limit_s, step_s = auto.limit_s[SETTLE:].sum(), auto.step_s[SETTLE:].sum()
    assert limit_s / step_s > 0.95
