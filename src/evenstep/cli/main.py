"""The command line: one file per command, loaded when it is called.

Nothing heavy is imported here: `evenstep --help` answers before numpy would have been loaded.
"""

from __future__ import annotations

from importlib import import_module

import click

from evenstep import __version__
from evenstep.errors import EvenstepError, nearest

COMMANDS = {
    "run": "Train a script on workers that may come, go and die.",
    "join": "Add a worker of this machine to a run.",
    "status": "Show who trains in a run, and how fast.",
    "scale": "Change how many workers a run has.",
    "drain": "Let a worker leave a run at a step's end.",
    "simulate": "Run a scenario on a virtual clock and compare policies.",
    "verify": "Train a few steps alone and on uneven workers, and compare.",
    "replay": "Decide a recorded run again and show what differs.",
}


class Commands(click.Group):
    """Knows every command by name and loads the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"evenstep.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command and its arguments; for a mistyped one, the nearest name."""
        near = "" if args[0] in COMMANDS else nearest(args[0], COMMANDS)
        if near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without loading what it lists."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; what evenstep refuses on purpose is one line and exit code 2."""
        try:
            return super().invoke(ctx)
        except EvenstepError as e:
            click.echo("evenstep: " + " ".join(str(e).split()), err=True)
            ctx.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="evenstep %(version)s")
def main() -> None:
    """Even steps on uneven machines: data-parallel training on clusters that are not alike."""
