"""`evenstep status`: the workers of a run, and how fast they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from evenstep.cli.endpoint import ask_coordinator, find_coordinator
from evenstep.cli.options import token_option
from evenstep.cli.table import table

HEAD = ("worker", "rank", "share", "compute", "wait", "state")


@click.command("status")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
@token_option
def status_command(run: str, as_json: bool, token_file: Path | None) -> None:
    """Show the state and the workers of RUN, a folder or HOST:PORT."""
    status = ask_coordinator(find_coordinator(run, token_file), "status")
    if as_json:
        click.echo(json.dumps(status))
        return
    why = f" ({status['reason']})" if status["reason"] else ""
    click.echo(
        f"{status['state']}{why}: generation {status['generation']}, step {status['step']}, "
        f"{status['samples_per_s']:g} samples/s"
    )
    click.echo(table(HEAD, map(_row, status["workers"])))
    refused = ", ".join(f"{num} {reason}" for reason, num in status["refused"].items())
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
