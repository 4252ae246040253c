"""`evenstep simulate`: a scenario in, a table out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import msgspec

from evenstep.cli.table import table
from evenstep.config import Choice
from evenstep.errors import ConfigError
from evenstep.simulate.result import Result
from evenstep.simulate.run import compare
from evenstep.simulate.scenario import Scenario, load


@click.command("simulate")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--policy", help="Policies to compare, as a,b,c.  [default: the scenario's]")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change the scenario.")
@click.option("--journal", type=click.Path(path_type=Path), help="Record the run of one policy.")
@click.option("--seed", type=click.IntRange(min=0), help="Other draws of chance.")
def command(
    scenario: Path,
    policy: str | None,
    sets: tuple[str, ...],
    journal: Path | None,
    seed: int | None,
) -> None:
    """Run SCENARIO, a YAML file, on a virtual clock and compare policies with the limit.

    Every policy meets the same chance. The limit knows each worker's true step time.
    """
    story = load(scenario, sets)
    if seed is not None:
        story = msgspec.structs.replace(story, seed=seed)
    results = compare(story, _chosen(story, policy), journal=journal)
    click.echo(_headline(scenario.stem, story, results[-1]))
    click.echo(table(("policy", "time", "of limit", "wait", "cost", "settled"), map(_row, results)))
    if journal is not None:
        click.echo(f"recorded in {journal}")


def _chosen(story: Scenario, names: str | None) -> list[Choice]:
    """The policies named, each with the options that the scenario gives it."""
    if names is None:
        return []
    told = {c.name: c for c in (*story.policies, story.settings.policy)}
    chosen = [n for n in dict.fromkeys(names.replace(" ", "").split(",")) if n]
    if not chosen:
        raise ConfigError("--policy", "is empty; give a name, or leave the option out")
    return [told.get(n, Choice(n)) for n in chosen]


def _headline(name: str, story: Scenario, limit: Result) -> str:
    kinds: Counter[str] = Counter()
    for group in story.workers:
        kinds[group.kind] += group.count
    several = ", ".join(f"{num} {kind}" for kind, num in kinds.items())
    batch = story.settings.batch
    size = f"{batch.size}" if batch.size else f"{batch.per_worker} a worker up to {batch.limit}"
    spare = sum(group.count for group in story.pool)
    pool = f", {spare} more to launch" if spare else ""
    length = f"{story.steps} steps" if story.steps else f"{limit.num_steps} steps at the limit"
    return (
        f"{name}: {kinds.total()} workers ({several}){pool}; batch {size}; {length}; "
        f"seed {story.seed}"
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
