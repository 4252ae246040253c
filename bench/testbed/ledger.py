"""Which samples every committed step was trained on, written down by the workers themselves.

Each worker appends its own part of a batch before the backward pass, and a mark once the step is
committed. A step may be trained several times, as when everybody was killed and an older checkpoint
was loaded: what counts is the attempt in the newest generation that committed it.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

import evenstep


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of a batch; or, without samples, that the step is committed."""

    step: int
    generation: int
    at_s: float
    samples: list[float] | None = None


class Ledger:
    """The file that all workers of a run append to; none without LEDGER in the environment."""

    def __init__(self, session: evenstep.Session) -> None:
        path = os.environ.get("LEDGER")
        self._session, self._begun = session, (0, 0)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if path else -1

    def begin(self, samples: Iterable[float]) -> None:
        """Before the backward pass of a step: the part of the batch of this worker."""
        session = self._session
        self._begun = session.step, session.generation
        self._append(Line(*self._begun, time.monotonic(), list(samples)))

    def commit(self) -> None:
        """Right after the optimizer's step, if that was not void."""
        self._append(Line(*self._begun, time.monotonic()))

    def _append(self, line: Line) -> None:
        if self._fd >= 0:
            os.write(self._fd, msgspec.json.encode(line) + b"\n")  # atomic: O_APPEND


class Reading(NamedTuple):
    """A ledger, read."""

    trained: Mapping[int, Counter[float]]  # the samples of each step
    commits_s: list[float]  # when steps were committed


def read_ledger(path: Path, num_steps: int) -> Reading:
    """The samples of each of the first steps, in the newest generation that committed it."""
    decode = msgspec.json.Decoder(Line).decode
    lines = [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    newest: dict[int, int] = {}
    for line in lines:
        if line.samples is None:
            newest[line.step] = max(line.generation, newest.get(line.step, 0))
    trained: dict[int, Counter[float]] = defaultdict(Counter)
    for line in lines:
        if line.samples and line.step < num_steps and newest.get(line.step) == line.generation:
            trained[line.step].update(line.samples)
    return Reading(trained, sorted(line.at_s for line in lines if line.samples is None))


def lost_and_repeated(run: Reading, alone: Reading) -> tuple[int, int]:
    """Samples that a run has trained less often, and more often, than one process has."""
    steps = run.trained.keys() | alone.trained.keys()
    pairs = [(run.trained.get(s, Counter()), alone.trained.get(s, Counter())) for s in steps]
    return (
        sum((expected - got).total() for got, expected in pairs),
        sum((got - expected).total() for got, expected in pairs),
    )
