"""Processes of the fork server are like those that `python SCRIPT` starts."""

from __future__ import annotations

from pathlib import Path

from bench.testbed.fork_server import fork_server

REPLACES = """
import os, sys
sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
print("both are open:", os.fstat(1) == os.fstat(2))
"""


def test_a_script_may_replace_its_streams(tmp_path: Path) -> None:
    """Sockets that took the numbers of closed streams would receive what the script prints."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(REPLACES)
    assert fork_server().run([script], {}, log).wait() == 0
    assert log.read_text() == "both are open: True\n"
