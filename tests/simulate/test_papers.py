"""The papers' scenarios run, and the claims of docs/papers.md about them hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.papers import CIFAR, IMAGENET, SCENARIOS, TABLES, Published, job
from bench.papers import scenario as load
from bench.tables import DOCS
from msgspec.structs import replace

from evenstep.config import Choice, ScalingSettings, StragglerSettings
from evenstep.simulate.run import run
from evenstep.simulate.scenario import Scenario

WORKLOADS = ("resnet50", "mnist", "regression")
LEVELS = (1, 2, 6, 10)


def seconds(scenario: Scenario, policy: str, steps: int = 80) -> float:
    return run(replace(scenario, samples=0, steps=steps), Choice(policy)).time_s


def started_with(name: str, size: int) -> Scenario:
    scenario = load(name)
    pool = min(scenario.pool[0].count, scenario.settings.workers.max - size)
    return replace(
        scenario,
        workers=(replace(scenario.workers[0], count=size),),
        pool=(replace(scenario.pool[0], count=pool),) if pool else (),
    )


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_runs_and_names_its_source(path: Path) -> None:
    scenario = load(path.stem)
    assert scenario.about
    assert scenario.paper is not None
    assert scenario.paper.source
    assert run(replace(scenario, samples=0, steps=10)).num_steps == 10


def test_every_table_has_been_made() -> None:
    page = (DOCS / "papers.md").read_text(encoding="utf-8")
    for name in TABLES:
        _, _, rest = page.partition(f"<!-- {name}: made by make tables -->")
        assert rest.partition(f"<!-- end of {name} -->")[0].count("\n|") > 3


@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_levels_of_a_workload_are_one_model_of_39_cores(workload: str) -> None:
    scenarios = {level: load(f"cores-{workload}-h{level}") for level in LEVELS}
    first = scenarios[1].workers[0]
    fixed_samples = first.fixed_s / first.per_sample_s
    one_core_s = first.per_sample_s / (0.02 + 0.98 / first.cores)
    for level, scenario in scenarios.items():
        cores = [group.cores for group in scenario.workers for _ in range(group.count)]
        assert sum(cores) == 39
        assert max(cores) / min(cores) == level
        for group in scenario.workers:
            per_sample_s = one_core_s * (0.02 + 0.98 / group.cores)
            assert group.per_sample_s == pytest.approx(per_sample_s, rel=1e-3)
            assert group.fixed_s == pytest.approx(fixed_samples * per_sample_s, rel=1e-3)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("level", [2, 6, 10])
def test_on_uneven_cores_each_method_beats_the_one_before(workload: str, level: int) -> None:
    scenario = load(f"cores-{workload}-h{level}")
    equal, static, loop, auto = (seconds(scenario, choice.name) for choice in scenario.policies)
    assert equal > static
    assert static > 0.99 * loop
    assert 1.01 * loop > auto


@pytest.mark.parametrize("level", [6, 10])
@pytest.mark.parametrize("policy", ["uniform", "static"])
def test_resnet_on_uneven_cores_takes_as_long_as_in_the_paper(level: int, policy: str) -> None:
    alike, scenario = load("cores-resnet50-h1"), load(f"cores-resnet50-h{level}")
    assert scenario.paper is not None
    ours = 220 * seconds(scenario, policy, steps=20) / seconds(alike, "uniform", steps=20)
    assert ours == pytest.approx(scenario.paper.figures[policy], rel=0.15)


def test_a_worker_with_two_cores_is_better_left_out() -> None:
    name = "cores-resnet50-h10"
    all_work = load(name, "settings.batch.min_share=1")
    assert seconds(all_work, "auto") > 2 * seconds(load(name), "auto")


def test_published_curves_give_the_published_gain_of_a_gpu_over_a_cpu() -> None:
    scenario = load("gpu-cpu-resnet50")
    gain = seconds(scenario, "uniform", steps=20) / seconds(scenario, "static", steps=20)
    assert gain == pytest.approx(376 / 104, rel=0.15)
    assert seconds(scenario, "proportional") < 0.9 * seconds(scenario, "static")


def test_seeing_free_cpu_saves_more_than_seeing_past_speeds() -> None:
    past, ahead = (
        seconds(load("lbbsp-cpu", f"settings.forecaster={name}"), "predictive", steps=300)
        for name in ("last", "narx")
    )
    equal = seconds(load("lbbsp-cpu"), "uniform", steps=300)
    assert equal > 1.3 * past
    assert past > 1.05 * ahead


@pytest.mark.parametrize("policy", ["curve", "shift", "auto"])
def test_a_mix_of_gpus_is_balanced_without_labels(policy: str) -> None:
    scenario = load("lbbsp-gpu")
    assert seconds(scenario, policy, steps=200) < 0.65 * seconds(scenario, "uniform", steps=200)


@pytest.mark.parametrize(
    ("name", "paper", "size", "target", "off_s"),
    [("autoscale-cifar10", CIFAR, size, 4, 8) for size in CIFAR.static_s]
    + [("autoscale-imagenet", IMAGENET, size, 64, 20) for size in (48, 56, 64)],
)
def test_the_search_finds_the_papers_size_when_the_paper_does(
    name: str, paper: Published, size: int, target: int, off_s: float
) -> None:
    found = job(started_with(name, size), steps=700)
    assert found.num_workers == target
    assert found.found_s == pytest.approx(paper.found_s[size], abs=off_s)
    assert found.total_s == pytest.approx(paper.scaled_s[size], rel=0.11)


@pytest.mark.parametrize("size", CIFAR.static_s)
def test_with_restarts_the_search_costs_more_than_it_saves(size: int) -> None:
    scenario = started_with("autoscale-cifar10", size)
    fixed = replace(scenario, settings=replace(scenario.settings, scaling=ScalingSettings()))
    pool = tuple(replace(group, startup_s=0.0) for group in scenario.pool)
    restarted = replace(scenario, pool=pool, regroup_s=CIFAR.restart_s)
    assert job(restarted, steps=700).total_s > job(fixed, steps=20).total_s


@pytest.mark.long
def test_more_expensive_workers_make_a_smaller_cluster() -> None:
    scenario = load("autoscale-utility", 'settings.scaling.heuristic.linear="10,10800"')
    sizes = []
    for price in (0.01, 0.1, 1.0, 10.0):
        workers = (replace(scenario.workers[0], price=price),)
        pool = (replace(scenario.pool[0], price=price),)
        sizes.append(job(replace(scenario, workers=workers, pool=pool), steps=2000).num_workers)
    assert sizes == [32, 16, 8, 4]


def test_balancing_helps_at_once_and_replacing_in_the_long_run() -> None:
    scenario = load("stragglers")
    left = replace(scenario, settings=replace(scenario.settings, straggler=StragglerSettings()))
    equal, balanced = (seconds(left, policy, steps=60) for policy in ("uniform", "auto"))
    assert equal > 1.4 * balanced
    replaced = run(scenario, Choice("uniform"))
    assert replaced.step_s[-100:].sum() < 0.65 * replaced.step_s[:100].sum()
