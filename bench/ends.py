"""How long a run takes to end, by way of ending it, on a quiet machine and on a busy one.

    python -m bench.ends                   # about ten minutes; the table goes to docs/bench.md
    python -m bench.ends --rounds 1 --hogs 0

A run of three workers trains steps of 20 ms. It is ended while a step runs, and must then have a
checkpoint of all the steps before, exit with code 0 and leave no process behind. The table has the
longest of some rounds.
"""

from __future__ import annotations

import argparse
import os
import pty
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import msgspec

from bench.tables import markdown, write
from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP
from bench.testbed.source_tree import ROOT
from evenstep.coordinate.client import NoAnswerError, ask
from evenstep.emulate.interference import Interference
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.messages import Ask
from evenstep.processes import Liveness, ProcessIdentity

MADE_BY = "python -m bench.ends"
NUM_WORKERS, BOUND_S, POLL_S = 3, 600.0, 0.05
SETTLED = 20  # steps before a run is ended
SCRIPT = ROOT / "bench" / "testbed" / "train.py"


class Ended:
    """A run that is there to be ended; `stdin`, `stdout` and `stderr` are `stream`."""

    def __init__(self, folder: Path, stream: int) -> None:
        self.folder = folder
        command = [str(EVENSTEP), "run", "--workers", str(NUM_WORKERS), "--run", str(folder)]
        script = [str(SCRIPT), "--out", str(folder.parent), "--epochs", "0", "--prints", "20"]
        terminal = ["setsid", "--ctty"] if os.isatty(stream) else []
        self.process = subprocess.Popen(
            [*terminal, *die_with_parent([*command, *script])],
            stdin=stream,
            stdout=stream,
            stderr=stream,
            env={**ENVIRONMENT, "HELD_BY": str(os.getpid())},
        )
        os.close(stream)

    def step(self) -> int:
        """Steps taken; -1 if nobody answers yet."""
        try:
            host, _, port = (self.folder / "address").read_text().split()[0].rpartition(":")
            token = (self.folder / "token").read_text().strip()
            return int(ask(host, int(port), token, Ask(proof="", what="status"))["step"])
        except (NoAnswerError, OSError, IndexError):
            return -1

    def settle(self) -> int:
        """Train some steps; returns how many were taken in all."""
        until = max(self.step(), 0) + SETTLED
        deadline_s = time.monotonic() + BOUND_S
        while (step := self.step()) < until:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the run does not train: {self.process.poll()}, step {step}")
            time.sleep(POLL_S)
        return step

    def check(self, step: int) -> None:
        """Raise if it did not end in order with all steps saved."""
        saved = max(int(p.stem.removeprefix("step-")) for p in self.folder.glob("checkpoints/*.pt"))
        left = [
            str(file)
            for file in self.folder.glob("logs/*.pid")
            if msgspec.json.decode(file.read_bytes(), type=ProcessIdentity).liveness()
            is Liveness.ALIVE
        ]
        if self.process.returncode or saved < step or left:
            raise SystemExit(
                f"exit code {self.process.returncode}, step {saved} of {step} saved, {left} left"
            )


def by_signal(number: signal.Signals) -> Callable[[Ended, int], None]:
    return lambda run, _: run.process.send_signal(number)


def by_hanging_up(_: Ended, ours: int) -> None:
    os.close(ours)


def in_file(folder: Path) -> tuple[int, int]:
    return os.open(os.devnull, os.O_RDONLY), os.open(folder / "log", os.O_RDWR | os.O_CREAT)


def in_pipe(folder: Path) -> tuple[int, int]:
    return os.pipe()


def in_terminal(folder: Path) -> tuple[int, int]:
    return pty.openpty()


Streams = Callable[[Path], tuple[int, int]]
WAYS: dict[str, tuple[Streams, Callable[[Ended, int], None]]] = {
    "Ctrl-C (SIGINT)": (in_file, by_signal(signal.SIGINT)),
    "SIGTERM": (in_file, by_signal(signal.SIGTERM)),
    "SIGHUP": (in_file, by_signal(signal.SIGHUP)),
    "a closed terminal": (in_terminal, by_hanging_up),
    "`2>&1 \\| head`": (in_pipe, by_hanging_up),
}


def measure(way: str, num_hogs: int) -> float:
    """Seconds from the request to end a run until its last process is gone."""
    make_streams, end = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="ends-") as name:
        ours, theirs = make_streams(Path(name))
        run = Ended(Path(name) / "run", theirs)
        try:
            run.settle()
            cores = sorted(os.sched_getaffinity(0))
            busy = [cores[i % len(cores)] for i in range(num_hogs)]
            with closing(Interference(busy)) if busy else nullcontext():
                step = run.settle()
                began_s = time.monotonic()
                end(run, ours)
                run.process.wait(BOUND_S)
                took_s = time.monotonic() - began_s
            run.check(step)
            return took_s
        finally:
            run.process.kill()
            run.process.wait()


def main() -> None:
    """Measure all ways, and print the table."""
    parser = argparse.ArgumentParser(prog=MADE_BY, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hogs", type=int, default=20, help="busy processes")
    parser.add_argument("--write", action="store_true", help="write the table to docs/bench.md")
    args = parser.parse_args()
    rows = []
    for way in WAYS:
        longest = {n: max(measure(way, n) for _ in range(args.rounds)) for n in (0, args.hogs)}
        print(way, *(f"{num} hogs: {took_s:.1f} s" for num, took_s in longest.items()), flush=True)
        rows.append((way, *(f"{took_s:.1f}" for took_s in longest.values())))
    table = markdown(("ended by", "quiet, s", f"load {args.hogs}, s"), rows)
    print(table)
    if args.write:
        write("bench.md", "ends", table, MADE_BY)


if __name__ == "__main__":
    main()
