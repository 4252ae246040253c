"""A fork server: real worker processes that start in milliseconds, with torch already imported.

Run as a script it is the server. It imports torch once and forks a process for each request, which
then runs a script as `python SCRIPT ARGS` would. A monitor process sits between the two: it reports
the pid and, later, the exit code. When the connection of a request is closed, its worker is killed;
if the owner of the server dies, so do server, monitors and workers.

`warm_start.py` lets a process that another program starts run its script here.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from bench.testbed.source_tree import PYTHONPATH

PRELOADED = (
    "torch._dynamo",  # imported by the first optimizer and the first synchronised BatchNorm
    "evenstep.emulate",
    "evenstep.train.roster.elastic",
    "evenstep.train.roster.fixed",
)
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
PR_SET_PDEATHSIG = 1
REQUEST_BYTES = 1 << 16
NUM_STREAMS = 3  # standard input, output and error of the worker


class Forked:
    """A worker process. `fileno()` becomes readable when it has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("r")
        self._connection = connection
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the process to end. Returns its exit code; negative: a signal."""
        if self.returncode is None:
            if not select.select([self], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode


class ForkServer:
    """The server of this process."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        # A short path: unix socket paths have at most 108 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        self.path = f"{self._folder.name}/socket"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
        self._server = subprocess.Popen(
            [sys.executable, __file__, self.path, *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n", "the fork server did not start"
        atexit.register(self.close)

    def run(self, argv: Sequence[str | Path], env: Mapping[str, str], log: Path) -> Forked:
        """Start `python *argv` with extra variables; its output is appended to `log`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        request = {"argv": [str(part) for part in argv], "env": dict(env)}
        nothing, onto = os.open(os.devnull, os.O_RDONLY), os.open(log, LOG_FLAGS, 0o644)
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [nothing, onto, onto])
        os.close(nothing)
        os.close(onto)
        return Forked(connection)

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()
        self._folder.cleanup()


@cache
def fork_server(*preload: str) -> ForkServer:
    """The server of this process that has imported these too, started on first use."""
    return ForkServer(preload)


def serve(path: str, *preload: str) -> None:
    """Fork on request until standard input ends."""
    for module in (*PRELOADED, *preload):
        import_module(module)
    gc.collect()
    gc.freeze()  # so that garbage collection in children does not copy these pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # monitors are not waited for
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while sys.stdin not in (found := select.select([listener, sys.stdin], [], [])[0]):
        assert listener in found
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _monitor(connection)
        connection.close()


def _monitor(connection: socket.socket) -> NoReturn:
    """In a child of the server: fork the worker, wait for it, and report."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES, NUM_STREAMS)
    while not text.endswith(b"\n"):
        text += connection.recv(REQUEST_BYTES)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _work(json.loads(text), fds)
    for fd in (0, 1, 2, *fds):  # an open one would keep the reader of the output waiting
        os.close(fd)
    connection.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if ended not in select.select([connection.fileno(), ended], [], [])[0]:  # it was closed
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _work(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """In a grandchild of the server: become the worker."""
    _die_with_parent()
    os.setsid()
    if "network" in request:  # a namespace
        try:
            fd = os.open(request["network"], os.O_RDONLY)
        except FileNotFoundError:  # the process that asked for this one was killed
            os._exit(1)
        assert ctypes.CDLL(None).setns(fd, 0) == 0, "cannot enter the network namespace"
        os.close(fd)
    for fd, onto in zip(streams, range(NUM_STREAMS), strict=True):
        os.dup2(fd, onto)
        os.close(fd)
    # Not closed with these objects: programs replace them, as `evenstep verify` does.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww")
    )
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    code: int | str | None = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))  # torch's shutdown is slow


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(*sys.argv[1:])
