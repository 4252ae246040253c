"""How many files one step walks through, and one loss of a worker: a map for readers of the code.

    torchrun --standalone --nproc-per-node 3 bench/walk.py
    evenstep run --workers 3 bench/walk.py

Rank 0 counts its calls from one file of evenstep to another between two batches; under
`evenstep run` also from the moment at which it notices that rank 2 was killed, until it gets the
same samples again. What a loss adds to a step is counted by itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep.train.roster.elastic import ElasticRoster

ROOT = str(Path(evenstep.__file__).parent)
LOGS = f"{ROOT}/launch/logs.py"
STEPS, LOSS = range(30, 40), 40  # past the steps that are watched closely


class Walk:
    """Calls between files of evenstep in this thread, while it is on."""

    def __init__(self, since: CodeType | None = None) -> None:
        self.calls: dict[tuple[CodeType, CodeType], None] = {}  # by whom, of whom
        self._since = since  # the call at which to begin
        self._properties = _properties()
        self.files: dict[str, None] = {}  # in the order in which they take part

    def __enter__(self) -> Walk:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        to = frame.f_code.co_filename
        if frame.f_code is self._since:
            self._since = None
        if event != "call" or not to.startswith(ROOT) or self._since is not None:
            return
        by = frame.f_back
        is_logging = to == LOGS or (by is not None and by.f_code.co_filename == logging.__file__)
        if is_logging or frame.f_code in self._properties:
            return
        self.files[to] = None
        while by is not None and not by.f_code.co_filename.startswith(ROOT):
            by = by.f_back  # through torch, as from a backward pass to a hook
        if by is not None and by.f_code.co_filename != to:
            self.calls[by.f_code, frame.f_code] = None

    def show(self, title: str) -> None:
        """Print all calls, and the files, as paths inside of evenstep."""
        print(f"{title}: {len(self.calls)} calls between {len(self.files)} files")
        for by, to in self.calls:
            print(f"  {_name(by)} -> {_name(to)}")
        print("  " + ", ".join(path.removeprefix(ROOT + "/") for path in self.files))

    def show_beyond(self, other: Walk) -> None:
        """Print how many calls and files are not in another walk."""
        calls, files = (
            self.calls.keys() - other.calls.keys(),
            self.files.keys() - other.files.keys(),
        )
        print(f"  not in a step: {len(calls)} calls, {len(files)} files")


def _properties() -> set[CodeType]:
    """Getters: to read an attribute sends no reader to another file."""
    modules = [m for name, m in sys.modules.items() if name.startswith("evenstep")]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    members = [member for kind in kinds for member in vars(kind).values()]
    getters = [member.fget for member in members if isinstance(member, property)]
    return {getter.__code__ for getter in getters if isinstance(getter, FunctionType)}


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(ROOT + '/')}:{code.co_qualname}"


def main() -> None:
    """Train for a while, and count."""
    elastic = "EVENSTEP_COORDINATOR" in os.environ
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(960, 4))
    with evenstep.join() as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(data, batch=12)
        walks, loss = [Walk() for _ in STEPS], Walk(since=ElasticRoster.lost.__code__)
        for num, (x,) in enumerate(loader):  # asks the session for nothing that a step does not
            sys.setprofile(None)
            if session.is_leader and num in STEPS:
                walks[num - STEPS[0]].__enter__()
            elif session.is_leader and elastic and num == LOSS:
                loss.__enter__()
            elif elastic and session.rank == 2 and num == LOSS:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if num > LOSS + 5:
                break
        walk = min(
            walks, key=lambda walk: len(walk.calls)
        )  # none that a plan or a report came with
        if session.is_leader:
            walk.show("one step")
        if session.is_leader and elastic:
            loss.show("one loss")
            loss.show_beyond(walk)


if __name__ == "__main__":
    main()
