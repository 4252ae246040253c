"""A training script that does not train: workers share a step counter in a file.

Arguments: the number of steps; then, optionally, a fault and the worker that has it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from evenstep.launch.environment import CoordinatorAddress, read_environment
from evenstep.messages import (
    Alive,
    Done,
    Failed,
    FromClient,
    Generation,
    Goodbye,
    Leaving,
    Paused,
)
from tests.coordinate.fake import FakeWorker

STEP_S = 0.02


class ScriptWorker(FakeWorker):
    """What it says to a coordinator that is gone is lost; the next poll notices."""

    _speaks = threading.Lock()

    def say(self, message: FromClient) -> None:
        with self._speaks, suppress(OSError):
            super().say(message)

    def leave(self, *_: object) -> None:
        """On SIGTERM, which may have interrupted `say`."""
        threading.Thread(target=self.say, args=(Leaving(why="SIGTERM"),)).start()


def main(num_steps: int, wrong: str = "", who: str = "") -> None:
    where = read_environment(os.environ)
    assert isinstance(where, CoordinatorAddress)
    if wrong == "import" and where.worker == who:
        raise ImportError("no module named tensorbored")
    address = f"{where.host}:{where.port}"
    # A test may send SIGTERM as soon as the coordinator lists this worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    worker = ScriptWorker(address, where.token, where.worker, fingerprint=where.fingerprint)
    counter = Path(worker.welcome.run) / "steps"
    say(f"{worker.id} is here, resuming {worker.welcome.resume or 'nothing'}")
    signal.signal(signal.SIGTERM, worker.leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        train(worker, counter, num_steps, wrong if who in (worker.id, "all") else "")
    except Exception:
        worker.say(Failed(told=traceback.format_exc()))
        raise


def train(worker: FakeWorker, counter: Path, num_steps: int, wrong: str) -> None:
    paused = False
    while (steps := _read(counter)) < num_steps:
        time.sleep(STEP_S)
        try:
            message = worker.poll(0.0)
            worker.say(Alive(generation=worker.number, step=steps, waiting=False))
        except (OSError, EOFError):
            worker.dial_again()
            say(f"{worker.id} is back")
            continue
        match message:
            case Goodbye(trained=trained):
                sys.exit(0 if trained else os.EX_TEMPFAIL)
            case Paused():
                paused = True
            case Generation(number=number, roster=roster):
                paused = False
                if not roster and worker.generation and worker.generation.roster[0] == worker.id:
                    (Path(worker.welcome.run) / "checkpoints" / f"step-{steps}.pt").touch()
                if worker.id not in roster:
                    say(f"{worker.id} leaves")
                    if wrong == "linger":
                        signal.signal(signal.SIGTERM, signal.SIG_DFL)
                        worker.close()
                        say(f"{worker.id} lingers")
                        time.sleep(600)
                    sys.exit(os.EX_TEMPFAIL)
                worker.begin(message)
                say(f"{worker.id} begins {number} of {len(roster)}")
        generation = worker.generation
        if generation is None or paused or isinstance(message, Generation):
            continue
        if wrong == "raise" and steps >= 3:
            raise ValueError("the data is bad")
        if wrong == "die" and steps >= 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong == "exit" and steps >= 3:
            os._exit(7)
        if wrong == "hang" and steps >= 3:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say(f"{worker.id} hangs")
            time.sleep(600)
        if generation.roster[0] == worker.id:
            worker.step(steps)
            _write(counter, steps + 1)
    worker.say(Done(step=steps))
    worker.hear(Goodbye)
    if wrong == "after":
        raise RuntimeError("cannot save the model")
    if wrong in ("busy after", "stubborn after"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL if wrong == "busy after" else signal.SIG_IGN)
        say(f"{worker.id} saves its model")
        time.sleep(600)
    if wrong == "killed after":
        os.kill(os.getpid(), signal.SIGKILL)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _read(counter: Path) -> int:
    return int(counter.read_text()) if counter.exists() else 0


def _write(counter: Path, steps: int) -> None:
    fresh = counter.with_suffix(f".{os.getpid()}")  # two may lead for a moment
    fresh.write_text(str(steps))
    fresh.rename(counter)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
