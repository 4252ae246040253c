"""A worker's output ends up in its log, and nothing that happens there reaches the script."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from array import array
from pathlib import Path

from bench.testbed.disk import small_disk

from evenstep.launch.output import start_drain

BOUND_S = 600.0
PRINTS = "import sys\nfor line in sys.stdin: print(line.strip() * 1000, flush=True)"


def test_a_full_disk_never_fails_a_script_that_prints(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        path = disk.path / "w0.log"
        drain, output = start_drain(path)
        worker = subprocess.Popen(
            [sys.executable, "-S", "-c", PRINTS], stdin=subprocess.PIPE, stdout=output, text=True
        )
        os.close(output)
        assert worker.stdin is not None

        def say(text: str, num: int) -> None:
            assert worker.stdin is not None
            worker.stdin.write(f"{text}\n" * num)
            worker.stdin.flush()

        say("before", 1)
        while not path.exists() or b"before" not in path.read_bytes():
            assert drain.poll() is None
        disk.fill()
        say("during", 2000)  # more than the pipe holds, so it was drained
        disk.free()
        say("after", 1)
        worker.stdin.close()
        assert worker.wait(BOUND_S) == 0
        assert drain.wait(BOUND_S) == 0
        log = path.read_text()
        assert log.startswith("before")
        assert log.endswith("after\n")


def test_the_drain_outlives_its_parent_and_signals_and_ends_with_the_worker(tmp_path: Path) -> None:
    drain, output = start_drain(tmp_path / "w0.log")
    os.write(output, b"one\n")
    while not (tmp_path / "w0.log").exists():
        assert drain.poll() is None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        drain.send_signal(number)
    os.write(output, b"two\n")
    assert os.getsid(drain.pid) == drain.pid
    os.close(output)
    assert drain.wait(BOUND_S) == 0
    assert (tmp_path / "w0.log").read_text() == "one\ntwo\n"


def test_output_that_was_lost_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    drain, output = start_drain(folder / "w0.log")  # the folder is not there
    os.write(output, b"x" * 5)
    num_waiting = array("i", [1])
    while num_waiting[0]:
        assert drain.poll() is None
        fcntl.ioctl(output, termios.FIONREAD, num_waiting)
    drain.send_signal(signal.SIGSTOP)  # it may be about to open the log
    os.waitpid(drain.pid, os.WUNTRACED)
    drain.send_signal(signal.SIGCONT)
    os.write(output, b"y")
    while fcntl.ioctl(output, termios.FIONREAD, num_waiting) or num_waiting[0]:
        assert drain.poll() is None
    folder.mkdir()
    os.close(output)
    assert drain.wait(BOUND_S) == 0
    assert "bytes of output are lost: No such file or directory]" in (
        (folder / "w0.log").read_text()
    )
