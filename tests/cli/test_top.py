"""The live view of a run, in real pseudo-terminals."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_run import BOUND_S, LONG, SCRIPT, Runs, ended, until, workers_of


class Terminal:
    """The reading end of a pseudo-terminal."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self._written = b""
        self._seen = 0  # characters up to the end of the last match

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)

    def shows(self, pattern: str) -> None:
        """Wait for a pattern after the last one; colours are left out."""
        deadline_s = time.monotonic() + BOUND_S
        while time.monotonic() < deadline_s:
            plain = re.sub(r"\x1b\[\d+m", "", self._written.decode(errors="replace"))
            if found := re.compile(pattern).search(plain, self._seen):
                self._seen = found.end()
                return
            if select.select([self._master], [], [], 1.0)[0]:
                self._written += os.read(self._master, 65536)
        raise AssertionError(f"no {pattern!r} in {plain[self._seen :]!r}")


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made = [Terminal(), Terminal()]
    yield made
    for terminal in made:
        terminal.close()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.close()


ROW = r"w\d+ +\d+  [█▏▎▍▌▋▊▉ ]+ +[\d.]+ ms \+ +[\d.]+ wait"


def test_a_run_is_drawn_below_its_output_and_a_loss_is_seen_with_its_reason(
    runs: Runs, tmp_path: Path, terminals: list[Terminal]
) -> None:
    here, run = terminals[0], tmp_path / "run"
    process = runs.start_in(here.slave, "run", "--workers", "3", "--run", run, SCRIPT, LONG)
    here.shows(r"\[w0\] w0 is here")
    here.shows(r"training  ")
    here.shows(r"\d samples/s, \d+% of the limit, [\d.]+x equal shares")
    here.shows(ROW)
    victim = until(lambda: workers_of(run))[-1]
    victim.kill()
    here.shows(r"evenstep: w\d is lost: ")
    here.shows(r"(regroup|plan) \d+ s ago: w\d (lost|joined)")
    process.send_signal(signal.SIGINT)
    here.shows(r"evenstep: stopped: SIGINT; run folder")
    here.shows(r"roster        \d changes?, 1 worker lost; idle ")
    assert process.wait(BOUND_S) == 0


def test_top_shows_the_same_from_another_terminal_until_the_run_is_over(
    runs: Runs, tmp_path: Path, terminals: list[Terminal]
) -> None:
    run = tmp_path / "run"
    process = runs.start("run", "--workers", "2", "--run", run, SCRIPT, LONG)
    until(lambda: (run / "journal.jsonl").exists())
    until(lambda: "training" in runs.run("status", run).stdout)
    one, other = terminals
    left = runs.start_in(one.slave, "top", run, "--every", "0.2")
    stays = runs.start_in(other.slave, "top", run, "--every", "0.2")
    for terminal in terminals:
        terminal.shows(r"training  ")
        terminal.shows(ROW)
    left.send_signal(signal.SIGINT)
    assert left.wait(BOUND_S) == 0
    assert process.poll() is None, "who leaves `top` leaves the run alone"
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 0
    other.shows("the run is over: stopped: SIGINT")
    other.shows(r"throughput    .* samples/s in steps")
    assert stays.wait(BOUND_S) == 0


def test_without_a_terminal_top_prints_lines(runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    runs.start("run", "--workers", "2", "--run", run, SCRIPT, LONG)
    until(lambda: (run / "journal.jsonl").exists())
    until(lambda: "w1" in runs.run("top", run, "--once").stdout)
    shown = runs.run("top", run, "--once")
    assert shown.returncode == 0
    assert "\x1b" not in shown.stdout
    lines = runs.start("top", run, "--every", "0.1")
    assert lines.stdout is not None
    for _ in range(3):
        assert re.match(r"\w+, .* samples/s", lines.stdout.readline())


def test_top_of_what_is_no_run_is_an_error(runs: Runs, tmp_path: Path) -> None:
    done = runs.run("top", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "is neither a run folder nor HOST:PORT" in done.stderr
    (tmp_path / "empty").mkdir()
    done = runs.run("top", tmp_path / "empty")
    assert done.returncode == 2
    assert "has no coordinator" in done.stderr
