"""Workers as actors of Ray Core: one detached, named actor a worker, in a namespace of the run's.

Ray Train restarts all workers whenever one changes; actors come and go by themselves. One that no
node has room for is pending, which is what Ray's autoscaler brings nodes for. The namespace is the
only memory: a later coordinator finds the actors of an earlier one by it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.errors import ConfigError
from evenstep.launch.engines.ray_worker import RayWorker
from evenstep.ports import EngineJob, LaunchRefusedError, Observed, Stage, WorkerKind
from evenstep.types import WorkerId

ANSWER_S = 5.0  # for actors to answer: all together
PENDING_S = 2.0  # one that has not begun to answer a request to stop by then is pending
PENDING = Observed(stage=Stage.PENDING, why="Ray has no node with room for it yet")


@dataclass(slots=True)
class _Actor:
    """A worker's actor, and the question that it has not answered yet."""

    handle: Any
    asked: Any = None
    node: str = ""  # once it has answered
    shown: Observed = PENDING


class RayLauncher:
    """The workers of one run on a Ray cluster."""

    def __init__(self, job: EngineJob) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError("--on ray", 'needs: pip install "evenstep[ray]"') from None
        if unknown := job.options.keys() - {"address"}:
            problem = f"--{min(unknown)} is not for ray; give resources and labels in --kind"
            raise ConfigError("--on ray", problem)
        for kind in job.kinds.values():
            actor_options(kind)
        self._ray: Any = ray
        self._job = job
        self._namespace = f"evenstep-{job.run}"
        self._actors: dict[WorkerId, _Actor] = {}
        self._ended: dict[WorkerId, Observed] = {}
        self._lock = threading.Lock()
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            address = job.options.get("address", "auto")
            try:
                ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
            except Exception as e:
                told = " ".join(str(e).split())
                raise ConfigError(
                    "--address", f"no Ray cluster at {address}: {told}. Start one by `ray start`"
                ) from None

    def start(self, kind: str, workers: Sequence[WorkerId]) -> None:
        """One actor each. Ray accepts what it has no room for, and keeps it pending."""
        made = self._ray.remote(RayWorker)
        for worker in workers:
            try:
                handle = made.options(
                    name=worker,
                    namespace=self._namespace,
                    lifetime="detached",
                    max_restarts=0,  # the run asks for another worker instead
                    max_concurrency=4,  # it answers while it is asked to stop
                    **actor_options(self._job.kinds[kind]),
                ).remote(
                    self._job.command,
                    self._environment(worker, self._job.kinds[kind]),
                    os.getcwd(),
                    str(self._job.folder / "logs" / f"{worker}.log"),
                )
            except ValueError as e:
                if not self._exists(worker):  # else an attempt whose answer was lost
                    raise LaunchRefusedError(" ".join(str(e).split())) from None
                continue
            with self._lock:
                self._actors[worker] = _Actor(handle)

    def stop(self, workers: Sequence[WorkerId]) -> None:
        """SIGTERM to those that run; those that are pending are withdrawn."""
        with self._lock:
            actors = [self._actors[worker] for worker in workers if worker in self._actors]
        asked = {actor.handle.stop.remote(): actor for actor in actors}
        if asked:
            _, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=PENDING_S)
            for ref in silent:
                if asked[ref].shown.stage is not Stage.RUNNING:
                    self._ray.kill(asked[ref].handle)

    def observe(self) -> Mapping[WorkerId, Observed]:
        """Ask all actors for their status. One that does not answer is as it was."""
        self._find()
        with self._lock:
            actors = dict(self._actors)
        for actor in actors.values():
            if actor.asked is None:
                actor.asked = actor.handle.status.remote()
        asked = {actor.asked: worker for worker, actor in actors.items()}
        ready: list[Any] = []
        if asked:
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        drained = self._draining()
        for ref in ready:
            worker = asked[ref]
            self._judge(worker, actors[worker])
        for actor in actors.values():
            if actor.shown.stage is Stage.RUNNING:
                leaves = drained.get(actor.node, "")
                actor.shown = Observed(stage=Stage.RUNNING, leaves=leaves)
        with self._lock:
            return {**self._ended, **{w: a.shown for w, a in self._actors.items()}}

    def close(self) -> None:
        """Disconnect, unless somebody else had connected before."""
        if self._owns_connection:
            self._ray.shutdown()

    def _judge(self, worker: WorkerId, actor: _Actor) -> None:
        """Take note of an actor's answer."""
        errors = self._ray.exceptions
        ref, actor.asked = actor.asked, None
        try:
            actor.node, code = self._ray.get(ref)
        except errors.ActorUnavailableError:  # its node may come back
            return
        except errors.RayActorError as e:
            self._end(worker, Observed(stage=Stage.ENDED, why=f"Ray: {_first_line(e)}"))
            return
        if code is None:
            actor.shown = Observed(stage=Stage.RUNNING)
            return
        self._end(worker, Observed(stage=Stage.ENDED, exit_code=code))
        self._ray.kill(actor.handle)  # it holds resources

    def _end(self, worker: WorkerId, shown: Observed) -> None:
        with self._lock:
            self._actors.pop(worker, None)
            self._ended[worker] = shown

    def _find(self) -> None:
        """Actors of an earlier coordinator."""
        for found in self._ray.util.list_named_actors(all_namespaces=True):
            worker = found["name"]
            if found["namespace"] != self._namespace:
                continue
            with self._lock:
                known = worker in self._actors or worker in self._ended
            if not known and (handle := self._handle(worker)) is not None:
                with self._lock:
                    self._actors.setdefault(worker, _Actor(handle))

    def _handle(self, worker: WorkerId) -> Any:
        try:
            return self._ray.get_actor(worker, namespace=self._namespace)
        except ValueError:  # it has just ended
            return None

    def _exists(self, worker: WorkerId) -> bool:
        return self._handle(worker) is not None

    def _draining(self) -> dict[str, str]:
        """Nodes that are about to go, and why."""
        # Ray has no public call for it; its own Train asks the same way.
        state = getattr(getattr(self._ray, "_private", None), "state", None)
        ask = getattr(getattr(state, "state", None), "get_draining_nodes", None)
        return dict.fromkeys(ask(), "Ray drains its node") if ask is not None else {}

    def _environment(self, worker: WorkerId, kind: WorkerKind) -> dict[str, str]:
        """For the script. Where the run's folder is not shared, it has the token itself."""
        token = {"EVENSTEP_TOKEN": self._job.token}
        return {**self._job.env, **token, **kind.variables(), "EVENSTEP_WORKER": worker}


def actor_options(kind: WorkerKind) -> dict[str, Any]:
    """Resources and labels of a kind: `resource.NAME=N` and `label.KEY=VALUE` are its options."""
    options: dict[str, Any] = {"num_cpus": kind.cpus or 1, "num_gpus": kind.gpus}
    if kind.gpu_type:
        options["accelerator_type"] = kind.gpu_type
    if kind.memory_bytes:
        options["memory"] = kind.memory_bytes
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    for key, value in kind.options.items():
        what, _, name = key.partition(".")
        if what == "resource" and name:
            try:
                resources[name] = float(value)
            except ValueError:
                problem = f'{key}: expected a number, got "{value}"'
                raise ConfigError("--kind", problem) from None
        elif what == "label" and name:
            labels[name] = value
        else:
            problem = f'"{key}" is neither resource.NAME nor label.KEY, which is what Ray knows'
            raise ConfigError("--kind", problem)
    if resources:
        options["resources"] = resources
    if labels:
        options["label_selector"] = labels
    return options


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
