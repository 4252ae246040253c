"""Local worker processes: exits are noticed at once, and nothing leaks."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenstep.launch.local import LocalLauncher, LocalProcess

BOUND_S = 600.0
SLEEP = "import time; time.sleep(600)"


class Ends:
    """A launcher of one command, and the exits that it reports."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.ended: list[tuple[str, int, str]] = []
        self.dying: list[tuple[str, int]] = []
        self._names = (f"w{n}" for n in range(100))
        self.out = io.StringIO()
        self.launcher = LocalLauncher(
            command,
            env=os.environ,
            logs=folder,
            on_dying=lambda *dying: self.dying.append(dying),
            on_end=lambda *end: self.ended.append(end),
            out=self.out,
        )

    def start_one(self) -> None:
        self.launcher.start("", (next(self._names),))


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(what, BOUND_S))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_exited_workers_leave_no_open_files(tmp_path: Path) -> None:
    async def launch_some() -> None:
        ends = Ends(tmp_path, sys.executable, "-S", "-c", "print('a line')")
        ends.start_one()
        assert await ends.launcher.wait()
        while "[w0] a line" not in ends.out.getvalue():
            await asyncio.sleep(0.01)
        before = open_files()
        for n in range(1, 4):
            ends.start_one()
            assert await ends.launcher.wait()
            while f"[w{n}] a line" not in ends.out.getvalue() or open_files() > before:
                await asyncio.sleep(0.01)
        assert [(worker, code) for worker, code, _ in ends.ended] == [
            (f"w{n}", 0) for n in range(4)
        ]
        await ends.launcher.end_all()

    run(launch_some())


@pytest.mark.parametrize("what", ["os.pidfd_open", "pathlib.Path.write_bytes"])
def test_a_process_that_cannot_be_watched_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    started: list[psutil.Process] = []
    before = psutil.Process().children()

    def full(*_: Any) -> None:
        # Not by its command line, which is empty right after the start.
        started.extend(p for p in psutil.Process().children() if p not in before)
        del started[:-1]  # what drains its output was started before
        raise OSError(errno.EMFILE, "Too many open files")

    async def launch_one() -> None:
        ends = Ends(tmp_path, sys.executable, "-S", "-c", SLEEP)
        with monkeypatch.context() as patched:
            patched.setattr(what, full)
            with pytest.raises(OSError, match="Too many open files"):
                ends.start_one()
        (process,) = started
        assert not process.is_running()
        assert await ends.launcher.wait(0.0)
        assert ends.ended == []
        await ends.launcher.end_all()

    run(launch_one())


@pytest.mark.parametrize(
    ("command", "number"), [(SLEEP, signal.SIGKILL), (SLEEP, signal.SIGTERM), ("exit(3)", 0)]
)
def test_the_signal_that_kills_a_process_is_seen_before_it_is_gone(
    tmp_path: Path, command: str, number: int
) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", command])
    running = LocalProcess.open(process, process.pid, tmp_path / "log")
    if number:
        assert running.killed_by() == 0
        process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as if slow to end
    assert running.killed_by() == number
    process.wait()
    assert running.killed_by() == 0
    running.close()


def test_a_dying_process_is_reported_once_and_before_its_end(tmp_path: Path) -> None:
    async def kill_one() -> None:
        ends = Ends(tmp_path, sys.executable, "-S", "-c", SLEEP)
        loop = asyncio.get_running_loop()
        ends.start_one()
        (running,) = ends.launcher._running.values()
        loop.remove_reader(running.pidfd)  # hide its end for now
        running.signal(signal.SIGKILL)
        while not ends.dying:
            await asyncio.sleep(0.01)
        for _ in range(3):
            ends.launcher._poll()
        assert ends.dying == [("w0", signal.SIGKILL)]
        assert ends.ended == []
        loop.add_reader(running.pidfd, ends.launcher._ended, "w0")
        assert await ends.launcher.wait()
        assert [(worker, code) for worker, code, _ in ends.ended] == [("w0", -signal.SIGKILL)]
        await ends.launcher.end_all()

    run(kill_one())


PRINTS_ON = """
import os, sys
os.kill(int(input()), 9)
print("x" * 3_000_000)
"""


def test_a_killed_drain_is_replaced_and_the_worker_does_not_notice(tmp_path: Path) -> None:
    async def kill_the_drain() -> None:
        go = tmp_path / "go"
        os.mkfifo(go)
        script = f"import sys; sys.stdin = open({str(go)!r})\n{PRINTS_ON}"
        ends = Ends(tmp_path, sys.executable, "-S", "-c", script)
        ends.start_one()
        output = ends.launcher._running["w0"].output
        assert output is not None
        await asyncio.to_thread(go.write_text, f"{output._drain.pid}\n")
        assert await ends.launcher.wait()
        assert [(worker, code) for worker, code, _ in ends.ended] == [("w0", 0)]
        assert (tmp_path / "w0.log").read_text() == "x" * 3_000_000 + "\n"
        await ends.launcher.end_all()

    run(kill_the_drain())


def test_workers_are_watched_again_once_their_folder_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()

    async def move_away_and_back() -> None:
        ends = Ends(logs, sys.executable, "-S", "-c", SLEEP)
        ends.launcher.start("", ["w0"])
        (logs / "w0.pid").unlink()  # it is to be written again
        logs.rename(tmp_path / "away")
        while "No such file or directory; files of workers are written" not in caplog.text:
            await asyncio.sleep(0.01)
        (tmp_path / "away").rename(logs)
        while not (logs / "w0.pid").exists():
            await asyncio.sleep(0.01)
        ends.launcher.kill("w0")
        assert await ends.launcher.wait()
        assert [(worker, code) for worker, code, _ in ends.ended] == [("w0", -9)]
        await ends.launcher.end_all()

    run(move_away_and_back())
    assert caplog.text.count("files of workers are written once they can be") == 1
    assert "Traceback" not in caplog.text
