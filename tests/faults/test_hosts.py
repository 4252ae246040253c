"""Several hosts: workers join from other hosts, and network links fail and recover."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP
from bench.testbed.hosts import Host, Hosts, make_hosts
from bench.testbed.live_run import HELD, SCRIPT, epoch_args, same, until

from tests.faults.conftest import Alone

pytestmark = pytest.mark.long

EVICTED = 75  # or gone before the end of training


class MultiHostRun:
    """A held run with its coordinator on the first host; workers join from the others."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.hosts, self.run, self.out = hosts, folder / "disk" / "run", folder / "out"
        self.out.mkdir()
        self.run.parent.mkdir()
        self._path = folder / "log"
        self._log = self._path.open("w")

    def coordinate(self, *options: str) -> subprocess.Popen[Any]:
        """Start the run on the first host."""
        command = [str(EVENSTEP), "run", "--restarts", "0", "--run", str(self.run), *options]
        where = ["--host", self.hosts[0].address]
        process = self._popen(self.hosts[0], [*command, *where, *self._script()])
        until(lambda: (self.run / "address").exists())
        return process

    def join(self, i: int, *, disk: bool = True) -> subprocess.Popen[Any]:
        """Start a worker on another host; without `disk` it cannot see the run folder."""
        address = (self.run / "address").read_text().strip()
        token = self.out.with_name("token")
        token.write_text((self.run / "token").read_text())
        command = [str(EVENSTEP), "join", "--token-file", str(token), address, *self._script()]
        if not disk:
            hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']
            command = [*hide, str(self.run.parent), *command]
        return self._popen(self.hosts[i], command)

    def go(self) -> None:
        """Let the run finish at the end of its current epoch."""
        (self.out / "go").touch()

    def _script(self) -> list[str]:
        return [str(SCRIPT), "--out", str(self.out), *HELD]

    def output(self) -> str:
        """Everything printed so far, on all hosts."""
        return self._path.read_text()

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _popen(self, host: Host, command: Sequence[str]) -> subprocess.Popen[Any]:
        return host.popen(command, env=ENVIRONMENT, stdout=self._log, stderr=subprocess.STDOUT)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MultiHostRun]:
    with make_hosts(3) as hosts:
        found = MultiHostRun(tmp_path, hosts)
        yield found
        sys.stdout.write(found.output())  # pytest shows it if the test failed
        found.close()


def test_a_host_is_cut_off_and_the_others_finish_the_run(
    cluster: MultiHostRun, alone: Alone
) -> None:
    run = cluster.coordinate("--workers", "1:3")
    near, far = cluster.join(1), cluster.join(2)
    until(lambda: " of 3 in generation" in cluster.output())
    cluster.hosts.cut(2)
    until(lambda: "is lost: silent" in cluster.output())
    cluster.hosts.restore(2)
    assert far.wait() == EVICTED  # on reconnecting
    cluster.go()
    assert run.wait() == 0
    assert near.wait() == 0
    ends = [torch.load(path, weights_only=True) for path in cluster.out.glob("*.pt")]
    assert len(ends) == 2
    assert all(same(end, alone(*epoch_args(end["step"]))) for end in ends)


def test_the_coordinators_host_is_cut_off_past_the_lease(
    cluster: MultiHostRun, alone: Alone
) -> None:
    """The worker on its host trains on; the others stop, and no step is trained twice."""
    run = cluster.coordinate("--workers", "1:3", "--lease", "3")
    others = [cluster.join(1), cluster.join(2)]
    until(lambda: " of 3 in generation" in cluster.output())
    cluster.hosts.cut(0)
    assert [other.wait() for other in others] == [EVICTED, EVICTED]
    cluster.hosts.restore(0)
    cluster.go()
    assert run.wait() == 0
    (end,) = [torch.load(path, weights_only=True) for path in cluster.out.glob("*.pt")]
    assert same(end, alone(*epoch_args(end["step"])))


def test_a_coordinator_without_workers_of_its_own_is_cut_off_past_the_lease(
    cluster: MultiHostRun, alone: Alone
) -> None:
    """The workers train on until their lease expires; new ones resume from their checkpoint."""
    run = cluster.coordinate("--workers", "0", "--lease", "3")
    others = [cluster.join(1), cluster.join(2)]
    until(lambda: " of 2 in generation" in cluster.output())
    cluster.hosts.cut(0)
    assert [other.wait() for other in others] == [EVICTED, EVICTED]
    until(lambda: "paused" in cluster.output())
    assert not list(cluster.out.glob("*.pt"))
    cluster.hosts.restore(0)
    before = cluster.output().count(" of 2 in generation")
    others = [cluster.join(1), cluster.join(2)]
    until(lambda: cluster.output().count(" of 2 in generation") == before + 2)
    cluster.go()
    assert [other.wait() for other in others] == [0, 0]
    assert run.wait() == 0
    assert "resuming from" in cluster.output()
    ends = [torch.load(path, weights_only=True) for path in cluster.out.glob("*.pt")]
    assert ends
    assert all(same(end, alone(*epoch_args(end["step"]))) for end in ends)


def test_a_worker_that_sees_the_run_folder_writes_the_checkpoints(cluster: MultiHostRun) -> None:
    """The leader is on a host that cannot see it."""
    run = cluster.coordinate("--workers", "0")
    far = cluster.join(1, disk=False)
    until(lambda: "rank 0 of 1 in generation" in cluster.output())
    near = cluster.join(2)
    until(lambda: "rank 1 of 2 in generation" in cluster.output())
    run.send_signal(signal.SIGINT)
    assert [process.wait() for process in (run, far, near)] == [0, EVICTED, EVICTED]
    (kept,) = cluster.run.glob("checkpoints/*.pt")
    assert int(kept.stem.removeprefix("step-")) > 0


def test_of_two_workers_with_a_one_way_partition_one_goes(
    cluster: MultiHostRun, alone: Alone
) -> None:
    """Both reach the coordinator, and neither is silent."""
    run = cluster.coordinate("--workers", "0")
    near, far = cluster.join(1), cluster.join(2)
    until(lambda: " of 2 in generation" in cluster.output())
    cluster.hosts.cut_one_way(1, 2)
    until(lambda: near.poll() is not None or far.poll() is not None)
    cluster.go()
    assert run.wait() == 0
    assert sorted((near.wait(), far.wait())) == [0, EVICTED]
    assert "cannot connect to each other: check addresses and firewalls" in cluster.output()
    (end,) = [torch.load(path, weights_only=True) for path in cluster.out.glob("*.pt")]
    assert same(end, alone(*epoch_args(end["step"])))


def test_a_newcomer_that_reaches_only_the_coordinator_is_left_out(cluster: MultiHostRun) -> None:
    """The others never wait for it."""
    run = cluster.coordinate("--workers", "0")
    near = cluster.join(1)
    until(lambda: "rank 0 of 1 in generation" in cluster.output())
    cluster.hosts.cut_one_way(2, 1)
    assert cluster.join(2).wait() == EVICTED
    cluster.go()
    assert [run.wait(), near.wait()] == [0, 0]
    assert "w1 is left out: it and w0 cannot connect to each other" in cluster.output()
    assert "generation 2" not in cluster.output()
