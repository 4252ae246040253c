"""The cost of roster changes: joins, leaves and losses, compared with other systems.

    python -m bench.transitions                    # everything: about half an hour
    python -m bench.transitions evenstep torchft   # some of: evenstep restart torchrun torchft

Each system trains the same network in the same number of processes on this machine, one system
after the other. The tables go to docs/bench.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.jobs import (
    BIN,
    BOUND_S,
    ROOT,
    Commit,
    Evenstep,
    Job,
    Restart,
    StuckError,
    Torchft,
    TorchftTuned,
    Torchrun,
    TorchrunAgents,
    torchft_python,
)
from bench.tables import markdown, write

MADE_BY = "python -m bench.transitions"
TORCHFT = "2026.10.26"
SETTLED = {"cnn": 15, "large": 3}  # steps in one roster before the next change
STATE_BYTES = 2 * 6 * (4096 + 1) * 4096 * 4  # of the large model: parameters and momentum
SIZES = (3, 5)
LOSSES = ["a loss, evenstep", "computing a step that is void", "until training goes on"]
CHANGES = ("nothing", "join", "leave", "loss")

Change = str
"""join, leave or loss; or nothing, as a baseline of the measurement."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one change: idle seconds, and committed steps that must be repeated."""

    idle_s: float
    lost: int
    void_s: float = 0.0  # part of idle_s: computing a step that is already void


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that handles roster changes, and the changes that it supports."""

    name: str
    kind: type[Job]
    changes: tuple[Change, ...]
    rounds: dict[str, int]


ONCE = {"cnn": 1, "large": 1}
SYSTEMS = {
    "evenstep": (
        System(
            name="evenstep",
            kind=Evenstep,
            changes=("nothing", "leave", "join", "loss", "join"),
            rounds={"cnn": 4, "large": 6},
        ),
    ),
    "restart": (
        System(
            name="checkpoint-restart",
            kind=Restart,
            changes=("nothing", "leave", "join", "loss", "join"),
            rounds=ONCE,
        ),
    ),
    "torchrun": (
        System(name="torchrun, one agent", kind=Torchrun, changes=("nothing", "loss"), rounds=ONCE),
        System(
            name="torchrun, an agent each",
            kind=TorchrunAgents,
            changes=("nothing", "leave", "join"),
            rounds=ONCE,
        ),
    ),
    "torchft": (
        System(
            name="torchft",
            kind=Torchft,
            changes=("nothing", "loss", "join", "leave", "join"),
            rounds=ONCE,
        ),
        System(
            name="torchft, heartbeat 1 s",
            kind=TorchftTuned,
            changes=("nothing", "loss", "join", "leave", "join"),
            rounds=ONCE,
        ),
    ),
}


def measure(system: System, model: str, num_workers: int) -> dict[Change, list[Cost]]:
    """The costs of each change, over several rounds in one job."""
    costs: dict[Change, list[Cost]] = {change: [] for change in system.changes}
    with tempfile.TemporaryDirectory() as folder:
        job = system.kind(Path(folder), ["--model", model], num_workers)
        try:
            with job:
                started_s = settled(job, model, 0.0)
                for turn in range(system.rounds[model]):
                    for change in system.changes:
                        cost, started_s = measure_change(job, model, change, turn, started_s)
                        costs[change].append(cost)
                        print(f"  {change}: {cost.idle_s:.3f} s idle, {cost.void_s:.3f} void")
        except StuckError as e:
            print(f"  {e}\n" + Path(folder, "log").read_text()[-1500:])
    return costs


def measure_change(
    job: Job, model: str, change: Change, turn: int, since_s: float
) -> tuple[Cost, float]:
    """Make one change and wait until all workers train again."""
    before = [c for c in job.commits() if c.at_s >= since_s]
    # At a different point of a step each time: during compute, during reduction, at the end.
    time.sleep((0.1 + 0.37 * turn) % 1.0 * median_step_s(steps_of(before)))
    asked_s = time.monotonic()
    if change == "loss":
        job.lose((turn + 1) % job.world)
    elif change != "nothing":
        (job.join if change == "join" else job.leave)()

    def fresh(commit: Commit) -> bool:
        if commit.at_s < asked_s:
            return False
        return job.after_loss(before, commit) if change == "loss" else commit.world == job.world

    steps = steps_of(wait(job, lambda c: any(map(fresh, steps_of(c))), f"no step after {change}"))
    first = next(filter(fresh, steps))
    last = max(c for c in steps if c.at_s < first.at_s)
    settled(job, model, first.at_s)
    steps = steps_of(job.commits())
    # A joiner's start-up slows the machine down, which must not count; otherwise all gaps count.
    from_s = last.at_s if change == "join" else asked_s
    if change in ("leave", "nothing"):
        from_s = max(c.at_s for c in steps if c.at_s <= asked_s)
    # Each gap minus a median step of the roster that ended it, because fewer workers are faster on
    # one machine. No gaps after the new roster's first step: their maximum would only show noise.
    median_s = {
        True: median_step_s([c for c in steps if since_s <= c.at_s < first.at_s]),
        False: median_step_s([c for c in steps if c.at_s >= first.at_s]),
    }
    ends_s = [
        (from_s, True),
        *((c.at_s, c < first) for c in steps if from_s < c.at_s <= first.at_s),
    ]
    idle_s = max(b - a - median_s[before] for (a, _), (b, before) in pairwise(ends_s))
    void_s = job.computed_s(asked_s) - asked_s if change == "loss" else 0.0
    return Cost(max(0.0, idle_s), max(0, last.step + 1 - first.step), void_s), first.at_s


def steps_of(commits: Iterable[Commit]) -> list[Commit]:
    """The first commit of each step; a step repeated after a restart counts again."""
    steps: list[Commit] = []
    left = 0  # workers that have not committed the newest step yet
    for commit in sorted(commits):
        if not left or commit.step != steps[-1].step:
            steps.append(commit)
            left = commit.world
        left -= 1
    return steps


def median_step_s(steps: Sequence[Commit]) -> float:
    """Median step time."""
    return median([b.at_s - a.at_s for a, b in pairwise(steps)] or [0.0])


def settled(job: Job, model: str, since_s: float) -> float:
    """Wait until the whole roster has taken some steps since `since_s`, which is returned."""

    def trained(commits: Sequence[Commit]) -> bool:
        steps = [c.step for c in commits if c.at_s >= since_s and c.world == job.world]
        return len(set(steps)) > SETTLED[model]

    wait(job, trained, f"{job.world} workers do not train")
    return since_s


def wait(job: Job, holds: Callable[[list[Commit]], bool], why: str) -> list[Commit]:
    """Wait until a condition holds for the commits. Returns them."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        if holds(commits := job.commits()):
            return commits
        time.sleep(0.05)
    raise StuckError(f"{why} within {BOUND_S:g} s")


def broadcast_bytes_per_s() -> float:
    """Throughput of Gloo's broadcast between two processes, alone on the machine."""
    script = str(ROOT / "bench" / "rivals" / "broadcast.py")
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=BOUND_S)
    return float(done.stdout)


def summary(costs: Sequence[Cost]) -> str:
    """Median and worst idle seconds, and lost steps if there were any."""
    if not costs:
        return "-"
    text = spread([cost.idle_s for cost in costs])
    lost = max(cost.lost for cost in costs)
    return f"{text}, {lost} steps lost" if lost else text


def spread(seconds: Sequence[float]) -> str:
    """The median, with the worst in brackets if there are several."""
    if not seconds:
        return "-"
    middle = f"{median(seconds):.2f}"
    return middle if len(seconds) == 1 else f"{middle} ({max(seconds):.2f})"


def loss_row(name: str, costs: Sequence[Cost]) -> list[str]:
    """A table row: the parts of the idle time of a loss."""
    parts = [[c.void_s for c in costs], [max(0.0, c.idle_s - c.void_s) for c in costs]]
    return [name, *map(spread, parts)]


def main() -> None:
    """Measure the systems named on the command line."""
    names = sys.argv[1:] or list(SYSTEMS)
    if unknown := set(names) - SYSTEMS.keys():
        raise SystemExit(f"unknown: {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}")
    if "torchft" in names:
        Torchft.python = torchft_python(ROOT / ".bench" / "torchft", TORCHFT)
    raw = broadcast_bytes_per_s()
    print(f"raw broadcast {raw / 1e6:.0f} MB/s")
    losses: list[list[str]] = []
    for model in ("cnn", "large"):
        rows = []
        for name in names:
            for system in SYSTEMS[name]:
                row = [system.name]
                for size in SIZES:
                    print(f"{system.name}, {model}, {size} workers")
                    costs = measure(system, model, size)
                    if system.kind is Evenstep:
                        losses.append(loss_row(f"{model}, {size} workers", costs["loss"]))
                    row += [summary(costs.get(change, [])) for change in CHANGES]
                rows.append(row)
        header = ["idle seconds", *(f"{c}, {n}" for n in SIZES for c in CHANGES)]
        table = markdown(header, rows)
        print(table)
        write("bench.md", f"transitions of {model}", table, made_by=MADE_BY)
    if losses:
        write("bench.md", "losses", markdown(LOSSES, losses), made_by=MADE_BY)
    state = (
        f"State of the large one: {STATE_BYTES / 1e6:.0f} MB; raw broadcast between two processes: "
    )
    write("bench.md", "broadcast", f"{state}{raw / 1e6:.0f} MB/s", made_by=MADE_BY)


if __name__ == "__main__":
    main()
