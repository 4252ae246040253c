"""Two hosts that share a folder, but no locks and no processes, never train one run at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP
from bench.testbed.hosts import Host, make_hosts
from bench.testbed.live_run import HELD, SCRIPT, epoch_args, same, until

from evenstep.coordinate.term import read_term
from tests.faults.conftest import Alone

pytestmark = pytest.mark.long

ENOUGH = 20  # steps, to say that a cluster trains

# A host of its own: PID namespace, name and boot id, and a token whose lock no other host sees.
# Its first process stays, so that workers outlive their coordinator.
HOST = """
hostname "$NAME" && mount --bind "$BOOT" /proc/sys/kernel/random/boot_id || exit 99
[ ! -e "$TOKEN" ] || mount --bind "$TOKEN" "$RUN/token" || exit 99
"$@"; echo $? > "$CODE"; sleep infinity
"""


class Cluster:
    """`evenstep run` on a host of its own, over a folder that all share."""

    def __init__(self, name: str, host: Host, folder: Path) -> None:
        self.name, self._host, self._folder = name, host, folder
        self.run = folder / "run"
        self._log, self._code = folder / f"{name}.log", folder / f"{name}.code"
        (folder / f"{name}.boot").write_text(f"{uuid.uuid4()}\n")

    def start(self, *options: str) -> None:
        token, folder = self._folder / f"{self.name}.token", self._folder
        if self.run.exists():
            shutil.copy(self.run / "token", token)
        env = {
            **ENVIRONMENT,
            **{"NAME": self.name, "CLUSTER": self.name, "WITNESS": str(folder / "witness")},
            **{"BOOT": str(folder / f"{self.name}.boot"), "CODE": str(self._code)},
            **{"RUN": str(self.run), "TOKEN": str(token)},
        }
        env.pop("HELD_BY")  # a pid of another namespace
        command = [str(EVENSTEP), "run", *options, str(SCRIPT), "--out", str(folder / "out"), *HELD]
        apart = ["unshare", "--pid", "--fork", "--mount-proc", "--uts", "sh", "-c", HOST, "sh"]
        with self._log.open("w") as log:
            self._host.popen([*apart, *command], env=env, stdout=log, stderr=subprocess.STDOUT)
        until(lambda: "coordinator at" in self.output() or self._code.exists())
        assert self._code.exists() is False, self.output()

    def kill_coordinator(self) -> None:
        (pid,) = [pid for pid in self._host.pids() if str(EVENSTEP) in _command(pid)[1:2]]
        os.kill(pid, signal.SIGKILL)

    def code(self) -> int:
        """The exit code of the coordinator, once it has ended."""
        until(lambda: self._code.exists() and bool(self._code.read_text()))
        return int(self._code.read_text())

    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def trains(self) -> None:
        """Wait until this cluster trains."""
        until(lambda: sum(name == self.name for name, _ in self.witness()) >= ENOUGH)

    def witness(self) -> list[tuple[str, int]]:
        """All steps of all clusters, in the order in which they were taken."""
        path = self._folder / "witness"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(name, int(step)) for name, step in (line.split() for line in lines)]


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[tuple[Cluster, Cluster]]:
    (tmp_path / "out").mkdir()
    with make_hosts(2) as hosts:
        a, b = (Cluster(n, host, tmp_path) for n, host in zip("AB", hosts, strict=True))
        yield a, b
        sys.stdout.write(f"--- A\n{a.output()}\n--- B\n{b.output()}")  # if the test failed


def finish(b: Cluster, folder: Path) -> dict[str, Any]:
    """Let the second cluster train to the end; the results of its workers, which are the same."""
    (folder / "out" / "go").touch()
    assert b.code() == 0
    ends = [torch.load(path, weights_only=True) for path in (folder / "out").glob("*.pt")]
    assert len(ends) == 2
    names = [name for name, _ in b.witness()]
    assert names == sorted(names), "one cluster trained while the other did"
    return dict(ends[0])


def test_workers_that_another_host_cannot_see_are_waited_for(
    clusters: tuple[Cluster, Cluster], tmp_path: Path, alone: Alone
) -> None:
    """The coordinator is killed, its workers train on, and the run is resumed elsewhere."""
    a, b = clusters
    a.start("--run", str(a.run), "--workers", "2", "--lease", "5")
    a.trains()
    a.kill_coordinator()
    b.start("--resume", str(a.run), "--workers", "2", "--lease", "1")
    assert "waiting up to 6 s for w0, w1 to reconnect" in b.output()
    b.trains()
    last = max(step for name, step in a.witness() if name == "A")
    first = min(step for name, step in b.witness() if name == "B")
    assert first >= last  # it goes on from the checkpoint that the others wrote at their end
    end = finish(b, tmp_path)
    assert same(end, alone(*epoch_args(end["step"])))


def test_a_coordinator_ends_when_another_host_takes_its_run_over(
    clusters: tuple[Cluster, Cluster], tmp_path: Path, alone: Alone
) -> None:
    a, b = clusters
    options = ("--lease", "5", "--checkpoint-every", "0.5")
    a.start("--run", str(a.run), "--workers", "2", *options)
    a.trains()
    until(lambda: any(a.run.glob("checkpoints/*.pt")))
    b.start("--resume", str(a.run), "--workers", "2", *options)
    assert a.code() == 1
    assert "another coordinator has taken the run over: process" in a.output()
    b.trains()
    assert read_term(a.run).number == 2
    end = finish(b, tmp_path)
    assert same(end, alone(*epoch_args(end["step"])))
