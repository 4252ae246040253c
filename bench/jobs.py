"""Training jobs whose roster can change, one class per system that is compared."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from evenstep.cli.operators import ask_coordinator
from evenstep.coordinate.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PATH = os.pathsep.join([str(ROOT), str(ROOT / "src")])  # this tree, installed or not
ENVIRONMENT = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
BOUND_S = 90.0


class StuckError(Exception):
    """The job did not train as expected within BOUND_S."""


class Commit(NamedTuple):
    """A step that a process has committed."""

    at_s: float
    step: int
    world: int
    pid: int


class Job(ABC):
    """Processes that train one model. All end with the context."""

    script: str
    python = sys.executable

    def __init__(self, folder: Path, args: Sequence[str], num_workers: int) -> None:
        self.folder, self.world = folder, num_workers
        self._args = [*args, "--out", str(folder)]
        self._log = (folder / "log").open("a")
        self._stack = ExitStack()
        self._read: dict[Path, tuple[int, list[Commit]]] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._log.close()

    @abstractmethod
    def start(self) -> None:
        """Start the first workers."""

    @abstractmethod
    def join(self) -> None:
        """Add one worker."""

    @abstractmethod
    def leave(self) -> None:
        """Let one worker leave."""

    @abstractmethod
    def lose(self, rank: int) -> None:
        """Kill one worker with SIGKILL."""

    def after_loss(self, before: Sequence[Commit], commit: Commit) -> bool:
        """Whether a commit was made after the job had recovered from a loss."""
        return commit.world == self.world

    def commits(self) -> list[Commit]:
        """All commits so far, by time."""
        for path in self.folder.glob("*.steps"):
            offset, commits = self._read.setdefault(path, (0, []))
            with path.open() as file:
                file.seek(offset)
                whole = file.read().rpartition("\n")[0]
            for line in whole.splitlines():
                at_s, step, world = line.split()
                commits.append(Commit(float(at_s), int(step), int(world), int(path.stem)))
            self._read[path] = (offset + len(whole) + (1 if whole else 0), commits)
        return sorted(commit for _, commits in self._read.values() for commit in commits)

    def computed_s(self, since_s: float) -> float:
        """When the last worker finished computing a void step, at least `since_s`."""
        voids = [path.read_text().split() for path in self.folder.glob("*.voids")]
        return max([since_s, *(float(at_s) for times in voids for at_s in times)])

    def _spawn(self, command: Sequence[str | Path], **more: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **ENVIRONMENT, **more}
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._stack.callback(end_process, process)
        return process

    @property
    def _script(self) -> str:
        return str(ROOT / "bench" / "rivals" / self.script)


class Evenstep(Job):
    """`evenstep run`, `scale` and `drain`, with local workers."""

    script = "with_evenstep.py"
    options: Sequence[str] = ("--checkpoint-every", "3600")  # a roster change needs none
    max_workers = 0

    def start(self) -> None:
        workers = f"{self.world}:{self.max_workers or self.world + 1}"
        options = ["--workers", workers, "--min", "1", "--restarts", "0", *self.options]
        where = ["--run", str(self.folder / "run")]
        self._stack.callback(self._end_workers)
        self._spawn([BIN / "evenstep", "run", *options, *where, self._script, *self._args])

    def join(self) -> None:
        self.scale(self.world + 1)

    def scale(self, num_workers: int) -> None:
        """Change the number of workers."""
        self._ask("scale", num_workers=num_workers)
        self.world = num_workers

    @property
    def journal(self) -> Path:
        """The run's journal."""
        return self.folder / "run" / "journal.jsonl"

    def leave(self) -> None:
        self._ask("drain", worker=self._roster()[-1]["worker"])
        self.world -= 1

    def lose(self, rank: int) -> None:
        self.world -= 1
        os.kill(self._roster()[rank]["pid"], signal.SIGKILL)

    def _end_workers(self) -> None:
        """Workers outlive a killed coordinator; kill them."""
        for worker in RunFolder.open(self.folder / "run").outlived().values():
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    def _roster(self) -> list[dict[str, Any]]:
        ranked = [w for w in self._ask("status")["workers"] if w["rank"] is not None]
        return sorted(ranked, key=lambda w: int(w["rank"]))

    def _ask(self, what: str, **more: Any) -> dict[str, Any]:
        return ask_run(self.folder / "run", what, **more)


class Restart(Job):
    """Checkpoint, stop all, restart all, by an operator who reacts at once."""

    script = "with_ddp.py"

    def start(self) -> None:
        port = str(free_port())
        self._workers = [
            self._spawn(
                [self.python, self._script, *self._args, "--graceful"],
                RANK=str(rank),
                WORLD_SIZE=str(self.world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            for rank in range(self.world)
        ]

    def join(self) -> None:
        self.scale(self.world + 1)

    def leave(self) -> None:
        self.scale(self.world - 1)

    def scale(self, num_workers: int) -> None:
        """Restart with this many workers."""
        self._restart(signal.SIGTERM, num_workers)

    def lose(self, rank: int) -> None:
        self._workers[rank].kill()
        self._workers[rank].wait()
        self._restart(signal.SIGKILL, self.world - 1)

    def _restart(self, how: signal.Signals, num_workers: int) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(how)
        for worker in self._workers:
            worker.wait(BOUND_S)
        self.world = num_workers
        self.start()


class Torchrun(Job):
    """torchrun's elastic restart: one agent for all workers, or one agent per worker."""

    script = "with_ddp.py"
    agents = False

    def start(self) -> None:
        if not self.agents:
            self._agents = [self._agent("--standalone", "--nproc-per-node", str(self.world))]
            return
        self._endpoint = f"127.0.0.1:{free_port()}"
        self._max_workers = self.world + 1
        self._agents = [self._single_agent()]
        await_port(self._endpoint)  # the first agent hosts the rendezvous and must stay
        self._agents += [self._single_agent() for _ in range(self.world - 1)]

    def join(self) -> None:
        self.world += 1
        self._agents.append(self._single_agent())

    def leave(self) -> None:
        self.world -= 1
        self._agents.pop().terminate()

    def lose(self, rank: int) -> None:
        pids = {c.pid for c in self.commits()[-self.world :]}
        os.kill(sorted(pids)[rank], signal.SIGKILL)

    def after_loss(self, before: Sequence[Commit], commit: Commit) -> bool:
        return commit.pid not in {c.pid for c in before}

    def _single_agent(self) -> subprocess.Popen[bytes]:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint, "--rdzv-id", "bench"]
        conf = ["--rdzv-conf", "last_call_timeout=2"]
        return self._agent(
            "--nnodes", f"1:{self._max_workers}", "--nproc-per-node", "1", *where, *conf
        )

    def _agent(self, *options: str) -> subprocess.Popen[bytes]:
        command = [str(BIN / "torchrun"), "--max-restarts", "100", *options]
        command += [self._script, *self._args]
        return self._spawn(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class TorchrunAgents(Torchrun):
    """One agent per worker, so that workers can join and leave."""

    agents = True


class Torchft(Job):
    """torchft: a lighthouse, and one replica per worker."""

    script = "with_torchft.py"
    heartbeat_ms = 5000

    def start(self) -> None:
        self._port, self._num_started = free_port(), 0
        lighthouse = Path(self.python).parent / "torchft_lighthouse"
        bind = ["--bind", f"[::]:{self._port}", "--min_replicas", "1"]
        beat = ["--heartbeat_timeout_ms", str(self.heartbeat_ms), "--join_timeout_ms", "10000"]
        self._spawn([lighthouse, *bind, *beat, "--quorum_tick_ms", "50"])
        self._first = self.world
        self._workers = [self._start_replica() for _ in range(self.world)]

    def join(self) -> None:
        self.world += 1
        self._workers.append(self._start_replica())

    def leave(self) -> None:
        self.world -= 1
        self._workers.pop().terminate()

    def lose(self, rank: int) -> None:
        self.world -= 1
        self._workers.pop(rank).kill()

    def _start_replica(self) -> subprocess.Popen[bytes]:
        self._num_started += 1
        return self._spawn(
            [self.python, self._script, *self._args],
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self._port}",
            REPLICA=str(self._num_started),
            REPLICAS=str(self._first),
            RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )


class TorchftTuned(Torchft):
    """With a heartbeat timeout of one second."""

    heartbeat_ms = 1000


def torchft_python(folder: Path, version: str) -> str:
    """The interpreter of a venv with torchft and this environment's torch; made if missing."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        own_site = next(path for path in sys.path if re.search(r"site-packages$", path))
        (site / "torch_of_the_bench.pth").write_text(own_site)
        package = f"torchft-nightly=={version}"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", package], check=True)
        (folder / "ready").touch()
    return str(python)


def ask_run(folder: Path, what: str, **more: Any) -> dict[str, Any]:
    """The answer of the coordinator of the run in a folder."""
    return ask_coordinator(str(folder), None, what, **more)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_port(endpoint: str) -> None:
    """Wait until a server listens on an endpoint."""
    host, _, port = endpoint.rpartition(":")
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.05)
    raise StuckError(f"no server at {endpoint}")


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(45.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
