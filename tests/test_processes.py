"""Processes are told apart by host, boot, namespace, pid and start time together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.testbed.source_tree import PYTHONPATH
from msgspec.json import encode
from msgspec.structs import replace

from evenstep.processes import Liveness, ProcessIdentity

LOOK = """
import sys, msgspec
from evenstep.processes import ProcessIdentity
print(msgspec.json.decode(sys.argv[1], type=ProcessIdentity).liveness().value)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_process_is_alive_until_it_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    found = ProcessIdentity.of(sleeper.pid)
    assert found.liveness() is Liveness.ALIVE
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert found.liveness() is Liveness.ENDED  # a zombie
    sleeper.wait()
    assert found.liveness() is Liveness.ENDED
    with pytest.raises(OSError, match="No such"):
        ProcessIdentity.of(sleeper.pid)


def test_another_process_with_the_same_pid_is_not_taken_for_it() -> None:
    mine = ProcessIdentity.of(os.getpid())
    assert replace(mine, ticks=mine.ticks - 1).liveness() is Liveness.ENDED


def test_a_reboot_ends_everything_and_another_host_cannot_tell() -> None:
    mine = ProcessIdentity.of(os.getpid())
    bare = mine.namespace == 0xEFFFFFFC and mine.machine
    rebooted = replace(mine, boot="another")
    assert rebooted.liveness() is (Liveness.ENDED if bare else Liveness.UNKNOWN)
    for elsewhere in (
        replace(mine, host="another", boot="another"),
        replace(mine, machine="another", boot="another"),  # as clones of one image may be named
        replace(mine, machine="", boot="another"),
        replace(mine, namespace=1),
        replace(mine, namespace=1, boot="another"),  # a container that was moved keeps its name
    ):
        assert elsewhere.liveness() is Liveness.UNKNOWN, elsewhere


def test_setting_the_clock_ends_nobody(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """The kernel's boot time moves when the clock is set."""
    stat = Path("/proc/stat").read_text()
    (tmp_path / "stat").write_text(
        re.sub(r"^btime (\d+)", lambda m: f"btime {int(m[1]) + 1}", stat, flags=re.MULTILINE)
    )
    mount = f"mount --bind {tmp_path / 'stat'} /proc/stat"
    found = look(sleeper.pid, "unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    assert found == Liveness.ALIVE.value


def test_from_another_pid_namespace_nobody_can_tell(sleeper: subprocess.Popen[bytes]) -> None:
    found = look(sleeper.pid, "unshare", "--pid", "--fork", "--mount-proc")
    assert found == Liveness.UNKNOWN.value


def look(pid: int, *within: str) -> str:
    """What a process that is started `within` something can tell of this one."""
    identity = encode(ProcessIdentity.of(pid)).decode()
    command = [*within, sys.executable, "-c", LOOK, identity]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if "not permitted" in done.stderr:
        pytest.skip(f"cannot make a namespace: {done.stderr.strip()}")
    assert done.stderr == ""
    return done.stdout.strip()
