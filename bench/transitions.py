"""What a change of the roster costs: joins, leaves and losses, beside the other ways to do it.

    python -m bench.transitions                    # all of it: about half an hour
    python -m bench.transitions evenstep torchft   # some of: evenstep restart torchrun torchft

Each way trains the same network in the same number of processes on this machine, one way after the
other. The tables go to docs/bench.md.
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
STATE_BYTES = 2 * 6 * (4096 + 1) * 4096 * 4  # of the large one: parameters and momentum
SIZES = (3, 5)
LOSSES = ["a loss, evenstep", "computing a step that is void", "until training goes on"]
CHANGES = ("nothing", "join", "leave", "loss")

Change = str
"""join, leave or loss; or nothing, for what the same measure makes of a run left alone."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one change cost: seconds in which nobody trained, and committed steps to do again."""

    idle_s: float
    lost: int
    vain_s: float = 0.0  # of the idle ones: computing a step that is void already


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to live with change, and what can be asked of it."""

    name: str
    kind: type[Job]
    changes: tuple[Change, ...]
    rounds: dict[str, int]


ONCE = {"cnn": 1, "large": 1}
WAYS = {
    "evenstep": (
        Way(
            name="evenstep",
            kind=Evenstep,
            changes=("nothing", "leave", "join", "loss", "join"),
            rounds={"cnn": 4, "large": 6},
        ),
    ),
    "restart": (
        Way(
            name="checkpoint-restart",
            kind=Restart,
            changes=("nothing", "leave", "join", "loss", "join"),
            rounds=ONCE,
        ),
    ),
    "torchrun": (
        Way(name="torchrun, one agent", kind=Torchrun, changes=("nothing", "loss"), rounds=ONCE),
        Way(
            name="torchrun, an agent each",
            kind=TorchrunAgents,
            changes=("nothing", "leave", "join"),
            rounds=ONCE,
        ),
    ),
    "torchft": (
        Way(
            name="torchft",
            kind=Torchft,
            changes=("nothing", "loss", "join", "leave", "join"),
            rounds=ONCE,
        ),
        Way(
            name="torchft, heartbeat 1 s",
            kind=TorchftTuned,
            changes=("nothing", "loss", "join", "leave", "join"),
            rounds=ONCE,
        ),
    ),
}


def measure(way: Way, model: str, num_workers: int) -> dict[Change, list[Cost]]:
    """The costs of every change, several rounds of them in one job."""
    costs: dict[Change, list[Cost]] = {change: [] for change in way.changes}
    with tempfile.TemporaryDirectory() as folder:
        job = way.kind(Path(folder), ["--model", model], num_workers)
        try:
            with job:
                begun_s = settled(job, model, 0.0)
                for turn in range(way.rounds[model]):
                    for change in way.changes:
                        cost, begun_s = one(job, model, change, turn, begun_s)
                        costs[change].append(cost)
                        print(f"  {change}: {cost.idle_s:.3f} s idle, {cost.vain_s:.3f} in vain")
        except StuckError as e:
            print(f"  {e}\n" + Path(folder, "log").read_text()[-1500:])
    return costs


def one(job: Job, model: str, change: Change, turn: int, since_s: float) -> tuple[Cost, float]:
    """Make one change and wait until training goes on as it should."""
    before = [c for c in job.commits() if c.at_s >= since_s]
    # At another point of a step each time: in the midst of compute, of reduction, at its end.
    time.sleep((0.1 + 0.37 * turn) % 1.0 * usual(steps_of(before)))
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
    # A joiner's start-up slows this machine down, which is not what is asked; else all gaps count.
    begun_s = last.at_s if change == "join" else asked_s
    if change in ("leave", "nothing"):
        begun_s = max(c.at_s for c in steps if c.at_s <= asked_s)
    # Each gap less a usual step of the roster that ended it: on this machine fewer are faster. None
    # after the new roster's first: the longest of many would tell of their scatter.
    usual_s = {
        True: usual([c for c in steps if since_s <= c.at_s < first.at_s]),
        False: usual([c for c in steps if c.at_s >= first.at_s]),
    }
    ends_s = [
        (begun_s, True),
        *((c.at_s, c < first) for c in steps if begun_s < c.at_s <= first.at_s),
    ]
    idle_s = max(b - a - usual_s[before] for (a, _), (b, before) in pairwise(ends_s))
    vain_s = job.computed_s(asked_s) - asked_s if change == "loss" else 0.0
    return Cost(max(0.0, idle_s), max(0, last.step + 1 - first.step), vain_s), first.at_s


def steps_of(commits: Iterable[Commit]) -> list[Commit]:
    """The first commit of each step. One that is done again after a restart counts again."""
    steps: list[Commit] = []
    left = 0  # of the workers that have not committed the last of them yet
    for commit in sorted(commits):
        if not left or commit.step != steps[-1].step:
            steps.append(commit)
            left = commit.world
        left -= 1
    return steps


def usual(steps: Sequence[Commit]) -> float:
    """A step's usual time."""
    return median([b.at_s - a.at_s for a, b in pairwise(steps)] or [0.0])


def settled(job: Job, model: str, since_s: float) -> float:
    """Wait until the whole roster has taken some steps together; when that was."""

    def trained(commits: Sequence[Commit]) -> bool:
        steps = [c.step for c in commits if c.at_s >= since_s and c.world == job.world]
        return len(set(steps)) > SETTLED[model]

    wait(job, trained, f"{job.world} workers do not train")
    return since_s


def wait(job: Job, holds: Callable[[list[Commit]], bool], why: str) -> list[Commit]:
    """The commits, once something holds of them."""
    until_s = time.monotonic() + BOUND_S
    while time.monotonic() < until_s:
        if holds(commits := job.commits()):
            return commits
        time.sleep(0.05)
    raise StuckError(f"{why} within {BOUND_S:g} s")


def broadcast_bytes_per_s() -> float:
    """What Gloo's own broadcast does between two processes, alone on the machine."""
    script = str(ROOT / "bench" / "rivals" / "broadcast.py")
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", script]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=BOUND_S)
    return float(told.stdout)


def told(costs: Sequence[Cost]) -> str:
    """Median and worst of the idle seconds, and steps lost if there were any."""
    if not costs:
        return "-"
    text = spread([cost.idle_s for cost in costs])
    lost = max(cost.lost for cost in costs)
    return f"{text}, {lost} steps lost" if lost else text


def spread(seconds: Sequence[float]) -> str:
    """Their median, and the worst in brackets if there are several."""
    if not seconds:
        return "-"
    middle = f"{median(seconds):.2f}"
    return middle if len(seconds) == 1 else f"{middle} ({max(seconds):.2f})"


def split_of(name: str, costs: Sequence[Cost]) -> list[str]:
    """Where the time of a loss goes."""
    parts = [[c.vain_s for c in costs], [max(0.0, c.idle_s - c.vain_s) for c in costs]]
    return [name, *map(spread, parts)]


def main() -> None:
    """Measure what is asked for."""
    names = sys.argv[1:] or list(WAYS)
    if unknown := set(names) - WAYS.keys():
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    if "torchft" in names:
        Torchft.python = torchft_python(ROOT / ".bench" / "torchft", TORCHFT)
    raw = broadcast_bytes_per_s()
    print(f"raw broadcast {raw / 1e6:.0f} MB/s")
    losses: list[list[str]] = []
    for model in ("cnn", "large"):
        rows = []
        for name in names:
            for way in WAYS[name]:
                row = [way.name]
                for size in SIZES:
                    print(f"{way.name}, {model}, {size} workers")
                    costs = measure(way, model, size)
                    if way.kind is Evenstep:
                        losses.append(split_of(f"{model}, {size} workers", costs["loss"]))
                    row += [told(costs.get(change, [])) for change in CHANGES]
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
