"""Evaluation split over workers: each computes some of the batches, and all get every result.

Batches are those of one process, and so are losses and metrics. The batches of a lost worker are
recomputed by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenstep.adapters.gathering import from_bytes, gather, ordered_batches, to_bytes
from evenstep.train.session import Session

Predict = Callable[..., tuple[Any, Any, Any]]

WAY_OUT = "give a map-style dataset, and do not override get_eval_dataloader or _get_eval_sampler"


class SharedPredictions:
    """Takes the place of `Trainer.prediction_step` in a loop over `stand_in`."""

    def __init__(self, session: Session, predict: Predict, loader: Any, trainer: Any) -> None:
        self._session, self._predict, self._loader = session, predict, loader
        self._reduce_logits = trainer.preprocess_logits_for_metrics
        self._sampler = ordered_batches(loader, "eval_dataset", WAY_OUT)
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


def _only_numbers(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor(numbers)}
