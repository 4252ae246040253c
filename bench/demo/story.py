"""What happens in the demo, and what is measured of it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.clusters import Limit
from bench.demo.cores import Cores
from bench.demo.limit import Alone
from bench.demo.phases import Phase, phases
from bench.demo.screen import Screen
from bench.demo.stage import EVENSTEP, DemoError, Stage
from bench.testbed.source_tree import PYTHONPATH
from bench.turns import KEEP_MEMORY
from bench.workloads import ORIGIN
from evenstep.emulate import run_uneven

SCRIPT = Path(__file__).with_name("train.py")
SAVED = "trained.pt"
BOUND_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The workers, what they train, and after how many steps something happens to them."""

    cores: tuple[float, float, float]  # of w0, w1, w2, rising
    batch: int
    epoch: int  # steps
    equal: int  # steps with equal shares
    slow: int  # w2 gets the cores of w1
    kill: int  # w0
    join: int  # w3, with the cores that w2 had
    joined: int  # steps with w3
    max_epochs: int  # in case that w3 takes long to start

    @property
    def samples(self) -> int:
        """Per epoch."""
        return self.batch * self.epoch

    @property
    def clusters(self) -> tuple[tuple[float, ...], ...]:
        """Cores of the workers in each phase."""
        small, middle, large = self.cores
        return (
            (small, middle, large),
            (small, middle, middle),
            (middle, middle),
            (middle, middle, large),
        )


FULL = Story(
    cores=(0.15, 0.3, 0.9),
    batch=1280,
    epoch=8,
    equal=8,
    slow=36,
    kill=56,
    join=66,
    joined=30,
    max_epochs=25,
)
SHORT = Story(
    cores=(0.2, 0.4, 0.8),
    batch=192,
    epoch=4,
    equal=4,
    slow=12,
    kill=20,
    join=24,
    joined=8,
    max_epochs=10_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured: phases with their limits, and the parameters of the run."""

    equal: Phase
    phases: tuple[Phase, ...]
    limits: tuple[Limit, ...]
    spread: float  # of the machine's speed between the turns in which the limit was measured
    difference: float  # of parameters, as a part of what training moved them by
    losses: tuple[float, float]  # of the run, and of one process on the same samples
    num_steps: int  # of both
    report: Path

    @property
    def equal_s(self) -> float:
        """Of a step with equal shares."""
        return self.equal.seconds / self.equal.num_steps

    @property
    def speedup(self) -> float:
        """Of a settled step over equal shares."""
        return self.equal_s / self.phases[0].settled_s

    @property
    def parts(self) -> tuple[float, ...]:
        """Of the limit, in each phase, once its shares have settled."""
        rows = zip(self.phases, self.limits, strict=True)
        return tuple(seconds(limit) / phase.settled_s for phase, limit in rows)

    @property
    def settled_part(self) -> float:
        """Of the limit, over all phases, each as if all of its steps were settled ones."""
        took_s = sum(phase.num_steps * phase.settled_s for phase in self.phases)
        return self._limit_s / took_s

    @property
    def whole_part(self) -> float:
        """Of the limit, with every step and the changes themselves."""
        return self._limit_s / sum(phase.seconds for phase in self.phases)

    @property
    def _limit_s(self) -> float:
        rows = zip(self.phases, self.limits, strict=True)
        return sum(phase.num_steps * seconds(limit) for phase, limit in rows)


def seconds(limit: Limit) -> float:
    """Of a step at the limit."""
    return limit.compute_s + limit.exposed_s


def play(story: Story, folder: Path, screen: Screen, *, quotas: bool) -> Outcome:
    """Train with equal shares, with evenstep while workers change, and in one process."""
    with ExitStack() as cleanup:
        cores = Cores(folder / "alone", cleanup, quotas=quotas)
        each = ", ".join(f"{own:g}" for own in story.cores)
        how = f"sleeping ({cores.refused})" if cores.refused else "CPU quotas"
        screen.say(f"Three workers with {each} cores, by {how}, train a CNN on")
        images = "random images of its size" if ORIGIN.startswith("random") else "its images"
        screen.say(f"Fashion-MNIST ({images}), {story.batch:,} a step.")
        screen.say()
        screen.wait("measuring each worker by itself, for the limit")
        alone = Alone(story.cores, story.batch, story.samples, cores, cleanup)
        alone.measure()

        equal = _train_equal(story, folder / "equal", screen, quotas=quotas)
        alone.measure()
        journal, slowed = _train(story, folder / "evenstep", screen, quotas=quotas)
        alone.measure()
    found = phases(journal, (slowed,), first=1)
    if len(found) != len(story.clusters):
        raise DemoError(f"the run has {len(found)} phases, expected {len(story.clusters)}")
    limits = tuple(alone.limits(story.clusters, found))
    screen.wait("training in one process, on the same samples in the same order")
    many = torch.load(folder / "evenstep" / SAVED)
    one = _train_in_one_process(story, folder, many["epochs"], quotas=quotas)
    screen.clear()
    return Outcome(
        equal=equal,
        phases=tuple(found),
        limits=limits,
        spread=alone.spread,
        difference=_distance(many["end"], one["end"]) / _distance(one["start"], one["end"]),
        losses=(many["loss"], one["loss"]),
        num_steps=many["epochs"] * story.epoch,
        report=_report(folder),
    )


def _train_equal(story: Story, folder: Path, screen: Screen, *, quotas: bool) -> Phase:
    script = _script(story, folder / SAVED, story.equal // story.epoch)
    with ExitStack() as cleanup:
        screen.say("$ evenstep run --workers 3 --policy uniform train.py")
        screen.wait("starting three workers")
        options = ["--policy", "uniform"]
        stage = Stage(folder, options, script, story.cores, screen, cleanup, quotas=quotas)
        (phase,) = phases(stage.finish(), first=1)
    return phase


def _train(story: Story, folder: Path, screen: Screen, *, quotas: bool) -> tuple[Path, int]:
    """Train while workers change. Returns the journal, and the step at which one was slowed."""
    _, middle, large = story.cores
    stop = folder / "stop"
    script = [*_script(story, folder / SAVED, story.max_epochs), "--stop", str(stop)]
    with ExitStack() as cleanup:
        screen.say("$ evenstep run --workers 3 train.py")
        screen.wait("starting three workers")
        options = ["--restarts", "0", "--checkpoint-every", "3600"]
        stage = Stage(folder, options, script, story.cores, screen, cleanup, quotas=quotas)
        stage.step(story.slow)
        slowed = stage.limit("w2", middle)
        screen.say(f"  step {slowed}: w2 is slowed down, from {large:g} to {middle:g} cores")
        screen.say(f"  step {stage.step(story.kill)}: w0 is killed")
        stage.kill("w0")
        started = stage.step(story.join)
        screen.say(f"  step {started}: `evenstep scale RUN 3` starts w3, with {large:g} cores")
        stage.scale(3)
        stage.limit("w3", large)
        joined = stage.trains("w3")
        screen.say(f"  step {joined}: w3 has joined")
        stage.step(joined + story.joined)
        stop.touch()
        return stage.finish(), slowed


def _script(story: Story, saved: Path, epochs: int) -> list[str]:
    size = ["--samples", str(story.samples), "--batch", str(story.batch)]
    return [str(SCRIPT), *size, "--epochs", str(epochs), "--out", str(saved)]


def _train_in_one_process(
    story: Story, folder: Path, epochs: int, *, quotas: bool
) -> dict[str, Any]:
    saved = folder / "one-process.pt"
    threads = str(len(os.sched_getaffinity(0)))
    env = {**KEEP_MEMORY, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": threads}
    env["OMP_WAIT_POLICY"] = "passive"  # on a busy machine, threads that spin wait for each other
    run_uneven(
        [sys.executable, *_script(story, saved, epochs)],
        [math.inf],
        timeout_s=BOUND_S,
        env=env,
        method=None if quotas else "throttle",
        firm=True,
    )
    return dict(torch.load(saved))


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


def _report(folder: Path) -> Path:
    """Both runs side by side, as a page."""
    page = folder / "report.html"
    runs = [str(folder / name / "run") for name in ("evenstep", "equal")]
    subprocess.run(
        [str(EVENSTEP), "report", *runs, "--output", str(page)], check=True, capture_output=True
    )
    return page
