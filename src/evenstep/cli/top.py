"""`evenstep top`: a run, live, from any terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evenstep.cli.endpoint import token_option
from evenstep.cli.operators import ask_coordinator
from evenstep.errors import EvenstepError, JournalError
from evenstep.launch.screen import BottomRows, terminal_style, terminal_width
from evenstep.observe.block import block, one_line
from evenstep.observe.ending import TRAINED, unanswered
from evenstep.observe.summary import summary
from evenstep.observe.tally import Totals

if TYPE_CHECKING:
    from evenstep.observe.history import History

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
    watched = WatchedRun(run, lambda: ask_coordinator(run, token_file, "status"))
    try:
        for status in watched.statuses(every_s):
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
    click.echo("\n".join(watched.last_words()))


class WatchedRun:
    """A run as its coordinator tells it and, once that is silent, as its journal has it."""

    def __init__(
        self,
        run: str,
        ask: Callable[[], Status],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run, self._ask = run, ask
        self._clock, self._sleep = clock, sleep
        self._told: Status = {}  # the coordinator's last answer
        self._history: History | None = None  # read once the coordinator is silent

    def statuses(self, every_s: float) -> Iterator[Status]:
        """The first status, or its error; then one after the other until the run is over.

        While a coordinator does not answer, the last status with that as a problem.
        """
        status = self._told = self._ask()
        answered_s = self._clock()
        while True:
            yield status
            self._sleep(every_s)
            try:
                status = self._told = self._ask()
                answered_s = self._clock()
            except (EvenstepError, OSError) as e:
                if self._ending() or self._clock() - answered_s > PATIENCE_S:
                    return
                status = {**status, "state": "no answer", "problems": [str(e)]}

    def last_words(self) -> list[str]:
        """How the run ended, if that is known, and its totals."""
        ending, history, totals = self._ending(), self._history, Totals(**self._told["totals"])
        # The last records of a coordinator that was killed are missing.
        if history is not None and history.totals.num_steps >= totals.num_steps:
            totals = history.totals
        how = f"the run is over: {ending}" if ending else unanswered(self._run)
        return [how, *summary(totals)]

    def _ending(self) -> str:
        """Why the run is over; empty if nothing says that it is."""
        self._follow()
        if self._history is not None:
            return self._history.roster.left_because
        if self._told["state"] in ENDING:  # of a run on another host, whose journal is there
            return TRAINED if self._told["trained_to_end"] else self._told["reason"] or "it ended"
        return ""

    def _follow(self) -> None:
        """Read what the journal has more, if it is on this host."""
        from evenstep.observe.history import History  # NumPy, which a live view does not need

        try:
            if self._history is not None:
                self._history.follow()
            elif Path(self._run).is_dir():
                self._history = History.read(self._run)
        except (JournalError, OSError):
            pass  # it is gone, or was never written
