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

from evenstep.adapters.single_process import show_rank, without_torchrun

# What knows of one process only, and what to use instead.
REFUSED = {
    "gather": "use session.gather in the loss, session.sum for numbers",
    "gather_for_metrics": "evaluate on session.evaluation(...), and add up with session.sum",
    "reduce": "use session.sum",
    "pad_across_processes": "use session.sum, or session.gather",
    "load_state": "a run continues where it was: evenstep run --resume",
    "skip_first_batches": "a run continues where it was: evenstep run --resume",
}


class Accelerator(accelerate.Accelerator):
    """Accelerate's, with batches and windows of a session; made inside of `evenstep.join()`."""

    def __init__(self, session: Session, **options: Any) -> None:
        self._session = session
        self._loader: Loader | None = None
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
        """Prepare what Accelerate prepares, and a loader of `session.loader`, for all workers."""
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


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"accelerator.{name}",
        f"would see the samples of this worker only, and not where the run is: {REFUSED[name]}",
    )
