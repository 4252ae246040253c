"""Training batches for Lightning's loop, checked against the run's epoch and batch number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from evenstep.adapters.epoch import NOTHING, Epoch
from evenstep.adapters.lightning.progress import FitProgress
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.data.loader import Loader
from evenstep.train.data.source import is_stream
from evenstep.train.session import Session

OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class FitBatches:
    """Replaces the script's DataLoader: each of its batches is split over all workers.

    Its state is the position in the data, which is kept in Lightning's checkpoints.
    """

    def __init__(self, loader: Loader, progress: FitProgress) -> None:
        self.loader, self._progress = loader, progress
        self.dataset = loader.dataset
        self._epoch = Epoch(loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> FitBatches:
        return self

    def __next__(self) -> Any:
        number, expected = self._progress.next_batch
        self._epoch.begin(number)
        self._progress.is_between = True
        batch = self._epoch.take(lambda: self._progress.has_moved)
        if batch is NOTHING:
            raise EvenstepError(
                f"epoch {number} has no batch {expected}, which Trainer's loop expects: it has "
                f"{len(self)}. Resume with evenstep run --resume."
            )
        if self.loader.index != expected:
            raise EvenstepError(
                f"Trainer's loop is at batch {expected} of epoch {number}, but the run is at "
                f"batch {self.loader.index}. Resume with evenstep run --resume."
            )
        self._progress.begin_batch()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(dict(state))


def make_loader(session: Session, plain: Any, weight: Any) -> Loader:
    """The session's loader for a DataLoader, whose batch is that of all workers together."""
    if not isinstance(plain, DataLoader) or is_stream(plain.dataset):
        raise ConfigError(
            "train_dataloader",
            f"{type(plain).__name__} cannot be shared out to workers here: give one DataLoader "
            "with a dataset that has __len__ and __getitem__",
        )
    if type(plain.batch_sampler) is not BatchSampler or not plain.batch_sampler.batch_size:
        raise ConfigError(
            "train_dataloader",
            "needs batch_size=..., the batch of all workers together, and no batch_sampler",
        )
    options = {name: getattr(plain, name) for name in OPTIONS}
    if not plain.num_workers:  # DataLoader refuses these then
        for name in ("prefetch_factor", "multiprocessing_context", "persistent_workers"):
            del options[name]
    sampler = plain.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and not sampler._num_samples:
        order: dict[str, Any] = {"shuffle": True}
    elif type(sampler) is SequentialSampler:
        order = {"shuffle": False}
    else:
        order = {"sampler": sampler}
    return session.loader(
        plain.dataset,
        batch=plain.batch_sampler.batch_size,
        drop_last=plain.drop_last,
        weight=weight,
        **order,
        **options,
    )
