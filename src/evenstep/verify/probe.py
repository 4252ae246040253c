"""What watches a training process under `evenstep verify`, from inside its session.

It deals the shares, notes which samples reach the loop and what they hold, and keeps the gradients
that each step ended with. Runs are made comparable: every step begins with the parameters that the
run alone had there, a sample's random draws depend on its index only, and dropout is off.
"""

from __future__ import annotations

import random  # noqa: TID251 - users' datasets draw from it: it is seeded here, never drawn from
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import default_collate

from evenstep.train.data.order import rank_ranges
from evenstep.train.reduce.batch_norm import local_layers
from evenstep.train.reduce.pulse import RankPlan
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.session import Finished
from evenstep.verify.records import (
    AGAIN,
    ALONE,
    VARIABLE,
    Gradients,
    Record,
    Step,
    Task,
    save_gradients,
)

OTHER = 982_451_653
"""Seeds from here on are not likely to be the script's own."""


class Probe:
    """Watches one rank."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._record = Record()
        self._model: nn.Module | None = None
        self._samples: tuple[tuple[int, str], ...] = ()
        self._gradients: Gradients = {}

    @classmethod
    def find(cls, environment: Mapping[str, str], rank: int) -> Probe | None:
        """A probe, if this process is being verified."""
        told = environment.get(VARIABLE)
        return cls(msgspec.json.decode(told, type=Task), rank) if told else None

    def plans(self, batch: int, world: int) -> list[RankPlan]:
        """The shares of every step: handed on from rank to rank, so that everyone's change."""
        shares = self._task.shares if world > 1 else (1,)
        orders = []
        for step in range(self._task.num_steps):
            by = step % world
            parts = rank_ranges(batch, shares[-by:] + shares[:-by])
            orders.append(
                RankPlan(from_step=step, shares=tuple(end - begin for begin, end in parts))
            )
        return orders

    def watch_data(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Dataset and loader options of which every batch brings word of its samples along."""
        collate = Collate(options.get("collate_fn") or default_collate)
        return Watched(dataset), options | {"collate_fn": collate}

    def watch_model(self, model: nn.Module, reducer: Reducer) -> None:
        """Make the model comparable, and keep what its reducer brings."""
        self._model, reducer.after = model, self._keep
        self._record.dropouts = tuple(turn_off_dropout(model))
        self._record.local_norms = tuple(local_layers(model))
        self._record.dtypes = tuple({str(p.dtype): None for p in model.parameters()})
        model.register_forward_pre_hook(self._look)

    def begin_step(self, batch: Any, num_counted: int) -> Any:
        """The batch as the loop is to get it; the model as it was at this step in the run alone."""
        indices, digests, batch = batch
        self._samples = tuple(zip(indices, digests, strict=True))[:num_counted]
        if self._model is not None:
            self._align(self._model)
        if self._task.run == AGAIN:
            seed_all(OTHER + len(self._record.steps))
        return batch

    def end_step(self) -> None:
        """Leave word of the step; after the last one, end the script."""
        assert self._model is not None
        if self._rank == 0:
            save_gradients(self._task, len(self._record.steps), self._gradients)
        parameters = digest(list(self._model.parameters()))
        self._record.steps += (Step(samples=self._samples, parameters=parameters),)
        self._record.save(self._task, self._rank)
        self._gradients = {}
        if len(self._record.steps) == self._task.num_steps:
            raise Finished(0)

    def _keep(self) -> None:
        """A backward pass is over and reduced. The last of a step stands for it."""
        assert self._model is not None
        if self._rank == 0:
            self._gradients = {
                name: param.grad.detach().to("cpu", torch.float64, copy=True).numpy()
                for name, param in self._model.named_parameters()
                if param.grad is not None
            }

    def _look(self, model: nn.Module, _: Any) -> None:
        """Whether the forward pass computes in a lower precision than the parameters have."""
        device = next(model.parameters()).device.type
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device))
            self._record.dtypes = tuple({**dict.fromkeys(self._record.dtypes), dtype: None})

    @torch.no_grad()
    def _align(self, model: nn.Module) -> None:
        path = self._task.path(f"{len(self._record.steps)}.pt", ALONE)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        if self._task.run == ALONE:
            torch.save({name: tensor.detach() for name, tensor in tensors.items()}, path)
        elif path.exists():
            for name, tensor in torch.load(path, weights_only=True).items():
                tensors[name].copy_(tensor)


class Watched:
    """A dataset whose samples come with their index and a digest of what they hold."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, str, Any]:
        with seeded(index):
            sample = self._dataset[index]
        return index, digest(sample), sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class Collate:
    """Collates as the user does, and passes on which samples they were."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[tuple[int, str, Any]]) -> tuple[list[int], list[str], Any]:
        indices, digests, samples = zip(*items, strict=True)
        return list(indices), list(digests), self._collate(list(samples))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random draws that depend on the seed only, and leave no trace."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)


def seed_all(seed: int) -> None:
    """Seed whatever a script is likely to draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def digest(value: Any) -> str:
    """A short name for what a value holds. Of objects of unknown kinds only the kind counts."""
    whole = blake2b(digest_size=8)

    def take(part: Any) -> None:
        whole.update(type(part).__name__.encode())
        if isinstance(part, torch.Tensor) and part.layout == torch.strided:
            whole.update(f"{part.dtype}{tuple(part.shape)}".encode())
            flat = part.detach().cpu().contiguous().view(-1)
            whole.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(part, Mapping):
            take(list(part.items()))
        elif isinstance(part, list | tuple):
            for item in part:
                take(item)
        elif hasattr(part, "tobytes"):  # arrays, images
            whole.update(f"{getattr(part, 'dtype', '')}{getattr(part, 'shape', '')}".encode())
            whole.update(part.tobytes())
        elif isinstance(part, str | bytes | int | float | complex):
            whole.update(repr(part).encode())

    take(value)
    return whole.hexdigest()


def turn_off_dropout(model: nn.Module) -> list[str]:
    """Set every dropout of a model to zero and name the layers that had one."""
    names = []
    for name, module in model.named_modules():
        # Attention and recurrent layers keep theirs in `dropout`.
        where = "p" if isinstance(module, _DropoutNd) else "dropout"
        chance = getattr(module, where, None)
        if isinstance(chance, float) and chance > 0:
            setattr(module, where, 0.0)
            names.append(name)
    return names
