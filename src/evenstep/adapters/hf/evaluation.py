"""Evaluation over all workers: each computes some of the batches, and all get every result.

Batches are those of one process, so that losses and metrics are too. What a worker that is lost had
to compute, the others compute afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import safetensors.torch
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from evenstep.adapters.gathering import gather
from evenstep.errors import ConfigError
from evenstep.train.recover.flatten import flatten, unflatten
from evenstep.train.session import Session

Predict = Callable[..., tuple[Any, Any, Any]]

STRUCTURE = "structure"


class SharedPredictions:
    """Takes the place of `Trainer.prediction_step` in a loop over `stand_in`."""

    def __init__(self, session: Session, predict: Predict, loader: Any, trainer: Any) -> None:
        self._session, self._predict, self._loader = session, predict, loader
        self._reduce_logits = trainer.preprocess_logits_for_metrics
        self._sampler = _batch_sampler(loader)
        self._batches = list(self._sampler)
        self._results: list[Any] | None = None
        self._next = 0

    @property
    def stand_in(self) -> DataLoader[int]:
        """As many batches, of the same sizes, without their data."""
        return DataLoader(
            range(len(self._loader.dataset)),  # type: ignore[arg-type]
            batch_size=self._sampler.batch_size,
            drop_last=self._sampler.drop_last,
            collate_fn=_only_numbers,
        )

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        if self._results is None:
            self._results = self._compute(model, *args, **kwargs)
        self._next += 1
        loss, logits, labels = self._results[self._next - 1]
        return loss, logits, labels

    def _compute(self, model: Any, *args: Any, **kwargs: Any) -> list[Any]:
        session, loader = self._session, self._loader
        device = next(model.parameters()).device
        results: dict[int, Any] = {}
        session.sum(0.0)  # after it, all have the same roster
        while todo := [i for i in range(len(self._batches)) if i not in results]:
            own = list(session.evaluation(todo, batch_size=1, collate_fn=itemgetter(0)))
            batches = DataLoader(
                loader.dataset,
                batch_sampler=[self._batches[i] for i in own],
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
            )
            computed = {}
            for i, inputs in zip(own, batches, strict=True):
                loss, logits, labels = self._predict(model, inputs, *args, **kwargs)
                if logits is not None and self._reduce_logits is not None:
                    logits = self._reduce_logits(logits, labels)
                computed[i] = to_bytes((loss, logits, labels))
            gathered = gather(session.sum, computed, len(self._batches))
            results |= {i: from_bytes(data, device) for i, data in gathered.items()}
        return [results[i] for i in range(len(self._batches))]


def to_bytes(result: Any) -> bytes:
    """A tree of tensors as bytes, without pickling."""
    structure, tensors = flatten(result)
    named = {str(i): t.detach().cpu().contiguous().clone() for i, t in enumerate(tensors)}
    named[STRUCTURE] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
    return bytes(safetensors.torch.save(named))


def from_bytes(data: bytes, device: torch.device) -> Any:
    """The tree again, with its tensors on a device."""
    named = safetensors.torch.load(data)
    structure = named.pop(STRUCTURE).numpy().tobytes()
    return unflatten(structure, [named[str(i)].to(device) for i in range(len(named))])


def _only_numbers(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor(numbers)}


def _batch_sampler(loader: Any) -> BatchSampler:
    """Refuse loaders whose batches are not the same on all workers."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSampler) or not isinstance(sampler.sampler, SequentialSampler):
        raise ConfigError(
            "eval_dataset",
            "is evaluated by all workers, batch by batch in its own order; give a map-style "
            "dataset, and do not override get_eval_dataloader or _get_eval_sampler",
        )
    return sampler
