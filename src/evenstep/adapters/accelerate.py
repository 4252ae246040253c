"""Loops written for Accelerate, on workers that join, leave and die.

Accelerate is left for devices, precision and the shape of the loop: to it, every worker is a single
process. Batches, and the ends of accumulation windows, come from the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError
from evenstep.train.data.loader import Loader
from evenstep.train.session import Session

try:
    import accelerate
    from accelerate.utils import DistributedType, send_to_device
except ImportError:
    raise ImportError('this adapter needs: pip install "evenstep[hf]"') from None

from evenstep.adapters.gathering import ordered_batches
from evenstep.adapters.shared_evaluation import SharedEvaluation
from evenstep.adapters.single_process import show_rank, without_torchrun

GATHERS = "accelerator.gather_for_metrics"
ORDERED = (
    "a DataLoader given to accelerator.prepare needs shuffle=False, a dataset with a length and no "
    "sampler of its own. To train, give session.loader(dataset, batch=...) to prepare instead"
)

# Methods that see one process only, and what to use instead.
REFUSED = {
    "reduce": "use gather_for_metrics in the evaluation loop, and session.sum elsewhere",
    "load_state": "a run continues where it was: evenstep run --resume",
    "skip_first_batches": "a run continues where it was: evenstep run --resume",
}


class Accelerator(accelerate.Accelerator):
    """Accelerate's, with batches and windows of a session; made inside of `evenstep.join()`."""

    def __init__(self, session: Session, **options: Any) -> None:
        self._session = session
        self._loader: Loader | None = None
        self._evaluation: SharedEvaluation | None = None  # in whose loop the script is
        with without_torchrun():
            super().__init__(**options)
        if self.distributed_type != DistributedType.NO:
            raise ConfigError(
                "Accelerator",
                f"Accelerate has set up {self.distributed_type.value} before. Make no other "
                "Accelerator, and do not start the script with accelerate launch",
            )
        if self.mixed_precision == "fp16":
            raise ConfigError("mixed_precision", "'fp16' is not supported here; use 'bf16'")

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare what Accelerate prepares for all workers.

        A loader of `session.loader` is trained on; DataLoaders are for evaluation.
        """
        models = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
        others = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer | LRScheduler)]
        if len(models) > 1 or (others and not models):
            raise ConfigError(
                "prepare",
                f"was given {len(models)} models. Give it one, along with its optimizers and "
                "schedulers; put several into one torch.nn.ModuleList",
            )
        if models and self.device_placement:
            models[0].to(self.device)  # before its gradients get a place
        if models:
            self._session.prepare(models[0], *others)
        prepared = super().prepare(*objects, **options)
        prepared = prepared if len(objects) > 1 else (prepared,)
        prepared = tuple(self._batches(obj) if isinstance(obj, Loader) else obj for obj in prepared)
        return prepared if len(objects) > 1 else prepared[0]

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """A DataLoader is for evaluation: each of its batches is shared out to all workers."""
        sampler = ordered_batches(data_loader, "prepare", ORDERED)
        shared = SharedEvaluation(self._session, sampler, data_loader, GATHERS)
        return EvaluationLoader(shared, self)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Rows of a batch of an evaluation, of all workers, in the order of its DataLoader."""
        return self._evaluated("gather_for_metrics").gather(GATHERS, input_data)

    def gather(self, tensor: Any) -> Any:
        """As `gather_for_metrics`: no sample is there twice."""
        return self._evaluated("gather").gather("accelerator.gather", tensor)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors of an evaluation, padded to the longest of all workers."""
        return self._evaluated("pad_across_processes").pad(tensor, dim, pad_index, pad_first)

    def _evaluated(self, name: str) -> SharedEvaluation:
        if self._evaluation is None:
            raise ConfigError(
                f"accelerator.{name}",
                "was called outside of a loop over a DataLoader of accelerator.prepare. Call it "
                "there, for every batch; in training use session.gather in the loss, and "
                "session.sum for numbers",
            )
        return self._evaluation

    def backward(self, loss: Any, **options: Any) -> None:
        if self._evaluation is not None:
            raise ConfigError(
                "accelerator.backward",
                "was called in a loop over a DataLoader of accelerator.prepare, which are for "
                "evaluation: train on session.loader(dataset, batch=...)",
            )
        super().backward(loss, **options)

    def _batches(self, loader: Loader) -> PreparedLoader:
        self._loader = loader
        return PreparedLoader(self._session, loader, self)

    def _do_sync(self) -> None:
        """A window ends by the number of its batch, which a batch that is repeated keeps."""
        loader, state = self._loader, self.gradient_state
        if loader is None:
            raise ConfigError("accumulate", "give session.loader(...) to accelerator.prepare first")
        is_last = state.sync_with_dataloader and loader.num_left(2) == 1
        state._set_sync_gradients(is_last or (loader.index + 1) % state.num_steps == 0)

    def wait_for_everyone(self) -> None:
        """All workers must call it at the same point."""
        self._session.sum(0.0)
        show_rank(self._session.rank)

    def __getattribute__(self, name: str) -> Any:
        if name in REFUSED:
            _refuse(name)
        return super().__getattribute__(name)


class PreparedLoader:
    """What `prepare` returns for a loader: its batches, on the accelerator's device."""

    def __init__(self, session: Session, loader: Loader, accelerator: Accelerator) -> None:
        self._session, self._loader, self._accelerator = session, loader, accelerator

    def __iter__(self) -> Iterator[Any]:
        device = self._accelerator.device
        for _, batch in self._session.enumerate(self._loader):
            show_rank(self._session.rank)
            yield send_to_device(batch, device) if self._accelerator.device_placement else batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class EvaluationLoader:
    """What `prepare` returns for a DataLoader: its batches, on the accelerator's device."""

    def __init__(self, shared: SharedEvaluation, accelerator: Accelerator) -> None:
        self._shared, self._accelerator = shared, accelerator

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        try:
            for batch in self._shared:
                accelerator._evaluation = self._shared
                show_rank(accelerator._session.rank)
                placed = accelerator.device_placement
                yield send_to_device(batch, accelerator.device) if placed else batch
        finally:
            accelerator._evaluation = None
            show_rank(accelerator._session.rank)

    def __len__(self) -> int:
        return len(self._shared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared.plain, name)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"accelerator.{name}",
        f"would see the samples of this worker only, and not where the run is: {REFUSED[name]}",
    )
