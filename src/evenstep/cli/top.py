"""`evenstep top`: a run, live, from any terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from evenstep.cli.endpoint import token_option
from evenstep.cli.operators import ask_coordinator
from evenstep.errors import EvenstepError
from evenstep.launch.screen import BottomRows, terminal_style, terminal_width
from evenstep.observe.block import block, one_line
from evenstep.observe.summary import summary
from evenstep.observe.tally import Totals

PATIENCE_S = 30.0
"""For a coordinator that does not answer any more: another may take over."""

ENDING = ("ended", "finishing", "stopping")

Status = dict[str, Any]


@click.command("top")
@click.argument("run")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    help="Seconds between two updates.  [default: 1 on a terminal, else 10]",
)
@click.option("--once", is_flag=True, help="Show it once.")
@token_option
def top_command(run: str, every_s: float | None, once: bool, token_file: Path | None) -> None:
    """Watch RUN, a folder or HOST:PORT, until it is over; Ctrl-C leaves it alone.

    On a terminal: progress, throughput, each worker's share with its compute time and wait, and the
    last decision. Otherwise a line for each update.
    """
    live = sys.stdout.isatty() and not once
    every_s = every_s or (1.0 if live else 10.0)
    screen, style, status = BottomRows(), terminal_style(sys.stdout), {}
    try:
        for status in _statuses(lambda: ask_coordinator(run, token_file, "status"), every_s):
            rows = block(status, terminal_width(sys.stdout), style)
            if live:
                sys.stdout.write(screen.redraw([], rows))
            elif once:
                click.echo("\n".join(rows))
                return
            else:
                click.echo(one_line(status))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return
    finally:
        if live and status:
            sys.stdout.write("\n")
    lines = summary(Totals(**status["totals"]), priced=False)
    click.echo("\n".join(["the run is over", *lines]))


def _statuses(ask: Callable[[], Status], every_s: float) -> Iterator[Status]:
    """The first status, or its error; then one after the other until the run is over.

    While a coordinator does not answer, the last status with that as a problem.
    """
    status, answered_s = ask(), time.monotonic()
    while True:
        yield status
        time.sleep(every_s)
        try:
            status, answered_s = ask(), time.monotonic()
        except (EvenstepError, OSError) as e:
            if status["state"] in ENDING or time.monotonic() - answered_s > PATIENCE_S:
                return
            status = {**status, "state": "no answer", "problems": [str(e)]}
