"""`evenstep scale`: other numbers of workers while a run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import click

from evenstep.cli.place import locate, question, token_option


class Scale(click.Command):
    """Refuses a negative number as a number: click would take it for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments, checked."""
        for arg in args:
            if re.fullmatch(r"-\d+", arg):
                raise click.BadParameter(f"must be 1 or more, got {arg}", ctx, None, "NUM_WORKERS")
        return super().parse_args(ctx, args)


@click.command("scale", cls=Scale)
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
