"""`evenstep status`, `scale` and `drain`: what operators ask of a running coordinator."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from evenstep.cli.endpoint import find_coordinator, token_option
from evenstep.cli.table import table
from evenstep.coordinate.client import ask
from evenstep.identity import check_worker_name
from evenstep.messages import Ask
from evenstep.types import counted

WAITING, ENDING = 3, 4  # exit codes of `status --check`; 0: workers train
CHECK_CODES = {
    "training": 0,
    "regrouping": 0,
    "finishing": ENDING,
    "stopping": ENDING,
    "ended": ENDING,
}
STATUS_HEAD = ("worker", "rank", "share", "compute", "wait", "state")


def ask_coordinator(run: str, token_file: Path | None, what: str, **about: Any) -> dict[str, Any]:
    """The answer of a run's coordinator; `about` are further fields of `Ask`."""
    c = find_coordinator(run, token_file)
    return ask(c.host, c.port, c.token, Ask(proof="", what=what, **about), c.fingerprint)


@click.command("status")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
@click.option("--check", is_flag=True, help="Print one line, and exit with a code for the state.")
@token_option
@click.pass_context
def status_command(
    ctx: click.Context, run: str, as_json: bool, check: bool, token_file: Path | None
) -> None:
    """Show the state and the workers of RUN, a folder or HOST:PORT.

    \b
    Exit codes with --check; without it, 0 for every state:
      0    workers train
      3    none does yet, or at the moment: it starts, is paused or waits for workers
      4    the run ends: it is finishing, stopping or ended
      2    no coordinator answers, or the token is wrong
    """
    status = ask_coordinator(run, token_file, "status")
    if check:
        click.echo(_state_line(status))
        ctx.exit(CHECK_CODES.get(status["state"], WAITING))
    if as_json:
        click.echo(json.dumps(status))
        return
    click.echo(_state_line(status))
    click.echo(table(STATUS_HEAD, map(_status_row, status["workers"])))
    for worker, reason in status["left_out"].items():
        click.echo(f"{worker} is left out: {reason}")
    refused = ", ".join(f"{num} {reason}" for reason, num in status["refused"].items())
    if refused:
        click.echo(f"refused: {refused}")
    for problem in status["problems"]:
        click.echo(f"{problem}; the run goes on")


def _state_line(status: dict[str, Any]) -> str:
    why = f" ({status['reason']})" if status["reason"] else ""
    return (
        f"{status['state']}{why}: generation {status['generation']}, step {status['step']}, "
        f"{status['samples_per_s']:g} samples/s"
    )


def _status_row(worker: dict[str, Any]) -> tuple[str, ...]:
    return (
        worker["worker"],
        "-" if worker["rank"] is None else str(worker["rank"]),
        str(worker["share"]),
        f"{worker['compute_s'] * 1000:.1f} ms",
        f"{worker['wait_s'] * 1000:.1f} ms",
        worker["state"],
    )


class ScaleCommand(click.Command):
    """Rejects a negative number as a number; click would take it for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
    answer = ask_coordinator(run, token_file, "scale", num_workers=num_workers)
    click.echo(f"asked for {counted(answer['num_workers'])}")


@click.command("drain")
@click.argument("run")
@click.argument("worker")
@token_option
def drain_command(run: str, worker: str, token_file: Path | None) -> None:
    """Let WORKER leave RUN, a folder or HOST:PORT, at the end of a step.

    A restarted coordinator that still waits for WORKER to reconnect gives it up.
    """
    ask_coordinator(run, token_file, "drain", worker=check_worker_name(worker, "WORKER"))
    click.echo(f"{worker} leaves at the end of a step")
