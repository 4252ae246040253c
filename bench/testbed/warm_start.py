"""Runs a script in a worker of the fork server, as if this process had run it.

    FORK_SERVER=SOCKET [WARM_SCRIPT=PATH] python warm_start.py ARGS

So `evenstep run` starts workers in milliseconds. This process stands for its worker: it passes
signals on, ends as the worker ends, and takes the worker with it if it is killed. Imports nothing
that is slow.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

SCRIPT = os.environ.get("WARM_SCRIPT", os.path.join(os.path.dirname(__file__), "train.py"))


def main() -> None:
    """Start the worker and wait for it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["FORK_SERVER"])
    request = {
        "argv": [SCRIPT, *sys.argv[1:]],
        "env": dict(os.environ),
        "network": f"/proc/{os.getpid()}/ns/net",
    }
    socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    lines = connection.makefile("r")
    pid = int(lines.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: forward(pid, number))
    code = int(lines.readline())
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def forward(pid: int, number: int) -> None:
    """Pass a signal on to the worker, if it has not just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
