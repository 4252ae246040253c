"""Workers as processes of this machine: what is left of one that has ended, or never began."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenstep.launch.local import LocalLauncher
from evenstep.types import Launch

BOUND_S = 30.0
SLEEP = "import time; time.sleep(600)"
ONE = Launch(num_workers=1, reason="asked for")


class Ends:
    """A launcher of one command, and the ends that it tells of."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.heard: list[tuple[str, int, str]] = []
        names = (f"w{n}" for n in range(100))
        self.out = io.StringIO()
        self.launcher = LocalLauncher(
            command,
            env=os.environ,
            logs=folder,
            name=lambda: next(names),
            on_end=lambda *end: self.heard.append(end),
            out=self.out,
        )


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(what, BOUND_S))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_stays_open_of_workers_that_have_ended(tmp_path: Path) -> None:
    async def launch_some() -> None:
        ends = Ends(tmp_path, sys.executable, "-S", "-c", "print('a line')")
        ends.launcher.launch(ONE)
        assert await ends.launcher.wait()
        while "[w0] a line" not in ends.out.getvalue():
            await asyncio.sleep(0.01)
        before = open_files()
        for n in range(1, 4):
            ends.launcher.launch(ONE)
            assert await ends.launcher.wait()
            while f"[w{n}] a line" not in ends.out.getvalue() or open_files() > before:
                await asyncio.sleep(0.01)
        assert [(worker, code) for worker, code, _ in ends.heard] == [
            (f"w{n}", 0) for n in range(4)
        ]
        await ends.launcher.close()

    run(launch_some())


@pytest.mark.parametrize("what", ["os.pidfd_open", "pathlib.Path.write_text"])
def test_a_process_that_cannot_be_looked_after_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    started: list[psutil.Process] = []

    def full(*_: Any) -> None:
        started.extend(p for p in psutil.Process().children() if SLEEP in p.cmdline())
        raise OSError(errno.EMFILE, "Too many open files")

    async def launch_one() -> None:
        ends = Ends(tmp_path, sys.executable, "-S", "-c", SLEEP)
        with monkeypatch.context() as patched:
            patched.setattr(what, full)
            with pytest.raises(OSError, match="Too many open files"):
                ends.launcher.launch(ONE)
        (process,) = started
        assert not process.is_running()
        assert await ends.launcher.wait(0.0)
        assert ends.heard == []
        await ends.launcher.close()

    run(launch_one())
