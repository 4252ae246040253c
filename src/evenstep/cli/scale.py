"""`evenstep scale`: other numbers of workers while a run goes on."""

from __future__ import annotations

from pathlib import Path

import click

from evenstep.cli.place import locate, question, token_option


@click.command("scale")
@click.argument("run")
@click.argument("num_workers", type=click.IntRange(min=1))
@token_option
def command(run: str, num_workers: int, token_file: Path | None) -> None:
    """Let RUN, a folder or HOST:PORT, have NUM_WORKERS workers.

    New ones are started by its launcher and join when they are ready; the last in rank leave at a
    step's end. Training goes on meanwhile.
    """
    told = question(locate(run, token_file), "scale", num_workers=num_workers)
    click.echo(f"{told['num_workers']} workers asked for")
