"""A worker's output ends up in its log, and nothing that happens there reaches the script."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path

import pytest
from bench.testbed.disk import small_disk

from evenstep.launch.output import WorkerOutput

BOUND_S = 600.0
PRINTS = "import sys\nfor line in sys.stdin: print(line.strip() * 1000, flush=True)"


def start_printing(output: WorkerOutput) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", PRINTS]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output.write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(output.write_end)
    return worker


def ended(worker: subprocess.Popen[str]) -> int:
    assert worker.stdin is not None
    assert worker.stderr is not None
    worker.stdin.close()
    worker.wait(BOUND_S)
    assert worker.stderr.read() == ""
    worker.stderr.close()
    return worker.returncode


def until_drained(output: WorkerOutput) -> None:
    while not output.poll():
        time.sleep(0.01)
    output.close()


def test_a_full_disk_never_fails_a_script_that_prints(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        path = disk.path / "w0.log"
        output = WorkerOutput(path)
        worker = start_printing(output)

        def say(text: str, num: int) -> None:
            assert worker.stdin is not None
            worker.stdin.write(f"{text}\n" * num)
            worker.stdin.flush()

        say("before", 1)
        while not path.exists() or b"before" not in path.read_bytes():
            assert not output.poll()
        disk.fill()
        say("during", 2000)  # more than the pipe holds, so it was drained
        disk.free()
        say("after", 1)
        assert ended(worker) == 0
        until_drained(output)
        log = path.read_text()
        assert log.startswith("before")
        assert log.endswith("after\n")


def test_the_drain_outlives_its_parent_and_signals_and_ends_with_the_worker(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path / "w0.log")
    os.write(output.write_end, b"one\n")
    while not (tmp_path / "w0.log").exists():
        assert not output.poll()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(output._drain.pid, number)
    os.write(output.write_end, b"two\n")
    assert os.getsid(output._drain.pid) == output._drain.pid
    os.close(output.write_end)
    until_drained(output)
    assert (tmp_path / "w0.log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("parent_lives", [True, False])
def test_a_script_prints_on_if_its_drain_is_killed(tmp_path: Path, parent_lives: bool) -> None:
    output = WorkerOutput(tmp_path / "w0.log")
    worker = start_printing(output)
    os.kill(output._drain.pid, signal.SIGKILL)
    output.wait()
    if not parent_lives:
        output.close()
    assert worker.stdin is not None
    num = 500 if parent_lives else 100  # more than the pipe holds; less, as nobody drains it
    worker.stdin.write("line\n" * num)
    worker.stdin.close()
    while worker.poll() is None:
        time.sleep(0.01)
        if parent_lives:
            output.poll()
    assert ended(worker) == 0
    if parent_lives:
        until_drained(output)
        assert (tmp_path / "w0.log").read_text() == ("line" * 1000 + "\n") * num


def test_output_that_was_lost_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    output = WorkerOutput(folder / "w0.log")  # the folder is not there
    os.write(output.write_end, b"x" * 5)
    num_waiting = array("i", [1])
    while num_waiting[0]:
        assert not output.poll()
        fcntl.ioctl(output.write_end, termios.FIONREAD, num_waiting)
    os.kill(output._drain.pid, signal.SIGSTOP)  # it may be about to open the log
    os.waitpid(output._drain.pid, os.WUNTRACED)
    os.kill(output._drain.pid, signal.SIGCONT)
    os.write(output.write_end, b"y")
    while fcntl.ioctl(output.write_end, termios.FIONREAD, num_waiting) or num_waiting[0]:
        assert not output.poll()
    folder.mkdir()
    os.close(output.write_end)
    until_drained(output)
    assert "bytes of output are lost: No such file or directory]" in (
        (folder / "w0.log").read_text()
    )
