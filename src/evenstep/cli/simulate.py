"""`evenstep simulate`: run a scenario and print a table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import msgspec

from evenstep.cli.table import table
from evenstep.config import Choice
from evenstep.simulate.result import Result
from evenstep.simulate.run import compare_policies
from evenstep.simulate.scenario import Scenario, load_scenario
from evenstep.strict import require_name


@click.command("simulate")
@click.argument("path", metavar="SCENARIO", type=click.Path(path_type=Path))
@click.option("--policy", help="Policies to compare, as a,b,c.  [default: the scenario's]")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change the scenario.")
@click.option("--journal", type=click.Path(path_type=Path), help="Record the run of one policy.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the noise.")
def simulate_command(
    path: Path,
    policy: str | None,
    sets: tuple[str, ...],
    journal: Path | None,
    seed: int | None,
) -> None:
    """Run SCENARIO, a YAML file, on a virtual clock and compare policies with the limit.

    Every policy gets the same noise. The limit knows each worker's true step time.
    """
    scenario = load_scenario(path, sets)
    if seed is not None:
        scenario = msgspec.structs.replace(scenario, seed=seed)
    results = compare_policies(scenario, _chosen(scenario, policy), journal=journal)
    click.echo(_headline(path.stem, scenario, results[-1]))
    click.echo(table(("policy", "time", "of limit", "wait", "cost", "settled"), map(_row, results)))
    if journal is not None:
        click.echo(f"recorded in {journal}; pictures: evenstep report {journal}")


def _chosen(scenario: Scenario, names: str | None) -> list[Choice]:
    """The named policies, each with the options that the scenario gives it."""
    if names is None:
        return []
    configured = {c.name: c for c in (*scenario.policies, scenario.settings.policy)}
    chosen = require_name("--policy", names.replace(" ", "").replace(",", " ")).split()
    return [configured.get(name, Choice(name)) for name in dict.fromkeys(chosen)]


def _headline(name: str, scenario: Scenario, limit: Result) -> str:
    kinds: Counter[str] = Counter()
    for group in scenario.workers:
        kinds[group.kind] += group.count
    counts = ", ".join(f"{num} {kind}" for kind, num in kinds.items())
    batch = scenario.settings.batch
    size = f"{batch.size}" if batch.size else f"{batch.per_worker} a worker up to {batch.limit}"
    num_pool = sum(group.count for group in scenario.pool)
    pool = f", {num_pool} more to launch" if num_pool else ""
    length = f"{limit.num_steps} steps" + ("" if scenario.steps else " at the limit")
    return (
        f"{name}: {kinds.total()} workers ({counts}){pool}; batch {size}; {length}; "
        f"seed {scenario.seed}"
    )


def _row(result: Result) -> tuple[str, ...]:
    settled = result.settled_step
    return (
        result.policy,
        f"{result.time_s:.2f} s",
        f"{result.achieved or 0:.1%}",
        f"{result.wait_fraction:.1%}",
        f"{result.cost:.4g}",
        "-" if settled is None else f"step {settled}",
    )
