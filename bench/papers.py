"""Published results beside ours: `python -m bench.papers` rewrites the tables in docs/papers.md.

What is simulated and what is assumed is in the scenarios; what the papers report is there too, or
below where it does not belong to one policy. Everything runs on the virtual clock, so two runs of
this file write the same page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from evenstep.config import Choice, ScalingSettings, StragglerSettings
from evenstep.journal import read
from evenstep.predict import FORECASTERS
from evenstep.simulate.result import Result
from evenstep.simulate.run import compare, run
from evenstep.simulate.scenario import Scenario, load
from evenstep.types import Regroup

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
SCENARIOS = ROOT / "scenarios" / "papers"

# Read off the authors' plots, in the order of the sizes that a job was started with.
CIFAR_STATIC_S = {4: 1171.5, 8: 1216.2, 12: 1304.7, 16: 1302.8, 20: 1410.1, 24: 1407.6}
CIFAR_SCALED_S = {4: 1169.5, 8: 1141.2, 12: 1291.4, 16: 1160.1, 20: 1312.9, 24: 1182.9}
CIFAR_FOUND_S = {4: 58.3, 8: 45.1, 12: 73.7, 16: 70.2, 20: 78.4, 24: 40.5}
CIFAR_WORKER_S = {4: 0.011, 8: -0.511, 12: -0.639, 16: -0.747, 20: -0.782, 24: -0.851}
IMAGENET_STATIC_S = {32: 4550.3, 40: 3637.6, 48: 3070.0, 56: 2741.6, 64: 2357.3}
IMAGENET_SCALED_S = {32: 2502.3, 40: 2550.8, 48: 2672.0, 56: 2410.9, 64: 2420.9}
IMAGENET_FOUND_S = {32: 583.1, 40: 453.5, 48: 161.2, 56: 75.4, 64: 46.9}
IMAGENET_WORKER_S = {32: 0.101, 40: 0.095, 48: 0.147, 56: 0.001, 64: 0.026}
PRICES = (0.01, 0.1, 1.0, 10.0)
LINEAR_MIN = {10: (50.1, 54.2, 75.8, 126.6), 100: (50.0, 50.0, 54.1, 75.7), 10000: (49.9,) * 4}
STRAGGLERS_PER_S = {0.75: (2381, 2850), 0.5: (1689, 2806), 0.25: (882, 2840)}
NO_STRAGGLERS_PER_S = 2886


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def times(name: str, policies: Sequence[str] = ()) -> dict[str, float]:
    """Seconds by policy, the limit's with them."""
    results = compare(load(SCENARIOS / f"{name}.yaml"), [Choice(p) for p in policies])
    return {r.policy: r.time_s for r in results}


def told(name: str, policy: str) -> str:
    """The paper's figure for a policy."""
    paper = load(SCENARIOS / f"{name}.yaml").paper
    figure = paper.figures.get(policy) if paper else None
    return "-" if figure is None else f"{figure:g}"


def cores() -> str:
    """Fig. 6 of dynamic batching: minutes, ours scaled so that equal cores take what they took."""
    header = ("workload", "H", "uniform, paper", "ours", "variable, paper", "ours: `static`")
    rows = []
    for workload in ("resnet50", "mnist", "regression"):
        scale = 0.0
        for level in (1, 2, 6, 10):
            name = f"cores-{workload}-h{level}"
            s = times(name)
            scale = scale or float(told(name, "uniform")) / s["uniform"]
            mine = {policy: f"{scale * taken_s:.0f}" for policy, taken_s in s.items()}
            rows.append(
                (workload, str(level), told(name, "uniform"), mine["uniform"])
                + (told(name, "static"), mine["static"])
                + (mine["proportional"], mine["auto"], mine["limit"])
            )
    return table((*header, "`proportional`", "`auto`", "limit"), rows)


def cards() -> str:
    """Fig. 7 of dynamic batching: minutes, ours scaled to the paper's uniform time."""
    header = ("set-up", "uniform, paper", "variable, paper", "ours: `static`", "dynamic, paper")
    rows = []
    for name in ("gpu-cpu-resnet50", "gpu-cpu-mnist", "t4-p4-1024", "t4-p4-2048"):
        s = times(name)
        scale = float(told(name, "uniform")) / s["uniform"]
        mine = {policy: f"{scale * taken_s:.0f}" for policy, taken_s in s.items()}
        rows.append(
            (name, told(name, "uniform"), told(name, "static"), mine["static"])
            + (told(name, "proportional"), mine["proportional"], mine["auto"], mine["limit"])
        )
    return table((*header, "ours: `proportional`", "`auto`", "limit"), rows)


def saved(time_s: float, uniform_s: float) -> tuple[str, str, str]:
    """Seconds, the part of the uniform time that is saved, and how much faster that is."""
    return f"{time_s:.1f}", f"{1 - time_s / uniform_s:.1%}", f"{uniform_s / time_s - 1:.0%}"


def interference() -> str:
    """LB-BSP on CPUs: each forecaster under the predictive policy, then `auto`."""
    name = "lbbsp-cpu"
    s = times(name, ["uniform", "auto"])
    for forecaster in FORECASTERS:
        told_so = load(SCENARIOS / f"{name}.yaml", [f"settings.forecaster={forecaster}"])
        s[f"`predictive`, {forecaster}"] = run(told_so, Choice("predictive")).time_s
    s["`auto`, narx"], s["the limit"] = s.pop("auto"), s.pop("limit")
    rows = [(who, *saved(taken_s, s["uniform"])) for who, taken_s in s.items()]
    return table(("policy, forecaster", "seconds", "saved", "faster by"), rows)


def kinds_of_card() -> str:
    """LB-BSP on GPUs."""
    s = times("lbbsp-gpu", ["uniform", "curve", "shift", "auto"])
    rows = [(who, *saved(taken_s, s["uniform"])) for who, taken_s in s.items()]
    return table(("policy", "seconds", "saved", "faster by"), rows)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job whose size was searched for, or not."""

    num_workers: int  # at its end
    found_s: float  # when the last change of size began
    total_s: float
    worker_s: float  # all workers' time together, start-up included
    num_changes: int


def job(scenario: Scenario, *, steps: int) -> Job:
    """Simulate some steps, in which a search must end; the rest of the job goes on at that pace."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        result = run(replace(scenario, samples=0, steps=steps), journal=path)
        sizes = [
            (record.at_s, len(action.roster))
            for record in read(path)[1]
            for action in record.actions
            if isinstance(action, Regroup)
        ]
    found_s, num_workers = sizes[-1]
    batch = scenario.settings.batch
    per_step = batch.size or min(batch.per_worker * num_workers, batch.limit)
    rest_s = (scenario.samples - result.samples) / per_step * float(result.step_s[-1])
    return Job(
        num_workers=num_workers,
        found_s=found_s,
        total_s=result.time_s + rest_s,
        worker_s=3600 * result.cost + num_workers * rest_s,
        num_changes=len(sizes) - 1,
    )


def started_with(scenario: Scenario, num_workers: int, pool: int) -> Scenario:
    """The same with other numbers of workers, there from the start and to be launched."""
    there, spare = scenario.workers[0], scenario.pool[0]
    more = (replace(spare, count=pool),) if pool else ()
    return replace(scenario, workers=(replace(there, count=num_workers),), pool=more)


def static(scenario: Scenario) -> Scenario:
    """The same without a search."""
    return replace(scenario, settings=replace(scenario.settings, scaling=ScalingSettings()))


def restarted(scenario: Scenario, regroup_s: float) -> Scenario:
    """The same by checkpoint and restart: all stop at once, and starting up is part of it."""
    pool = tuple(replace(group, startup_s=0.0) for group in scenario.pool)
    return replace(scenario, pool=pool, regroup_s=regroup_s)


def search(name: str, published: Sequence[dict[int, float]], spare: int, restart_s: float) -> str:
    """Static against autoscaled, by the size that the job was started with."""
    static_s, scaled_s, found_s, worker_share = published
    scenario, most = load(SCENARIOS / f"{name}.yaml"), max(static_s)
    rows, gains = [], []
    for size in static_s:
        story = started_with(scenario, size, min(spare, most - size))
        kept, scaled = job(static(story), steps=20), job(story, steps=1000)
        slow = job(restarted(story, restart_s), steps=1000)
        theirs = scaled_s[size] / static_s[size] - 1
        gains.append((theirs, scaled.total_s / kept.total_s - 1))
        gains[-1] += (worker_share[size], scaled.worker_s / kept.worker_s - 1)
        rows.append(
            (f"{size} to {scaled.num_workers}", f"{static_s[size]:.0f}", f"{kept.total_s:.0f}")
            + (f"{scaled_s[size]:.0f}", f"{scaled.total_s:.0f}")
            + tuple(f"{gain:+.1%}" for gain in gains[-1])
            + (f"{found_s[size]:.0f}", f"{scaled.found_s:.0f}")
            + (f"{slow.found_s:.0f}", f"{slow.total_s:.0f}")
        )
    means = tuple(f"{sum(column) / len(rows):+.1%}" for column in zip(*gains, strict=True))
    rows.append(("mean", "", "", "", "", *means, "", "", "", ""))
    header = ("workers", "static s, paper", "ours", "autoscaled s, paper", "ours")
    header += (
        "change, paper",
        "ours",
        "worker-time, paper",
        "ours",
        "found after s, paper",
        "ours",
    )
    return table((*header, "by restarts: found", "total s"), rows)


def cifar() -> str:
    """CIFAR-10 on V100s."""
    figures = (CIFAR_STATIC_S, CIFAR_SCALED_S, CIFAR_FOUND_S, CIFAR_WORKER_S)
    return search("autoscale-cifar10", figures, spare=4, restart_s=72.756)


def imagenet() -> str:
    """ImageNet on V100s."""
    figures = (IMAGENET_STATIC_S, IMAGENET_SCALED_S, IMAGENET_FOUND_S, IMAGENET_WORKER_S)
    return search("autoscale-imagenet", figures, spare=32, restart_s=81.186)


def utility() -> str:
    """Utility against cost on the CPU cluster: minutes and the size settled at, by price."""
    rows = []
    for shape, ends in (("linear", "{},10800"), ("step", "{}:3600")):
        for value, published in LINEAR_MIN.items():
            row = [f"{shape}, {value}"]
            for price, theirs in zip(PRICES, published, strict=True):
                scenario = load(SCENARIOS / "autoscale-utility.yaml")
                heuristic = Choice("utility", {shape: ends.format(value)})
                scaling = replace(scenario.settings.scaling, heuristic=heuristic)
                done = job(
                    replace(
                        scenario,
                        settings=replace(scenario.settings, scaling=scaling),
                        workers=(replace(scenario.workers[0], price=price),),
                        pool=(replace(scenario.pool[0], price=price),),
                    ),
                    steps=2500,
                )
                row.append(f"{theirs:.0f}" if shape == "linear" else "")
                row.append(f"{done.total_s / 60:.0f} ({done.num_workers})")
            rows.append(row)
    header = [f"{price:g} an hour: {who}" for price in PRICES for who in ("paper", "ours")]
    return table(("utility", *header), rows)


def steady_per_s(result: Result) -> float:
    """Samples a second over the last hundred steps."""
    return result.samples / result.num_steps * 100 / float(result.step_s[-100:].sum())


def stragglers() -> str:
    """Every fourth of 40 workers slowed, left as it is or replaced, under equal and other shares."""
    scenario, rows = load(SCENARIOS / "stragglers.yaml"), []
    usual, slow = scenario.workers
    for speed, (left, replaced) in STRAGGLERS_PER_S.items():
        slowed = replace(slow, per_sample_s=usual.per_sample_s / speed)
        row = [f"{speed:g}"]
        for replacing, theirs in ((False, left), (True, replaced)):
            straggler = StragglerSettings(replace=replacing)
            story = replace(
                scenario,
                workers=(usual, slowed),
                settings=replace(scenario.settings, straggler=straggler),
            )
            mine = [run(story, Choice(policy)) for policy in ("uniform", "auto")]
            row += [str(theirs), *(f"{steady_per_s(result):.0f}" for result in mine)]
        rows.append(row)
    none = replace(scenario, workers=(replace(usual, count=40),), pool=(), steps=100)
    equal = f"{steady_per_s(run(none, Choice('uniform'))):.0f}"
    rows.append(("1", str(NO_STRAGGLERS_PER_S), equal, "", "", "", ""))
    header = ("speed", "left, paper", "ours: `uniform`", "ours: `auto`")
    return table((*header, "replaced, paper", "ours: `uniform`", "ours: `auto`"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "cores": cores,
    "cards": cards,
    "interference": interference,
    "kinds of card": kinds_of_card,
    "cifar": cifar,
    "imagenet": imagenet,
    "utility": utility,
    "stragglers": stragglers,
}


def put(page: str, name: str, made: str) -> str:
    """The page with a table between its two markers, whatever stood there."""
    start, end = f"<!-- table: {name} -->", "<!-- end of table -->"
    between = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    page, num = between.subn(lambda _: f"{start}\n{made}\n{end}", page)
    assert num == 1, f"{PAGE.name} has {num} places for the table {name!r}"
    return page


def main() -> None:
    """Make every table anew."""
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        made = make()
        print(f"{name}\n{made}\n", flush=True)
        page = put(page, name, made)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
