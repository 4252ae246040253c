"""The size search, growing batches, stragglers and spares in real runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from bench.testbed.cli_run import CliRun
from bench.testbed.live_run import HELD, LiveRun, same

from evenstep.journal import Record, read
from evenstep.simulate.run import run as simulate
from evenstep.simulate.scenario import Scenario, WorkerGroup
from evenstep.types import AnyAction, Drain, Launch, LaunchFailed, Plan, Regroup, Stay, StepDone
from tests.faults.cluster import Cluster
from tests.faults.conftest import Alone

# With 20 ms per sample, at least 160 ms per step and a batch of 24, four workers are no faster than
# three. Steps this long stand out from the noise of a busy machine.
KNEE = ["--per-sample", "0.02", "--floor", "0.16"]
SEARCH = (
    "scaling.period_steps=5",
    "scaling.step_workers=1",
    "scaling.settle_steps=10",
    "policy=uniform",
)
# These depend on measured step times, which a busy machine may distort: only in `make test-long`.
timed = pytest.mark.long

QUIET_STEPS = 20  # long enough for another decision, if one were due

ONLY_W0 = """
import os

if os.environ["EVENSTEP_WORKER"] != "w0":
    raise SystemExit(3)

from bench.testbed.train import main

main()
"""


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def actions(run: LiveRun) -> list[AnyAction]:
    return [action for record in journal(run) for action in record.actions]


def journal(run: LiveRun) -> list[Record]:
    return list(read(run.folder / "journal.jsonl")[1])


def until_decided(run: LiveRun, holds: Callable[[list[AnyAction]], bool]) -> list[AnyAction]:
    """Wait until the journal's actions satisfy a condition, then `QUIET_STEPS` more; returns all.

    To be called while the run is held: emulated step times end with `go()`.
    """
    run.until_step(0)  # the journal exists by then
    status = run.until(lambda _: holds(actions(run)))
    run.until_step(status["step"] + QUIET_STEPS)
    return actions(run)


def stayed(taken: list[AnyAction], why: str) -> bool:
    """Whether there was a decision to stay with this reason."""
    return any(isinstance(action, Stay) and why in action.reason for action in taken)


def sizes(taken: list[AnyAction]) -> list[int]:
    return [len(action.roster) for action in taken if isinstance(action, Regroup)]


@timed
def test_the_search_finds_the_knee_and_says_why(tmp_path: Path, alone: Alone) -> None:
    options = ["--scale", "efficiency:threshold=0.6", *sets(*SEARCH)]
    with CliRun(tmp_path, workers="1:5", options=options, args=[*HELD, *KNEE]) as run:
        taken = until_decided(run, lambda taken: stayed(taken, "settle at 3"))
        assert sizes(taken) == [1, 2, 3, 4, 3]
        check_simulator_agrees(run)
        assert run.finish() == 0
        assert all(same(end, alone(*run.epochs)) for end in run.results().values())


def check_simulator_agrees(run: LiveRun) -> None:
    """The simulator, given the measured speeds, visits the same sizes with similar step times."""
    settings, live = read(run.folder / "journal.jsonl")
    measured_s = step_seconds(list(live))
    throughput = {24 // n: 24 / n / measured_s[n] for n in (1, 2, 3)}  # samples/s by share
    first = WorkerGroup(throughput=throughput, startup_s=1.0)
    pool = WorkerGroup(throughput=throughput, startup_s=1.0, count=4)
    length = 22 * 240  # more than it takes to settle
    scenario = Scenario(settings=settings.settings, workers=(first,), pool=(pool,), samples=length)
    path = run.folder / "predicted.jsonl"
    simulate(scenario, journal=path)
    virtual = list(read(path)[1])
    assert sizes([action for record in virtual for action in record.actions]) == [1, 2, 3, 4, 3]
    predicted_s = step_seconds(virtual)
    for n in (1, 2, 3):
        assert predicted_s[n] == pytest.approx(measured_s[n], rel=0.1)


def step_seconds(records: list[Record]) -> dict[int, float]:
    """Median step time by cluster size."""
    seconds: dict[int, list[float]] = {}
    for record in records:
        if isinstance(record.event, StepDone):
            seconds.setdefault(len(record.event.reports), []).append(record.event.seconds)
    return {n: median(all_s) for n, all_s in seconds.items()}


def test_a_batch_that_grows_with_the_workers(tmp_path: Path) -> None:
    """Each sample is used once per epoch, and the learning rate follows the batch."""
    args = [*HELD, "--per-worker", "8", "--limit", "24"]
    given = ("batch.lr_rule=linear", "batch.lr_warmup_steps=5", "workers.max=4")
    with Cluster(tmp_path, workers=1, max_workers=4, sets=given, args=args) as run:
        for num in (2, 3, 4):
            step = run.until_training(num - 1)["step"]
            run.until_step(step + 10)
            run.ask("scale", num_workers=num)
        generation = run.until_training(4)["generation"]
        run.signal("w1")
        run.until_training(3, after=generation)
        assert run.finish() == 0
        ends = list(run.results().values())
        first, *others = ends
        for other in others:
            for name, tensor in first["model"].items():
                torch.testing.assert_close(other["model"][name], tensor, rtol=0, atol=1e-12)
        (num_epochs,) = {end["epochs"] for end in ends}
        assert {end["samples"] for end in ends} == {240 * num_epochs}
        (whole,) = [end["steps"] for end in ends if len(end["steps"]) == end["step"]]
        assert {batch for _, batch in whole} >= {8, 16, 24}
        plans = [a for a in actions(run) if isinstance(a, Plan)]
        assert all(p.lr_factor == sum(p.shares.values()) / 8 for p in plans)


def test_adascale_follows_the_noise_of_the_gradients(tmp_path: Path) -> None:
    args = [*HELD, "--per-worker", "8", "--limit", "32"]
    given = ("batch.lr_rule=adascale", "policy=uniform")
    with Cluster(tmp_path, workers=3, sets=given, args=args) as run:
        until_decided(
            run, lambda taken: any(isinstance(a, Plan) and a.lr_factor > 1.0 for a in taken)
        )
        assert run.finish() == 0
        plans = [a for a in actions(run) if isinstance(a, Plan)]
        assert plans[0].lr_factor == 1.0  # no estimate yet
        assert all(1.0 <= p.lr_factor <= 3.0 for p in plans)


@timed
def test_a_straggler_is_drained_once_its_substitute_has_joined(
    tmp_path: Path, alone: Alone
) -> None:
    slow = ["--slow", "w1", "--slow-from", "20", "--per-sample", "0.006"]
    options = sets("straggler.replace=true", "straggler.warmup_steps=5", "policy=uniform")
    with CliRun(tmp_path, workers="3", options=options, args=[*HELD, *slow]) as run:
        taken = until_decided(run, lambda taken: len(sizes(taken)) > 2)
        (ordered,) = [a for a in taken if isinstance(a, Launch)]
        (drained,) = [a for a in taken if isinstance(a, Drain)]
        assert "replace w1" in ordered.reason
        assert (drained.worker, "replaced by" in drained.reason) == ("w1", True)
        assert sizes(taken) == [3, 4, 3]
        assert run.finish() == 0
        assert sorted(run.results()) == ["w0", "w2", "w3"]
        assert all(same(end, alone(*run.epochs)) for end in run.results().values())


@timed
def test_a_substitute_that_is_no_faster_ends_the_attempt(tmp_path: Path) -> None:
    slow = ["--slow", "w1,w3", "--slow-from", "20", "--per-sample", "0.006"]
    given = ("straggler.replace=true", "straggler.warmup_steps=5", "straggler.cooldown_steps=9999")
    options = sets(*given, "policy=uniform")
    with CliRun(tmp_path, workers="3", options=options, args=[*HELD, *slow]) as run:
        why = "w3 is no faster than the worker it replaced"
        taken = until_decided(run, lambda taken: stayed(taken, why))
        assert sizes(taken) == [3, 4, 3]
        assert run.finish() == 0


@timed
def test_a_slowdown_of_all_workers_replaces_none(tmp_path: Path) -> None:
    slow = ["--slow", "w0,w1,w2", "--slow-from", "20", "--per-sample", "0.004"]
    options = sets("straggler.replace=true", "straggler.warmup_steps=5", "policy=uniform")
    with CliRun(tmp_path, workers="3", options=options, args=[*HELD, *slow]) as run:
        run.until_step(70)
        assert sizes(actions(run)) == [3]
        assert run.finish() == 0


def test_a_spare_rejoins_without_a_restart(tmp_path: Path, alone: Alone) -> None:
    with Cluster(tmp_path, workers=2, max_workers=3, spares=1, args=HELD) as run:
        run.until_training(2)
        run.ask("scale", num_workers=3)
        status, there = run.until_training(3), run.pids()
        for _ in range(2):
            run.ask("scale", num_workers=2)
            status = run.until_training(2, after=status["generation"])
            (spare,) = [w for w in run.status()["workers"] if w["state"] == "spare"]
            run.until_step(status["step"] + 25)  # more than an epoch
            run.ask("scale", num_workers=3)
            status = run.until_training(3, after=status["generation"])
            assert run.pids() == there
            assert spare["worker"] in there
        run.ask("scale", num_workers=2)
        assert run.finish() == 0
        assert all(same(end, alone(*run.epochs)) for end in run.results().values())


def test_failed_launches_are_recorded_and_training_continues(tmp_path: Path) -> None:
    script = tmp_path / "only_w0.py"
    script.write_text(ONLY_W0)
    given = ("scaling.heuristic=efficiency", "workers.max=4", "scaling.min_workers=1", *SEARCH)
    with Cluster(tmp_path, workers=1, max_workers=4, sets=given, args=HELD, script=script) as run:
        reasons = ("did not start", "the last launch failed")
        until_decided(run, lambda taken: all(stayed(taken, why) for why in reasons))
        assert any(isinstance(record.event, LaunchFailed) for record in journal(run))
        assert run.finish() == 0
