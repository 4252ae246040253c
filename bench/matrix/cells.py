"""The columns of the matrix: ways to run a case, each with its error against plain torch."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.matrix.cases import Case
from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP, CliRun
from bench.testbed.fork_server import Forked, ForkServer, fork_server
from bench.testbed.live_run import Fault, until
from evenstep.launch.environment import torchrun_variables

HERE = Path(__file__).parent
WORKER, REFERENCE = HERE / "worker.py", HERE / "reference.py"
WARM_START = HERE.parent / "testbed" / "warm_start.py"
WORLD = 3
EVERY_TIMEOUT = ("--silence", "120", "--checkpoint-every", "3600")  # a busy machine is no fault


class Failed(RuntimeError):  # noqa: N818 - the outcome of a cell, not an error of this program
    """A way to run a case did not come to its end."""


class Ways:
    """All ways to run one case, in a folder of its own; chance comes from `rng`."""

    def __init__(self, case: Case, folder: Path, rng: np.random.Generator) -> None:
        self.case, self._folder, self._rng = case, folder, rng
        self.history: dict[str, str] = {}  # what was done to the run, by column
        folder.mkdir(parents=True, exist_ok=True)

    def measure(self, column: str) -> float:
        """The relative error in a column. `Failed` if it is above the case's limit."""
        error, limit = COLUMNS[column](self), self.case.limit
        if not error <= limit:  # also if it is not a number
            what, did = f"{self.case.name}, {column}", self.history.get(column, "no faults")
            raise Failed(f"{what}: relative error {error:.1e} > {limit:g}; {did}")
        return error

    def alone(self) -> float:
        """One process that no launcher has started."""
        out = self._out("alone")
        self._finish([self._fork(WORKER, self._argv(out), out, {})], out)
        return self._error(out, 1)

    def torchrun(self) -> float:
        """Three ranks of a fixed roster with shares as 5, 2 and 1."""
        out, shared = self._out("torchrun"), torchrun_variables(WORLD)
        rest = self.case.batch // 8
        shares = [self.case.batch - 3 * rest, 2 * rest, rest]
        shared["EVENSTEP_SET"] = f"policy={{name: fixed, shares: {shares}}}"
        ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORLD)]
        self._finish([self._fork(WORKER, self._argv(out), out, rank) for rank in ranks], out)
        return self._error(out, WORLD)

    def elastic(self) -> float:
        """Two workers; a third joins at a random step, and at a later one the leader leaves."""
        return self.changes(*self._steps(2))

    def changes(self, joins: int, leaves: int | None = None) -> float:
        """Two workers; a third joins with this step in hand, and the leader leaves with that."""
        pauses = [joins, *([] if leaves is None else [leaves])]
        self.history["elastic"] = f"a worker joins at step {joins}, w0 leaves at step {leaves}"
        with self._run("elastic", "2:4", pauses=pauses) as run:
            self._paused(run, joins, 2)
            run.ask("scale", num_workers=3)
            run.until(lambda s: _state(s, "w2") in ("ready", "training"))
            self._go_on(run, joins, announced=True)
            if leaves is not None:
                self._paused(run, leaves, 3)
                run.signal("w0", signal.SIGTERM)
                run.until(lambda s: _state(s, "w0") != "training")
                self._go_on(run, leaves, announced=True)
            self._end(run)
        return self._error(run.out, 3 if leaves is None else 2)

    def kill(self) -> float:
        """Four workers, of which two are killed."""
        faults = [self._fault(step) for step in self._steps(2)]
        self.history["kill -9"] = ", ".join(
            f"{who} at {where} of step {n}" for who, where, n in faults
        )
        with self._run("kill", "4", faults=faults) as run:
            self._end(run)
        fired = len(list(run.out.glob("fault-*")))
        if fired != len(faults):
            raise Failed(f"{fired} of {len(faults)} kills took place: {self.history['kill -9']}")
        return self._error(run.out, 2)

    def resume(self) -> float:
        """Three workers; the run is stopped, and resumed with two."""
        (step,) = self._steps(1)
        self.history["resume"] = f"stopped at step {step}"
        with self._run("resume", "3", pauses=(step,)) as run:
            self._paused(run, step, 3)
            run.ask("stop")
            self._go_on(run, step)
            self._end(run)
            if list(run.out.glob("result-*")):
                raise Failed("the run trained to its end instead of stopping")
            run.start("2")
            self._end(run)
        return self._error(run.out, 2)

    def verify(self) -> float:
        """`evenstep verify`: the largest error of a gradient, as it says."""
        out = self._out("verify")
        code = self._fork(EVENSTEP, ["verify", str(WORKER), *self._argv(out)], out, {}).wait()
        told = (out / "log").read_text()
        errors = re.search(r"relative errors? ([^;]*?) in step", told)
        if code or errors is None:
            raise Failed(f"verify ended with {code}:\n{told}")
        return max(float(error) for error in errors[1].split(", "))

    def journal(self, column: str) -> Path:
        """What took place in a run of `evenstep run`."""
        return self._folder / column / "run" / "journal.jsonl"

    @cached_property
    def reference(self) -> dict[str, torch.Tensor]:
        """What plain torch trains in one process."""
        out = self._out("reference")
        argv = [str(self.case.plain), *self.case.args, str(out / "saved.pt")]
        self._finish([self._fork(REFERENCE, argv, out, {})], out)
        return _tensors(out / "saved.pt")

    def _out(self, column: str) -> Path:
        out = self._folder / column
        out.mkdir()
        return out

    def _argv(self, out: Path) -> list[str]:
        script = [self.case.script, *self.case.args, out / "saved.pt"]
        return [str(part) for part in ("--out", out, *script)]

    @property
    def _server(self) -> ForkServer:
        return fork_server(*self.case.preload)

    def _fork(
        self, program: Path, argv: Sequence[str], out: Path, env: Mapping[str, str]
    ) -> Forked:
        env = {**env, "DTYPE": self.case.dtype}
        return self._server.run([program, *argv], env, out / "log")

    def _finish(self, processes: Sequence[Forked], out: Path) -> None:
        codes = [process.wait() for process in processes]
        if any(codes):
            raise Failed(f"exit codes {codes}:\n{(out / 'log').read_text()}")

    def _run(
        self, column: str, workers: str, *, faults: Sequence[Fault] = (), pauses: Sequence[int] = ()
    ) -> CliRun:
        folder = self._folder / column
        folder.mkdir()
        env = {
            **ENVIRONMENT,
            "DTYPE": self.case.dtype,
            "PAUSES": json.dumps(pauses),
            "FORK_SERVER": self._server.path,
            "WARM_SCRIPT": str(WORKER),
        }
        return CliRun(
            folder,
            workers=workers,
            options=["--restarts", "0", *EVERY_TIMEOUT],
            args=self._argv(folder / "out")[2:],
            faults=faults,
            script=WARM_START,
            env=env,
        )

    def _paused(self, run: CliRun, step: int, num_workers: int) -> None:
        """Wait until so many workers have come to a pause."""
        until(
            lambda: (
                len(list(run.out.glob(f"paused-{step}-*"))) >= num_workers
                or run.returncode is not None
            )
        )

    def _go_on(self, run: CliRun, step: int, *, announced: bool = False) -> None:
        """End a pause; if a new roster is announced, once the workers have heard of it."""
        (run.out / f"{'announced' if announced else 'past'}-{step}").touch()

    def _end(self, run: CliRun) -> None:
        if code := run.wait():
            raise Failed(f"evenstep run ended with {code}:\n{run.output()}")

    def _steps(self, num: int) -> list[int]:
        """Random steps, some apart from each other, not the first nor among the last."""
        spaced = np.arange(2, self.case.num_steps - 5, 6)
        chosen = self._rng.choice(spaced, num, replace=False)
        return sorted(int(step + self._rng.integers(3)) for step in chosen)

    def _fault(self, step: int) -> Fault:
        who = str(self._rng.choice(["leader", "rank1"]))
        return who, str(self._rng.choice(self.case.points)), step

    def _error(self, out: Path, num_results: int) -> float:
        """The worst error of any worker, and of the file that the script itself saved."""
        results = sorted(out.glob("result-*.pt"))
        if len(results) < num_results:
            raise Failed(f"{len(results)} of {num_results} workers trained to the end, in {out}")
        files = [*results, out / "saved.pt"]
        return float(np.max([relative_error(_tensors(file), self.reference) for file in files]))


COLUMNS: dict[str, Callable[[Ways], float]] = {
    "alone": Ways.alone,
    "torchrun": Ways.torchrun,
    "elastic": Ways.elastic,
    "kill -9": Ways.kill,
    "resume": Ways.resume,
    "verify": Ways.verify,
}


def relative_error(result: Mapping[str, Any], reference: Mapping[str, torch.Tensor]) -> float:
    """The largest difference in a tensor, relative to that tensor's largest value."""
    errors = [
        float((result[name].double() - tensor.double()).abs().max())
        / max(float(tensor.double().abs().max()), 1e-30)
        for name, tensor in reference.items()
    ]
    return float(np.max(errors))  # unlike max(), not blind to NaN


def _state(status: Mapping[str, Any], worker: str) -> str:
    """Of a worker in a run; empty if it is not known there."""
    return next((str(w["state"]) for w in status["workers"] if w["worker"] == worker), "")


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a saved file, by path."""
    saved = torch.load(file, weights_only=True)
    return {
        f"{thing}.{name}": tensor
        for thing, state in saved.items()
        if isinstance(state, dict)
        for name, tensor in state.items()
    }
