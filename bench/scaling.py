"""The search for the cluster's size, live; and a straggler, handled in four ways.

    python -m bench.scaling         # everything: about 25 minutes
    python -m bench.scaling sizes   # some of: sizes stragglers

Each worker has a quarter of a core of this machine's two: eight of them fill it, and more bring
nothing. The straggler is an emulated device. The tables go to docs/bench.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from bench.jobs import BOUND_S, Commit, Evenstep, Job, Restart, StuckError
from bench.tables import markdown, write
from bench.transitions import median_step_s
from evenstep.decide.scaling.efficiency import Efficiency, efficiency
from evenstep.decide.scaling.search import Size
from evenstep.decide.scaling.utility import Utility, value_at
from evenstep.journal import read
from evenstep.types import Drain, Launch, Regroup, Stay, StepDone

MADE_BY = "python -m bench.scaling"
BATCH = 2400  # half a second for one worker: a quota is not exact for much shorter steps
SAMPLES = 24_000  # per epoch
MAX_WORKERS = 12
JOB = 24_000_000  # samples of the job: about twenty minutes at the best size
EPOCHS = -(-JOB // SAMPLES)
PRICE = 1.0  # per worker-hour
MEASURED_S = 4.0
WARM_S = 1.0
SWEEPS = 4  # over all sizes, up and down, because the machine's speed drifts
STEP = 2  # workers per change: one more at size six brings less than the machine's noise
SETTINGS = (
    "scaling.period_steps=20",
    f"scaling.step_workers={STEP}",
    "scaling.settle_steps=40",
)
TRAINING = ["--model", "cnn", "--epochs", str(EPOCHS), "--samples", str(SAMPLES), "--pause", "0"]
QUOTA = ["--batch", str(BATCH), "--cores", "0.25"]
DEVICE = ["--batch", "480", "--per-sample", "0.001"]


def job(
    folder: str, num_workers: int, options: Sequence[str] = (), of: Sequence[str] = QUOTA
) -> Evenstep:
    """A run with these workers."""
    run = Evenstep(Path(folder), [*TRAINING, *of], num_workers)
    run.options, run.max_workers = options, MAX_WORKERS
    return run


def until(job: Job, holds: Callable[[list[Commit]], bool], bound_s: float = BOUND_S) -> None:
    """Wait until a condition holds for the commits."""
    deadline_s = time.monotonic() + bound_s
    while not holds(job.commits()):
        if time.monotonic() > deadline_s:
            raise StuckError(Path(job.folder, "log").read_text()[-2000:])
        time.sleep(0.2)


def steps_per_s(job: Job, num_workers: int, over_s: float) -> float:
    """Steps per second over `over_s`, once this many workers train and are warm."""
    until(job, lambda found: sum(c.world == num_workers for c in found[-40:]) > 5)
    started_s = time.monotonic() + WARM_S
    time.sleep(WARM_S + over_s)
    ends = sorted({c.step: c.at_s for c in reversed(job.commits()) if c.at_s > started_s}.values())
    return (len(ends) - 1) / (ends[-1] - ends[0])


def static_sizes() -> dict[int, float]:
    """Median samples per second at every size, measured several times in one run."""
    found: dict[int, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        job(folder, 1, ("--spares", str(MAX_WORKERS))) as run,
    ):
        for sweep in range(SWEEPS):
            for size in range(1, MAX_WORKERS + 1) if sweep % 2 == 0 else range(MAX_WORKERS, 0, -1):
                if size != run.world:
                    run.scale(size)
                found.setdefault(size, []).append(BATCH * steps_per_s(run, size, MEASURED_S))
    for size, rates in sorted(found.items()):
        print(f"  {size} workers:", *(f"{r:.0f}" for r in rates), "samples/s", flush=True)
    return {size: median(rates) for size, rates in sorted(found.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The result of a live search."""

    settled_at: int
    search_s: float
    samples: int  # trained during the search
    worker_s: float  # of all workers, during the search
    path: tuple[tuple[int, int], ...]  # (size, steps at that size)
    reasons: tuple[str, ...]
    idle_s: tuple[float, ...] = ()  # per change


def search(heuristic: str) -> Searched:
    """Run the search until it settles."""
    sets = [f"--set={setting}" for setting in SETTINGS]
    options = ("--scale", heuristic, "--price", str(PRICE), *sets)
    with tempfile.TemporaryDirectory() as folder, job(folder, 1, options) as run:
        deadline_s = time.monotonic() + 400
        while not (found := read_search(run.journal)) or found.settled_at == 0:
            if time.monotonic() > deadline_s:
                raise StuckError(f"not settled: {found}")
            time.sleep(1.0)
        return replace(found, idle_s=idle(run.commits(), [size for size, _ in found.path]))


def restarted(path: Sequence[tuple[int, int]]) -> tuple[float, tuple[float, ...]]:
    """The same steps and sizes with DDP and restarts: total seconds, idle seconds per change."""
    args = [*TRAINING, *QUOTA]
    with tempfile.TemporaryDirectory() as folder, Restart(Path(folder), args, path[0][0]) as run:
        for nth, (size, num_steps) in enumerate(path):
            if nth:
                run.scale(size)
            until(run, partial(_trained, time.monotonic(), num_steps))
        commits = run.commits()
    return commits[-1].at_s - commits[0].at_s, idle(commits, [size for size, _ in path])


def _trained(since_s: float, num_steps: int, commits: Sequence[Commit]) -> bool:
    return len({c.step for c in commits if c.at_s > since_s}) >= num_steps


def idle(commits: Sequence[Commit], sizes: Sequence[int]) -> tuple[float, ...]:
    """Seconds between the steps of one size and the next, minus a median step."""
    left = list(commits)
    found = []
    for size, following in pairwise(sizes):
        first = next(i for i, c in enumerate(left) if c.world == following)
        last_s = max(c.at_s for c in left[:first] if c.world == size)
        gap_s = left[first].at_s - last_s
        left = left[first:]
        found.append(max(0.0, gap_s - median_step_s([c for c in commits if c.world == following])))
    return tuple(found)


def read_search(journal: Path) -> Searched | None:
    """Read a search from a journal, from the first step until it settles."""
    if not journal.exists():
        return None
    path: list[list[int]] = []
    reasons: list[str] = []
    started_s = last_s = worker_s = 0.0
    samples = settled_at = 0
    for record in read(journal)[1]:
        for action in record.actions:
            if isinstance(action, Regroup):
                path.append([len(action.roster), 0])
        if not isinstance(record.event, StepDone):
            continue
        started_s = started_s or record.at_s - record.event.seconds
        worker_s += len(record.event.reports) * (record.at_s - (last_s or started_s))
        last_s = record.at_s
        samples += record.event.steps.samples
        path[-1][1] += record.event.steps.num
        for action in record.actions:
            if isinstance(action, Stay | Launch | Drain):
                reasons.append(action.reason)
                if isinstance(action, Stay) and "settle at" in action.reason:
                    settled_at = len(record.event.reports)
        if settled_at:
            break
    return Searched(
        settled_at=settled_at,
        search_s=last_s - started_s,
        samples=samples,
        worker_s=worker_s,
        # A size that the next join ended at once has no steps.
        path=tuple((size, num_steps) for size, num_steps in path if num_steps),
        reasons=tuple(reasons),
    )


def best_by_efficiency(rates: dict[int, float], heuristic: Efficiency) -> int:
    """The size beyond which more workers are not worth it, by the rates of all sizes."""
    sizes = [record(n, r) for n, r in sorted(rates.items())]
    for smaller, larger in zip(sizes, sizes[STEP:], strict=False):
        if efficiency(smaller, larger) <= heuristic.threshold:
            return smaller.num_workers
    return sizes[-1].num_workers


def best_by_utility(rates: dict[int, float], heuristic: Utility) -> int:
    """The size with the highest utility minus cost."""
    points = heuristic.points(initial_total_s=JOB / rates[1])

    def worth(size: int) -> float:
        total_s = JOB / rates[size]
        return value_at(points, total_s) - size * PRICE / 3600 * total_s

    return max(rates, key=worth)


def against(found: float, others: Sequence[float]) -> str:
    """Relative difference to the others, as the paper reports it."""
    change = [found / other - 1 for other in others]
    average, best, worst = fmean(change), min(change), max(change)
    return f"{average:+.1%} on average, {best:+.1%} at best, {worst:+.1%} at worst"


def record(num_workers: int, samples_per_s: float) -> Size:
    """A size as the search records it."""
    price = num_workers * PRICE / 3600
    return Size(
        num_workers=num_workers,
        samples=BATCH,
        seconds=BATCH / samples_per_s,
        price_per_s=price,
        batch=BATCH,
    )


def sizes() -> None:
    """Measure all sizes, then run the search with each heuristic."""
    rates = static_sizes()
    linear = f"10,{2 * JOB / max(rates.values()):.0f}"
    cases: list[tuple[str, int]] = [
        ("efficiency:threshold=0.3", best_by_efficiency(rates, Efficiency(threshold=0.3))),
        (f"utility:linear={linear}", best_by_utility(rates, Utility(linear=linear))),
    ]
    rows = []
    lines = []
    for heuristic, best in cases:
        found = search(heuristic)
        print(heuristic, "best", best, "found", found.settled_at, found.path, flush=True)
        restart_s, restart_idle_s = restarted(found.path)
        print(f"  {found.search_s:.0f} s, idle {found.idle_s}", flush=True)
        print(f"  restarting {restart_s:.0f} s, idle {restart_idle_s}", flush=True)
        rest_s = (JOB - found.samples) / rates[found.settled_at]
        total_s = found.search_s + rest_s
        worker_s = found.worker_s + found.settled_at * rest_s
        lines.append(
            f"{heuristic}, over the static sizes 1 to {MAX_WORKERS}: "
            f"completion {against(total_s, [JOB / r for r in rates.values()])}; "
            f"worker time {against(worker_s, [n * JOB / r for n, r in rates.items()])}."
        )
        rows.append(
            [
                heuristic,
                str(best),
                str(found.settled_at),
                " ".join(str(size) for size, _ in found.path),
                f"{found.search_s:.0f} s",
                f"{100 * found.search_s / total_s:.1f} %",
                f"{total_s / 60:.1f} min",
                f"{worker_s / 3600:.2f} h",
                f"{median(found.idle_s):.2f} s",
                f"{restart_s:.0f} s",
                f"{median(restart_idle_s):.2f} s",
            ]
        )
        for reason in found.reasons:
            print(f"  {reason}")
    header = ["heuristic", "best size", "found", "its path", "searched for", "of the job", "job"]
    header += ["worker-hours", "idle a change", "restarting: searched for", "idle a change"]
    table = markdown(header, rows)
    table = "\n\n".join([table, *lines])
    write("bench.md", "search", table, made_by=MADE_BY)
    print(table)
    table = markdown(
        ["workers", "samples/s", "job", "worker-hours"],
        [
            [str(n), f"{r:.0f}", f"{JOB / r / 60:.1f} min", f"{n * JOB / r / 3600:.2f} h"]
            for n, r in sorted(rates.items())
        ],
    )
    write("bench.md", "sizes", table, made_by=MADE_BY)
    print(table)


def stragglers() -> None:
    """One of four workers slowed down, with balancing and replacement on and off."""
    rows = []
    for factor in (0.75, 0.5, 0.25):
        rates = []
        for policy in ("uniform", "auto"):
            for replaces in (False, True):
                rates.append(with_straggler(factor, policy, replaces=replaces))
                print(f"  {factor} {policy} {replaces}: {rates[-1]:.2f} steps/s", flush=True)
        rows.append([f"{factor:g}", *(f"{r / rates[0]:.2f}x" for r in rates)])
    header = ["its speed", "neither", "replaced", "balanced", "balanced, replaced"]
    table = markdown(header, rows)
    write("bench.md", "stragglers", table, made_by=MADE_BY)
    print(table)


def with_straggler(factor: float, policy: str, *, replaces: bool) -> float:
    """Steps per second, a while after one of four devices has become slower."""
    sets = [f"policy={policy}", f"straggler.replace={str(replaces).lower()}"]
    options = [f"--set={setting}" for setting in (*sets, "straggler.warmup_steps=10")]
    slow = ["--slow", "w2", "--factor", str(factor), "--from-step", "30"]
    of = [*DEVICE, *slow]
    with tempfile.TemporaryDirectory() as folder, job(folder, 4, options, of) as run:
        until(run, lambda found: max((c.step for c in found), default=0) > 30)
        time.sleep(25.0)  # for a replacement to be decided, started and admitted
        return steps_per_s(run, 4, 8.0)


SECTIONS = {"sizes": sizes, "stragglers": stragglers}


def main() -> None:
    """Run the sections named on the command line."""
    names = sys.argv[1:] or list(SECTIONS)
    if unknown := set(names) - SECTIONS.keys():
        raise SystemExit(f"unknown: {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    for name in names:
        print(name, flush=True)
        SECTIONS[name]()


if __name__ == "__main__":
    main()
