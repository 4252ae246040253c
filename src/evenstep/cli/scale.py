"""`evenstep scale`: change the number of workers of a run."""

from __future__ import annotations

import re
from pathlib import Path

import click

from evenstep.cli.endpoint import ask_coordinator, find_coordinator
from evenstep.cli.options import token_option


class ScaleCommand(click.Command):
    """Rejects a negative number as a number; click would take it for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Check the arguments first."""
        for arg in args:
            if re.fullmatch(r"-\d+", arg):
                raise click.BadParameter(f"must be 1 or more, got {arg}", ctx, None, "NUM_WORKERS")
        return super().parse_args(ctx, args)


@click.command("scale", cls=ScaleCommand)
@click.argument("run")
@click.argument("num_workers", type=click.IntRange(min=1))
@token_option
def scale_command(run: str, num_workers: int, token_file: Path | None) -> None:
    """Change RUN, a folder or HOST:PORT, to NUM_WORKERS workers while it trains.

    Its launcher starts new workers, which join when they are ready. Surplus workers, highest rank
    first, leave at the end of a step.
    """
    coordinator = find_coordinator(run, token_file)
    answer = ask_coordinator(coordinator, "scale", num_workers=num_workers)
    click.echo(f"{answer['num_workers']} workers asked for")
