"""Runs a script on evenstep as it is; only dies or waits in it where it was told to.

    python worker.py --out FOLDER SCRIPT ARGS

FAULTS are those of `testbed/train.py`. At the steps of PAUSES it waits, once, before its forward
pass until FOLDER/past-STEP exists; or FOLDER/announced-STEP, and it has heard of the next
generation: a few small steps take less time than that. Results go to FOLDER/result-NAME.pt.

Of a host whose processes shard the model, the others run this program too. They wait for the first.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from bench.matrix.script import run_script
from bench.testbed.train import Faults, install_faults
from evenstep.adapters import fsdp
from evenstep.train.session import Session

RANK = os.environ.get("RANK")
NAME = os.environ.get("EVENSTEP_WORKER") or (f"rank{RANK}" if RANK else "alone")
POLL_S = 0.01


class Hooks:
    """Faults and pauses in a script that knows nothing of them."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._faults = Faults(out)
        self._pauses = set(json.loads(os.environ.get("PAUSES", "[]")))
        self._owner = Path("/proc", os.environ.get("HELD_BY", "self"))
        self.session: Any = None

    def install(self) -> None:
        prepare, backward = Session.prepare, cast(Any, torch.Tensor.backward)

        def prepare_with_hooks(session: Session, model: Any, *args: Any, **options: Any) -> Any:
            prepared = prepare(session, model, *args, **options)
            self.session = self._faults.session = session
            install_faults(self._faults, model)
            return prepared

        def backward_with_hooks(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            self._faults.at("backward")
            backward(tensor, *args, **options)
            self._faults.at("reduced")

        command = [sys.executable, *sys.argv]
        patch.object(fsdp, "_own_command", lambda: command).start()
        patch.object(Session, "prepare", prepare_with_hooks).start()
        patch.object(torch.Tensor, "backward", backward_with_hooks).start()
        register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: object) -> None:
        if self.session is None:
            return
        self._pause(self.session._step.number)
        self._faults.at("forward")

    def _pause(self, step: int) -> None:
        if step not in self._pauses or not self.session._job.host.is_first:
            return
        self._pauses.remove(step)
        (self._out / f"paused-{step}-{NAME}").touch()
        while self._owner.exists() and not self._is_over(step):
            time.sleep(POLL_S)

    def _is_over(self, step: int) -> bool:
        if (self._out / f"past-{step}").exists():
            return True
        heard = self.session._roster._tracker.num_pending > 0
        return heard and (self._out / f"announced-{step}").exists()

    def save(self) -> None:
        """Save the model, and modules that were registered by name."""
        assert self.session is not None, "the script never called session.prepare"
        job = self.session._job
        things = {"model": job.model.module, **job.stateful}
        states = {n: whole(t) for n, t in things.items() if isinstance(t, torch.nn.Module)}
        if job.host.is_first:
            torch.save(
                {**states, "generation": self.session.generation}, self._out / f"result-{NAME}.pt"
            )
        job.host.sum(torch.zeros(1))  # the first process takes the others along when it ends


def whole(module: torch.nn.Module) -> dict[str, Any]:
    """The state of a module, also if the processes of a host shard it."""
    state = module.state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def main() -> None:
    """Run the script; if it trains to the end, save the result."""
    assert sys.argv[1] == "--out"
    out, script, *args = sys.argv[2:]
    hooks = Hooks(Path(out))
    hooks.install()
    run_script(script, args)
    hooks.save()
    atexit._run_exitfuncs()  # which end a session of Fabric; the fork server ends without them


if __name__ == "__main__":
    main()
