"""`evenstep drain`: take one worker out of a run."""

from __future__ import annotations

from pathlib import Path

import click

from evenstep.cli.endpoint import ask_coordinator, find_coordinator
from evenstep.cli.options import token_option


@click.command("drain")
@click.argument("run")
@click.argument("worker")
@token_option
def drain_command(run: str, worker: str, token_file: Path | None) -> None:
    """Let WORKER leave RUN, a folder or HOST:PORT, at the end of a step.

    A restarted coordinator that still waits for WORKER to reconnect gives it up.
    """
    ask_coordinator(find_coordinator(run, token_file), "drain", worker=worker)
    click.echo(f"{worker} leaves at the end of a step")
