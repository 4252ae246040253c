"""A real Slurm on this machine: Debian's slurmctld, and several slurmd with unlike nodes.

A guardian process ends the daemons when this one is gone, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel", "srun")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
POLL_S = 0.05

# Kills the daemons' process groups once the pipe that it reads is closed, by whatever end of the
# process that holds its other side. Jobs are in sessions of their own: found by their variable.
GUARDIAN = """
import os, pathlib, signal, sys
os.setsid()
sys.stdin.read()
folder = sys.argv[1]
mark = f"SLURM_CONF={folder}/slurm.conf".encode()
for number in (signal.SIGTERM, signal.SIGKILL):
    for path in pathlib.Path(folder).glob("*.daemon"):
        try:
            os.killpg(int(path.read_text()), number)
        except (OSError, ValueError):
            pass
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\\0") and path.parent.name != str(os.getpid()):
                os.kill(int(path.parent.name), number)
        except OSError:
            pass
    import time; time.sleep(0.5)
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    lacking = [p for p in PROGRAMS if shutil.which(p, path=PATH) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (see .ci/packages)"
    return "" if os.getuid() == 0 else "slurmd needs root"


class Slurm:
    """A cluster with the nodes n1 (8 CPUs) and n2 (4 CPUs), in the partitions p and urgent.

    Jobs of urgent preempt those of p, with a grace of 20 s. CPUs are only counted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        for name in ("state", "spool", "munge"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = _free_ports(3)
        (self.folder / "slurm.conf").write_text(_configuration(self.folder, ports))
        (self.folder / "cgroup.conf").write_text("")
        munge = self.folder / "munge"
        self.start_daemon(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder / 'munge.socket'}",
            f"--key-file={key}",
            f"--pid-file={munge / 'pid'}",
            f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}",
            "--num-threads=2",
        )
        while not (self.folder / "munge.socket").exists():
            time.sleep(POLL_S)
        self.start_controller()
        for node in ("n1", "n2"):
            self.start_node(node)
        while (
            self.run("sinfo", "--noheader", "--Node", "--partition=p", "--format=%N %T").split()
            != _IDLE
        ):
            time.sleep(POLL_S)

    def start_controller(self) -> None:
        self.start_daemon("slurmctld", "slurmctld", "-D", "-f", self.variables["SLURM_CONF"])

    def start_node(self, node: str) -> None:
        self.start_daemon(node, "slurmd", "-D", "-N", node, "-f", self.variables["SLURM_CONF"])

    def start_daemon(self, name: str, *command: str) -> None:
        """Start a daemon in a process group of its own, known to the guardian."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )
        (self.folder / f"{name}.daemon").write_text(str(self._daemons[name].pid))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a daemon a signal; wait for its end if that kills it."""
        self._daemons[name].send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._daemons[name].wait()

    def run(self, *command: str) -> str:
        """The output of one of Slurm's commands; empty if it fails, as while the daemons start."""
        env = {**os.environ, **self.variables}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster; nothing of it is left afterwards."""
    folder.mkdir(mode=0o755)
    guardian = subprocess.Popen(
        [sys.executable, "-S", "-c", GUARDIAN, str(folder)], stdin=subprocess.PIPE
    )
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.run("scancel", "--me")
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait()
        for daemon in cluster._daemons.values():
            daemon.wait()


_IDLE = ["n1", "idle", "n2", "idle"]


def _free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _configuration(folder: Path, ports: list[int]) -> str:
    host = socket.gethostname()
    control, *nodes = ports
    at = f"NodeHostname={host} NodeAddr=127.0.0.1"
    return f"""\
ClusterName=evenstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder / "munge.socket"}
CredType=cred/munge
StateSaveLocation={folder / "state"}
SlurmctldPidFile={folder / "slurmctld.pid"}
SlurmctldLogFile={folder / "slurmctld.log"}
SlurmdSpoolDir={folder / "spool"}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=20
MessageTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName=n1 {at} Port={nodes[0]} CPUs=8 RealMemory=1000 Feature=wide
NodeName=n2 {at} Port={nodes[1]} CPUs=4 RealMemory=1000
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
