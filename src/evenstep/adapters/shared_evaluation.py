"""Evaluation in a loop of the script: each batch is shared out, and all workers get its results.

The script gathers the results of every batch before it asks for the next one. So samples of a
worker that was lost meanwhile are known to be missing, and are evaluated again by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from evenstep.adapters.gathering import from_bytes, gather, to_bytes
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.session import Session

Slice = tuple[int, int]  # rows of a batch


class SharedEvaluation:
    """A DataLoader's batches in its own order; each worker gets its share of each of them.

    `gathers` is what the script calls for the results, for error messages.
    """

    def __init__(self, session: Session, sampler: BatchSampler, loader: Any, gathers: str) -> None:
        self._session, self._sampler, self.plain = session, sampler, loader
        self._gathers = gathers
        self._own: Slice = 0, 0  # of the batch in hand; empty: a stand-in of one sample
        self._num_rows = 0  # of the batch in hand, over all workers
        self._arrived: list[Slice] | None = None  # whose results were gathered

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Any]:
        session = self._session
        session.framework.begin_evaluation()
        todo = [list(batch) for batch in self._sampler]
        roster: tuple[int, int, int] | None = None  # for which batches are loaded
        batches: Iterator[Any] = iter(())
        slices: list[Slice] = []
        while todo:
            now = session.generation, session.rank, session.world
            if now != roster:
                roster, slices = now, [self._slice(len(batch)) for batch in todo]
                batches = self._load(todo, slices)
            batch = todo.pop(0)
            self._own, self._num_rows, self._arrived = slices.pop(0), len(batch), None
            yield next(batches)
            if self._arrived is None:
                raise EvenstepError(
                    "this loop evaluates a DataLoader on all workers together, so each has its "
                    "share of a batch only, but it has not gathered the results. Do so for every "
                    f"batch: `predictions, labels = {self._gathers}((predictions, labels))`; or "
                    "loop over the DataLoader itself: then every worker evaluates all of it"
                )
            if missing := self._missing():
                todo.insert(0, [batch[row] for row in missing])
                roster = None  # what was loaded ahead is for later batches

    def _slice(self, length: int) -> Slice:
        """This worker's share of a batch. A void step is repeated, so its results go nowhere."""
        return (0, length) if self._session.void else self._session.framework.part_of(length)

    def _load(self, batches: list[list[int]], slices: list[Slice]) -> Iterator[Any]:
        plain = self.plain
        pairs = zip(batches, slices, strict=True)
        own = [batch[begin:end] or batch[:1] for batch, (begin, end) in pairs]
        return iter(
            DataLoader(
                plain.dataset,
                batch_sampler=own,
                collate_fn=plain.collate_fn,
                num_workers=plain.num_workers,
                pin_memory=plain.pin_memory,
                worker_init_fn=plain.worker_init_fn,
            )
        )

    def _missing(self) -> list[int]:
        """Rows of the batch in hand whose results have not arrived: their worker was lost."""
        assert self._arrived is not None
        here = {row for begin, end in self._arrived for row in range(begin, end)}
        return [row for row in range(self._num_rows) if row not in here]

    def gather(self, name: str, tree: Any) -> Any:
        """The rows of all workers for the batch in hand, in the order of the DataLoader.

        `tree` has tensors with a row for each sample of this worker, or lists with an item each.
        """
        begin, end = self._own
        num = max(end - begin, 1)
        _map(tree, lambda leaf: _check_rows(name, leaf, num))
        session, everything = self._session, [(0, self._num_rows)]
        if session.void or session.framework.is_late:  # what this worker computes goes nowhere
            return self._arrive(name, everything, tree)
        if session.world == 1:
            return self._arrive(name, [self._own], tree)
        own = {begin: to_bytes([end, tree])} if end > begin else {}
        gathered = gather(session.sum, own, self._num_rows)
        if session.void:
            return self._arrive(name, everything, tree)
        arrived: list[Slice] = []
        trees = []
        for begin in sorted(gathered):
            end, part = from_bytes(gathered[begin])
            if not arrived or begin >= arrived[-1][1]:  # else two workers had it: once more
                arrived.append((begin, end))
                trees.append(part)
        return self._arrive(name, arrived, _concatenate(trees, tree))

    def _arrive(self, name: str, arrived: list[Slice], result: Any) -> Any:
        if self._arrived not in (None, arrived):
            raise EvenstepError(
                f"a worker was lost between two calls of {name} for one batch, so that the second "
                f"has other rows than the first. Make it one call: a, b = {name}((a, b))"
            )
        self._arrived = arrived
        return result

    def pad(self, tree: Any, dim: int, value: int, first: bool) -> Any:
        """Tensors padded to the length of the longest of all workers."""
        sizes: list[int] = []
        _map(tree, lambda leaf: sizes.append(leaf.shape[dim] if dim < leaf.dim() else 0))
        begin, end = self._own
        own = {begin: to_bytes(sizes)} if end > begin else {}
        session = self._session
        if session.world > 1 and not (session.void or session.framework.is_late):
            everyone = gather(session.sum, own, self._num_rows).values()
            sizes = [max(size) for size in zip(sizes, *map(from_bytes, everyone), strict=True)]
        wanted = iter(sizes)
        return _map(tree, lambda leaf: _padded(leaf, dim, next(wanted), value, first))


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The function's results for the leaves of a tree: tensors, and lists with an item a sample."""
    if isinstance(tree, dict):
        return {name: _map(part, function) for name, part in tree.items()}
    if isinstance(tree, tuple) or (isinstance(tree, list) and _has_tensors(tree)):
        return type(tree)(_map(part, function) for part in tree)
    return function(tree)


def _has_tensors(parts: list[Any]) -> bool:
    return any(isinstance(part, torch.Tensor | list | tuple | dict) for part in parts)


def _check_rows(name: str, leaf: Any, num: int) -> None:
    if isinstance(leaf, torch.Tensor):
        has = f"a tensor of {tuple(leaf.shape)}"
        is_right = leaf.dim() > 0 and len(leaf) == num
    else:
        has = f"a {type(leaf).__name__}" + (f" of {len(leaf)}" if isinstance(leaf, list) else "")
        is_right = isinstance(leaf, list) and len(leaf) == num
    if not is_right:
        raise ConfigError(
            name,
            f"got {has}, but this worker has {num} samples of the batch: give a row for each "
            "sample, as in loss.repeat(len(labels)) for a mean over them",
        )


def _concatenate(trees: list[Any], own: Any) -> Any:
    """Trees of rows as one, on the device of this worker's own; without any, no rows."""
    if isinstance(own, dict):
        return {name: _concatenate([t[name] for t in trees], own[name]) for name in own}
    if isinstance(own, tuple) or (isinstance(own, list) and _has_tensors(own)):
        return type(own)(_concatenate([t[i] for t in trees], o) for i, o in enumerate(own))
    if isinstance(own, torch.Tensor):
        return torch.cat([t.to(own.device) for t in trees]) if trees else own[:0]
    return [item for t in trees for item in t]


def _padded(leaf: torch.Tensor, dim: int, size: int, value: int, first: bool) -> torch.Tensor:
    if dim >= leaf.dim() or leaf.shape[dim] == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size - leaf.shape[dim]
    padding = leaf.new_full(shape, value)
    return torch.cat([padding, leaf] if first else [leaf, padding], dim)
