"""Several nodes under torchrun: two emulated hosts on one machine, each with its own network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.testbed.hosts import SPACES, Host, Hosts, make_hosts

from tests.emulate.conftest import ends

SCRIPT = Path(__file__).parent / "node_script.py"
ROOT = Path(__file__).parents[2]


def command(hosts: Hosts, i: int, rendezvous: str, folder: Path) -> list[str]:
    """The command for a node, by rendezvous method."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    leader = hosts[0].address
    if rendezvous == "c10d":
        # All hosts have this machine's name, so torchrun needs their addresses.
        run += ["--rdzv-backend=c10d", f"--rdzv-endpoint={leader}:29500"]
        return [*run, f"--rdzv-conf=is_host={i == 0}", f"--local-addr={hosts[i].address}"]
    run += [f"--node-rank={i}", "--master-port=29500"]
    if rendezvous == "address":
        return [*run, f"--master-addr={leader}"]
    # As on Debian: a host's own name is a loopback address, which other hosts cannot reach.
    names = folder / f"hosts-{i}"
    names.write_text(f"127.0.0.1 localhost\n{'127.0.1.1' if i == 0 else leader} leader\n")
    mounted = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names)]
    return [*mounted, *run, "--master-addr=leader"]  # a host has its own mounts, too


def torchrun(hosts: Hosts, rendezvous: str, folder: Path, *args: str) -> list[tuple[int, str]]:
    """Train on all hosts. Returns the exit code and output of each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs, nodes = [folder / f"{i}.log" for i in range(len(hosts))], []
    for i, log in enumerate(logs):
        node = [*command(hosts, i, rendezvous, folder), str(SCRIPT), str(folder), *args]
        with log.open("wb") as out:
            nodes.append(hosts[i].popen(node, environment, stdout=out, stderr=out))
    codes = [node.wait(timeout=600) for node in nodes]
    return [(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("rendezvous", ["address", "name", "c10d"])
def test_two_nodes_train_to_the_same_parameters_as_one_process(
    rendezvous: str, tmp_path: Path
) -> None:
    with make_hosts(2) as hosts:
        done = torchrun(hosts, rendezvous, tmp_path, "--slow=3")
    assert [code for code, _ in done] == [0, 0], done[0][1] + done[1][1]
    ranks = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(4)]
    num_epochs = len(ranks[0]["epochs"])
    for epoch in range(num_epochs):
        assert sorted(i for r in ranks for i in r["epochs"][epoch]) == list(range(203))
    assert len({r["digest"] for r in ranks}) == 1
    assert all(r["plans"] == ranks[0]["plans"] for r in ranks)
    # The leader has heard from the other node, and it of the plan.
    assert ranks[0]["plans"][-1][3] < ranks[0]["plans"][0][3]
    networks = [r["network"] for r in ranks]
    assert networks[0] == networks[1] != networks[2] == networks[3]

    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, str(SCRIPT), str(alone), f"--epochs={num_epochs}"]
    subprocess.run(command, check=True, timeout=600)
    truth = json.loads((alone / "0.json").read_text())
    assert truth["network"] not in networks
    assert ranks[0]["parameters"] == pytest.approx(truth["parameters"], rel=0, abs=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "--fail=3 --fail-step=5",  # on another node than the store
        "--fail=0 --fail-step=5",  # on the store's node, which ends the store
        "--fail=0 --fail-step=0 --slow-s=1.2 --slow 2 3",  # gone before the slow ranks notice
    ],
)
def test_a_rank_that_raises_ends_both_nodes_with_its_traceback(fault: str, tmp_path: Path) -> None:
    with make_hosts(2) as hosts:
        done = torchrun(hosts, "address", tmp_path, *fault.split())
        assert [host.pids() for host in hosts] == [[], []]
    for code, output in done:
        assert code == 1
        assert "ZeroDivisionError: a bug in the user's loss" in output, output
        assert "WorkerLostError" not in output
    assert not list(tmp_path.glob("*.json"))


LISTEN = """
import socket, sys
with socket.create_server(("", 5000)):
    print("listening", flush=True)
    sys.stdin.read()
"""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=2)"


def reaches(host: Host, other: Host) -> bool:
    python = [sys.executable, "-I", "-S", "-c"]
    probe = host.popen([*python, REACH, other.address], stderr=subprocess.DEVNULL)
    return probe.wait(timeout=600) == 0


def test_a_host_can_be_disconnected_and_reconnected() -> None:
    with make_hosts(3) as hosts:
        for host in hosts:
            listening = host.popen(
                [sys.executable, "-I", "-S", "-c", LISTEN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert listening.stdout is not None
            assert listening.stdout.readline()
        assert reaches(hosts[0], hosts[1])
        hosts.cut(1)
        assert not reaches(hosts[0], hosts[1])
        assert not reaches(hosts[1], hosts[0])
        assert reaches(hosts[1], hosts[1])
        assert reaches(hosts[0], hosts[2])
        hosts.restore(1)
        assert reaches(hosts[0], hosts[1])
    assert not any((SPACES / host.space).exists() for host in hosts)


KILLED = """
import os, signal, subprocess
from bench.testbed.hosts import make_hosts
with make_hosts(1) as [host]:
    left = host.popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    print(host.space, left.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_run_are_removed_by_the_next() -> None:
    with make_hosts(1):  # or skip
        pass
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=600
    )
    space, pid = killed.stdout.decode().split()
    assert (SPACES / space).exists()
    with make_hosts(1):
        assert not (SPACES / space).exists()
        assert ends(int(pid), timeout_s=10.0)
