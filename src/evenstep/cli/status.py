"""`evenstep status`: who trains in a run, and how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from evenstep.cli.place import locate, question, token_option
from evenstep.cli.table import table

HEAD = ("worker", "rank", "share", "compute", "wait", "state")


@click.command("status")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
@token_option
def command(run: str, as_json: bool, token_file: Path | None) -> None:
    """Show RUN, a folder or HOST:PORT, as its coordinator sees it now."""
    told = question(locate(run, token_file), "status")
    if as_json:
        click.echo(json.dumps(told))
        return
    why = f" ({told['reason']})" if told["reason"] else ""
    click.echo(
        f"{told['state']}{why}: generation {told['generation']}, step {told['step']}, "
        f"{told['samples_per_s']:g} samples/s"
    )
    click.echo(table(HEAD, map(_row, told["workers"])))
    refused = ", ".join(f"{num} {reason}" for reason, num in told["refused"].items())
    if refused:
        click.echo(f"refused: {refused}")


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    return (
        worker["worker"],
        "-" if worker["rank"] is None else str(worker["rank"]),
        str(worker["share"]),
        f"{worker['compute_s'] * 1000:.1f} ms",
        f"{worker['wait_s'] * 1000:.1f} ms",
        worker["state"],
    )
