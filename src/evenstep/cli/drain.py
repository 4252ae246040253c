"""`evenstep drain`: one worker leaves, in order."""

from __future__ import annotations

from pathlib import Path

import click

from evenstep.cli.place import locate, question, token_option


@click.command("drain")
@click.argument("run")
@click.argument("worker")
@token_option
def command(run: str, worker: str, token_file: Path | None) -> None:
    """Let WORKER leave RUN, a folder or HOST:PORT, at a step's end.

    A worker that a restarted coordinator still waits for is given up.
    """
    question(locate(run, token_file), "drain", worker=worker)
    click.echo(f"{worker} leaves at a step's end")
