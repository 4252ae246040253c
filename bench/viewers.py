"""What it costs a run to be looked at: by a browser on its page, a scraper, and `evenstep top`.

    python -m bench.viewers    # about half an hour, on a machine that does nothing else

One run is looked at in every other block of its steps: unwatched, watched, watched, unwatched. Both
halves of such a round then have the same processes on the same CPUs, and a speed of the machine
that drifts steadily affects both alike. A block is long enough for everything that is asked for now
and then. The page's server runs throughout; it does nothing while nobody looks.

The browser is an HTTP client that asks for what the page's script asks for, at the same pace: what
a real one draws costs the machine that it runs on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pty
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from bench.jobs import BIN, BOUND_S, ask_run, end_process
from bench.tables import write
from bench.turn_job import WORLD, TurnJob
from bench.turns import assign_cpus

LAUNCHES, ROUNDS, BLOCK_S, STEPS, WARM = 4, 12, 10.0, 50, 10
ENOUGH = 0.004
"""Of a ratio: more launches are made until it is known to this."""

URL = re.compile(r"page: (http\S+)")
PICTURES_S, SCRAPE_S = 2.0, 5.0  # as page.js asks, and as examples/grafana scrapes
TERMINAL = (24, 100)  # rows, columns


class Cost(NamedTuple):
    """Time of a watched step over that of an unwatched one: the median, and its uncertainty."""

    ratio: float
    uncertainty: float


class Viewers:
    """A browser, a scraper and `evenstep top`; they look within `watching`."""

    def __init__(self, run: Path, url: str, cleanup: ExitStack) -> None:
        parts = urlsplit(url)
        self._base, key = f"{parts.scheme}://{parts.netloc}", parts.query.partition("=")[2]
        self._headers = {"authorization": f"Bearer {key}"}
        self._names = list(json.loads(self._open("/session"))["pictures"])
        self._over = threading.Event()
        self._num_events = self._num_pictures = self._num_scrapes = self._num_drawn = 0
        self._terminal, theirs = pty.openpty()
        os.set_blocking(self._terminal, False)
        env = {**os.environ, "LINES": str(TERMINAL[0]), "COLUMNS": str(TERMINAL[1])}
        self._top = subprocess.Popen(
            [str(BIN / "evenstep"), "top", str(run)],
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        cleanup.callback(os.close, self._terminal)
        cleanup.callback(end_process, self._top)
        cleanup.callback(self._top.send_signal, signal.SIGCONT)
        while not self._num_drawn:
            time.sleep(0.1)
            self._read_terminal()
        self._top.send_signal(signal.SIGSTOP)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look meanwhile. Fails if one saw nothing: the measurement would mean nothing."""
        before, self._over = self._seen, threading.Event()
        self._top.send_signal(signal.SIGCONT)
        looks = [
            threading.Thread(target=look, daemon=True)
            for look in (self._follow, self._draw, self._scrape)
        ]
        for look in looks:
            look.start()
        try:
            yield
        finally:
            self._over.set()
            for look in looks:
                look.join(BOUND_S)
            self._read_terminal()
            self._top.send_signal(signal.SIGSTOP)
        if any(now <= then for now, then in zip(self._seen, before, strict=True)):
            raise SystemExit(f"events, pictures, scrapes, screens: {before}, then {self._seen}")

    @property
    def _seen(self) -> tuple[int, int, int, int]:
        return self._num_events, self._num_pictures, self._num_scrapes, self._num_drawn

    def _open(self, path: str) -> bytes:
        with urlopen(Request(self._base + path, headers=self._headers), timeout=BOUND_S) as answer:
            return bytes(answer.read())

    def _follow(self) -> None:
        request = Request(f"{self._base}/events", headers=self._headers)
        with urlopen(request, timeout=BOUND_S) as answer:
            for line in answer:
                self._num_events += line.startswith(b"data:")
                if self._over.is_set():
                    return

    def _draw(self) -> None:
        while not self._over.wait(PICTURES_S):
            for name in self._names:
                self._open(f"/pictures/{name}?width=800")
                self._num_pictures += 1
            self._read_terminal()

    def _scrape(self) -> None:
        while not self._over.wait(SCRAPE_S):
            self._num_scrapes += b"evenstep_up 1" in self._open("/metrics")

    def _read_terminal(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._num_drawn += bool(os.read(self._terminal, 1 << 16))


def launch(rounds: int, block_s: float) -> list[tuple[float, float]]:
    """For each round of one run, the seconds of a step: watched, and unwatched."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        run = Path(folder, "run")
        starter = ["evenstep", "run", "--page", "--workers", str(WORLD), "--run", str(run)]
        most = WARM + rounds * 4 * (1 + int(block_s * 1000 / STEPS))  # of steps of a millisecond
        job = TurnJob(Path(folder, "job"), starter, cleanup, turns=most, steps=STEPS)
        for _ in range(WARM):
            job.take()
        _pin([worker["pid"] for worker in ask_run(run, "status")["workers"]])
        viewers = Viewers(run, _page_url(job.log), cleanup)
        found = []
        for _ in range(rounds):
            before_s = _step_s(job, block_s)
            with viewers.watching():
                watched_s = _step_s(job, 2 * block_s)
            found.append((watched_s, (before_s + _step_s(job, block_s)) / 2))
        return found


def _step_s(job: TurnJob, block_s: float) -> float:
    """Seconds of a step, over a block of turns."""
    seconds, num = 0.0, 0
    while seconds < block_s:
        seconds, num = seconds + job.take(), num + STEPS
    return seconds / num


def _pin(pids: list[int]) -> None:
    """Give each worker a CPU of its own: where the kernel puts them differs between blocks."""
    for pid, cpu in zip(pids, assign_cpus([1.0] * len(pids)), strict=True):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {cpu})


def _page_url(log: Path) -> str:
    deadline_s = time.monotonic() + BOUND_S
    while not (found := URL.search(log.read_text())):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no page: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    return found[1]


def cost(rounds: list[tuple[float, float]]) -> Cost:
    """The median of a round's ratio, with a 95 % interval by the spread of the rounds."""
    ratios = [watched_s / unwatched_s for watched_s, unwatched_s in rounds]
    low, _, high = quantiles(ratios)
    return Cost(median(ratios), 1.57 * (high - low) / math.sqrt(len(ratios)))


def main() -> None:
    """Measure, and write the result to docs/bench.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.viewers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="at most, if not enough")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each launch")
    parser.add_argument("--block", type=float, default=BLOCK_S, help="seconds of a block")
    args = parser.parse_args()
    rounds: list[tuple[float, float]] = []
    loads = []
    for number in range(1, args.launches + 1):
        loads.append(os.getloadavg()[0])
        rounds += launch(args.rounds, args.block)
        found = cost(rounds)
        print(f"launch {number}: {found.ratio:.4f} ± {found.uncertainty:.4f}", flush=True)
        if number > 1 and found.uncertainty <= ENOUGH:
            break
    step_ms = 1000 * median(unwatched_s for _, unwatched_s in rounds)
    result = (
        f"{WORLD} workers, {step_ms:.1f} ms a step while nobody looks; with a page, `top` and "
        f"Prometheus looking over that: {found.ratio:.4f} ± {found.uncertainty:.4f} (median over "
        f"{len(rounds)} rounds of {4 * args.block:g} s, {number} launches; load before each "
        f"{', '.join(f'{load:.1f}' for load in loads)})."
    )
    print(result)
    write("bench.md", "observed", result, made_by="python -m bench.viewers")


if __name__ == "__main__":
    main()
