"""The command line. The module of a command is imported when the command is called.

Imports nothing heavy, so that `evenstep --help` answers at once.
"""

from __future__ import annotations

import atexit
import gc
from importlib import import_module

import click

from evenstep import __version__
from evenstep.errors import EvenstepError, nearest

COMMANDS = {
    "run": "Train a script on workers that may join, leave and fail.",
    "join": "Add a worker on this machine to a run.",
    "status": "Show the workers of a run, and how fast they are.",
    "top": "Watch a run, live.",
    "page": "Show a run in a browser.",
    "scale": "Change the number of workers of a run.",
    "drain": "Let a worker leave a run at the end of a step.",
    "simulate": "Run a scenario on a virtual clock and compare policies.",
    "verify": "Train a few steps alone and on uneven workers, and compare.",
    "report": "Write pictures and figures of runs to one HTML file.",
    "replay": "Decide a recorded run again and show what differs.",
}
OPERATORS = ("status", "scale", "drain")  # share a module


class Commands(click.Group):
    """Lists every command and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = "operators" if cmd_name in OPERATORS else cmd_name
        module = import_module(f"evenstep.cli.{name}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest name for an unknown command."""
        near = "" if args[0] in COMMANDS else nearest(args[0], COMMANDS)
        if near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in `--help` without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; an EvenstepError becomes one line on stderr and exit code 2."""
        try:
            return super().invoke(ctx)
        except EvenstepError as e:
            click.echo("evenstep: " + " ".join(str(e).split()), err=True)
            ctx.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="evenstep %(version)s")
def main() -> None:
    """Even steps on uneven machines: data-parallel PyTorch training on mixed clusters."""
    atexit.register(gc.freeze)  # else Python's exit frees all objects one by one: 0.1 s of CPU time
