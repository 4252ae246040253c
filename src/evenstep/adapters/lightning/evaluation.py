"""Validation split over workers: each computes some of the batches, and all log every result.

Batches are those of one process, and so is what is logged. The batches of a lost worker are
recomputed by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader
from torchmetrics import Metric

from evenstep.adapters.gathering import ordered_batches
from evenstep.adapters.lightning.collectives import add_up, gather
from evenstep.adapters.lightning.logged import Logged, check_value, play
from evenstep.train.data.source import is_stream
from evenstep.train.session import Session

Call = dict[str, Any]


class SharedBatches:
    """The validation DataLoader that Lightning sees: this worker's batches only."""

    def __init__(
        self, plain: Any, loop: EvaluationLoop, session: Callable[[], Session | None]
    ) -> None:
        self._plain, self._loop, self._session = plain, loop, session
        self._batches: list[list[int]] = []  # of the whole dataset
        self._computed: dict[int, list[Call]] = {}  # what this worker logged, by batch
        self._has_part = True  # else it computes a batch that another one counts

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[Any]:
        session = self._session()
        # Before training each worker is on its own.
        if session is None or session.world == 1 or not self._can_be_split:
            self._loop.calls = None
            return iter(self._plain)
        batches = ordered_batches(
            self._plain, "val_dataloader", "give shuffle=False, and no sampler"
        )
        self._batches = list(batches)[: self._limit]
        return self._own_batches(session)

    @property
    def _can_be_split(self) -> bool:
        """Not for an iterable of batches, nor with torchmetrics objects, whose state is local."""
        if not isinstance(self._plain, DataLoader) or is_stream(self._plain.dataset):
            return False
        return not any(isinstance(part, Metric) for part in self._loop.module.modules())

    @property
    def _limit(self) -> int | None:
        limit = self._loop.max_batches[self._number]
        return None if limit == float("inf") else int(limit)

    @property
    def _number(self) -> int:
        number: int = self._loop._combined_loader.flattened.index(self)
        return number

    def _own_batches(self, session: Session) -> Iterator[Any]:
        add_up(session, torch.zeros(()))  # after it, all have the same roster
        self._computed = {}
        self._loop.open.append(self)
        own = self._part(session, list(range(len(self._batches))))
        self._has_part = bool(own)
        yield from self._load(own or [0])  # Lightning's loop needs a batch of each loader

    def _part(self, session: Session, numbers: list[int]) -> list[int]:
        return list(session.evaluation(numbers, batch_size=1, collate_fn=itemgetter(0)))

    def _load(self, numbers: list[int]) -> Iterator[Any]:
        plain = self._plain
        batches = DataLoader(
            plain.dataset,
            batch_sampler=[self._batches[i] for i in numbers],
            collate_fn=plain.collate_fn,
            num_workers=plain.num_workers,
            pin_memory=plain.pin_memory,
            worker_init_fn=plain.worker_init_fn,
        )
        for i, batch in zip(numbers, batches, strict=True):
            self._loop.calls = self._computed[i] = []
            yield batch

    def finish(self) -> list[Call]:
        """What all workers have logged, in the order of the batches; computes what was lost."""
        session = self._session()
        assert session is not None
        logged: dict[int, list[Call]] = {}
        if not self._has_part:
            self._computed = {}
        while True:
            logged |= gather(session, self._computed, len(self._batches))
            todo = [i for i in range(len(self._batches)) if i not in logged]
            if not todo:
                return [call for i in range(len(self._batches)) for call in logged[i]]
            self._computed = {}
            for batch in self._load(self._part(session, todo)):
                self._loop._evaluation_step(batch, 0, self._number, None)


class EvaluationLoop(_EvaluationLoop):
    """Buffers what is logged in a batch until the results of all workers have arrived."""

    calls: list[Call] | None = None  # of the batch in hand; None: it is logged at once
    open: list[SharedBatches]  # whose results are not there yet

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.trainer.lightning_module
        return module

    def _evaluation_step(self, *args: Any) -> None:
        with Logged(self._results, self._put):
            super()._evaluation_step(*args)

    def _put(self, call: Call) -> None:
        if self.calls is None:
            play(self._results, call)
        else:
            self.calls.append(_to_send(call, self._results))

    def _store_dataloader_outputs(self) -> None:
        """All batches of a loader are done, and the first of the next one may be in hand."""
        if self.open:
            calls, device = self.calls, self.trainer.strategy.root_device
            for call in self.open.pop(0).finish():
                self._results.dataloader_idx = call.pop("dataloader_idx")
                value = torch.tensor(call["value"], dtype=call.pop("kind"), device=device)
                play(self._results, {**call, "value": value})
            self.calls = calls
        super()._store_dataloader_outputs()


def _to_send(call: Call, results: Any) -> Call:
    """A call of `self.log`, with what Lightning would find out about it now."""
    check_value(call)
    value, size = call["value"], call["batch_size"] or results.batch_size
    if size is None and call["on_epoch"] and call["reduce_fx"] == "mean":
        size = results.batch_size = extract_batch_size(results.batch)
    return {
        **call,
        "value": value.item(),
        "kind": value.dtype,
        "batch_size": size or 1,
        "dataloader_idx": results.dataloader_idx,
    }
