"""Scenarios are read strictly, and the shipped ones are valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from evenstep.errors import ConfigError
from evenstep.simulate.run import compare_policies
from evenstep.simulate.scenario import Communication, Scenario, load_scenario
from evenstep.strict import build

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"

SHIPPED = sorted(Path(__file__).parents[2].joinpath("scenarios").rglob("*.yaml"))


def plain(**changes: Any) -> dict[str, Any]:
    return {
        "steps": 10,
        "settings": {"batch": {"size": 8}},
        "workers": [{"kind": "cpu", "per_sample_s": 0.01}],
        **changes,
    }


def one(**changes: Any) -> dict[str, Any]:
    return plain(workers=[{"per_sample_s": 0.01, **changes}])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_scenario_describes_itself(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.about
    assert path.read_text().startswith("# ")


def test_the_scenarios_named_in_the_docs_exist() -> None:
    named = "four-uneven equal two-cards bert-like knee interference interference-unannounced"
    more = "thermal quota-change omnilearn spot thousand noisy"
    assert {*named.split(), *more.split()} <= {path.stem for path in SHIPPED}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (one(pirce=3), "unknown setting workers.0.pirce; did you mean price?"),
        (plain(stps=3), "unknown setting stps; did you mean steps?"),
        (plain(settings={"batch": {"sise": 8}}), "unknown setting settings.batch.sise; did you"),
        (one(changes=[{"factr": 2}]), "unknown setting workers.0.changes.0.factr; did you mean"),
        (one(changes=[{"at_s": 2}]), "workers.0.changes.0.factor: is missing"),
        (one(count="three"), 'workers.0.count: expected int, got "three"'),
        (one(count=0), "workers.0.count: must be 1 or more, got 0"),
        (one(per_sample_s=0), "workers.0: give a step time"),
        (one(throughput={1: 10}), "workers.0: give a step time"),
        (one(jitter=float("nan")), "workers.0.jitter: must be 0 or more, got nan"),
        (one(fails_at_s=0), "workers.0.fails_at_s: must be after the join at 0.0 s, got 0"),
        (one(joins_at_s=5, leaves_at_s=4), "workers.0.leaves_at_s: must be after the join at 5"),
        (
            one(changes=[{"factor": 2, "at_s": 3, "until_s": 3}]),
            "changes.0.until_s: must be after at_s (3.0), got 3.0",
        ),
        (one(changes=[{"factor": 2, "every_s": 3}]), "changes.0.until_s: is missing"),
        (
            one(changes=[{"factor": 2, "until_s": 4, "every_s": 3}]),
            "changes.0.every_s: must be at least until_s - at_s (4",
        ),
        (plain(workers=[{"throughput": {1: 10, 2: 30}}]), "throughput: 2 samples take less time"),
        (plain(workers=[{"throughput": {0: 10}}]), "throughput: must be above 0"),
        (plain(workers=[]), "workers: is empty"),
        (plain(samples=10), "as either steps or samples"),
        (plain(steps=0), "as either steps or samples, 1 or more: "),
        (plain(communication={"bytes_per_s": 0}), "communication.bytes_per_s: must be above 0"),
        ([], "expected a mapping of settings"),
    ],
)
def test_an_invalid_scenario_is_refused_with_the_path_of_the_error(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        build(Scenario, data, source="s.yaml")
    assert message in str(e.value)
    assert "(s.yaml)" in str(e.value)


def test_settings_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("steps: 3\nsettings: {batch: {size: 8}}\nworkers: [{fixed_s: 1}]\n")
    scenario = load_scenario(path, ["steps=7", "settings.batch.size=16", "settings.policy=uniform"])
    assert scenario.steps == 7
    assert scenario.settings.batch.size == 16
    assert scenario.settings.policy.name == "uniform"


def test_a_ring_costs_latency_per_hop_and_bandwidth_by_size() -> None:
    ring = Communication(latency_s=0.001, model_bytes=100.0, bytes_per_s=1000.0)
    assert ring.seconds(1) == 0.0
    assert ring.seconds(2) == pytest.approx(0.001 * 2 + 1.0 * 0.1)
    assert ring.seconds(4) == pytest.approx(0.001 * 6 + 1.5 * 0.1)


def test_the_scenario_in_the_docs_can_be_run() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "simulator.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    scenario = build(Scenario, {**yaml.safe_load(text), "steps": 5})
    assert [r.policy for r in compare_policies(scenario)] == ["uniform", "shift", "auto", "limit"]


def test_one_worker_of_a_list_can_be_set() -> None:
    scenario = load_scenario(SCENARIOS / "four-uneven.yaml", ["workers.1.price=7"])
    assert [group.price == 7 for group in scenario.workers] == [False, True, False, False]
