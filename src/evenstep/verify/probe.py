"""Observes a training process under `evenstep verify`, from inside its session.

The probe sets the shares, and records the samples that reach the loop, a digest of their content,
and each step's gradients. It makes runs comparable: every step begins with the parameters of the
single-process run, random numbers of a sample depend only on its index, and dropout is off.
"""

from __future__ import annotations

import random  # noqa: TID251 - only seeded here: users' datasets draw from it
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import default_collate

from evenstep.train.data.order import rank_ranges
from evenstep.train.data.random_state import digest, seeded
from evenstep.train.plan.plans import RankPlan
from evenstep.train.reduce.batch_norm import local_layers
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.session import Finished
from evenstep.verify.records import (
    ENV_VARIABLE,
    REFERENCE,
    RESEEDED,
    Gradients,
    RankRecord,
    StepRecord,
    VerifiedRun,
    save_gradients,
)

OTHER_SEED = 982_451_653  # seeds from here on are unlikely to be the script's own


class Probe:
    """Observes one rank."""

    def __init__(self, run: VerifiedRun, rank: int) -> None:
        self._run, self._rank = run, rank
        self._record = RankRecord()
        self._model: nn.Module | None = None
        self._samples: tuple[tuple[int, str], ...] = ()
        self._gradients: Gradients = {}
        self._generators: dict[str, str] = {}  # as the step found them

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], rank: int) -> Probe | None:
        """A probe, if this process is being verified."""
        run = environment.get(ENV_VARIABLE)
        return cls(msgspec.json.decode(run, type=VerifiedRun), rank) if run else None

    def plans(self, batch: int, world: int) -> list[RankPlan]:
        """The shares of every step, rotated by a rank each step so that everyone's change."""
        shares = self._run.shares if world > 1 else (1,)
        plans = []
        for step in range(self._run.num_steps):
            by = step % world
            ranges = rank_ranges(batch, shares[-by:] + shares[:-by])
            plans.append(
                RankPlan(from_step=step, shares=tuple(end - begin for begin, end in ranges))
            )
        return plans

    def watch_data(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Wrap dataset and collate function so that every batch comes with its samples' records."""
        collate = RecordingCollate(options.get("collate_fn") or default_collate)
        return RecordingDataset(dataset), options | {"collate_fn": collate}

    def watch_model(self, model: nn.Module, reducer: Reducer) -> None:
        """Turn off dropout, and record what matters for comparing gradients."""
        self._model, reducer.after = model, self._copy_gradients
        self._record.dropouts = tuple(turn_off_dropout(model))
        self._record.local_norms = tuple(local_layers(model))
        self._record.dtypes = tuple({str(p.dtype): None for p in model.parameters()})
        model.register_forward_pre_hook(self._record_autocast)

    def begin_step(self, batch: Any, num_counted: int) -> Any:
        """Reset the model to the single-process run's. Returns the batch without its records."""
        indices, digests, batch = batch
        self._samples = tuple(zip(indices, digests, strict=True))[:num_counted]
        if self._model is not None:
            self._align(self._model)
        if self._run.name == RESEEDED:
            seed_all(OTHER_SEED + len(self._record.steps))
        self._generators = generator_digests()
        return batch

    def end_step(self) -> None:
        """Record the step; after the last one, end the script."""
        assert self._model is not None
        now = generator_digests()
        drawn = [name for name, state in self._generators.items() if state != now[name]]
        self._record.draws = tuple(dict.fromkeys([*self._record.draws, *drawn]))
        if self._rank == 0:
            save_gradients(self._run, len(self._record.steps), self._gradients)
        parameters = digest(list(self._model.parameters()))
        self._record.steps += (StepRecord(samples=self._samples, parameters=parameters),)
        self._record.save(self._run, self._rank)
        self._gradients = {}
        if len(self._record.steps) == self._run.num_steps:
            raise Finished(0)

    def _copy_gradients(self) -> None:
        """A backward pass is reduced. The last pass of a step counts."""
        assert self._model is not None
        if self._rank == 0:
            self._gradients = {
                name: param.grad.detach().to("cpu", torch.float64, copy=True).numpy()
                for name, param in self._model.named_parameters()
                if param.grad is not None
            }

    def _record_autocast(self, model: nn.Module, _: Any) -> None:
        """Record the precision of the forward pass, if it is not that of the parameters."""
        device = next(model.parameters()).device.type
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device))
            self._record.dtypes = tuple({**dict.fromkeys(self._record.dtypes), dtype: None})

    @torch.no_grad()
    def _align(self, model: nn.Module) -> None:
        path = self._run.named(REFERENCE).path(f"{len(self._record.steps)}.pt")
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        if self._run.name == REFERENCE:
            torch.save({name: tensor.detach() for name, tensor in tensors.items()}, path)
        elif path.exists():
            for name, tensor in torch.load(path, weights_only=True).items():
                tensors[name].copy_(tensor)


class RecordingDataset:
    """A dataset whose samples come with their index and a digest of their content."""

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


class RecordingCollate:
    """The user's collate function, passing on indices and digests."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[tuple[int, str, Any]]) -> tuple[list[int], list[str], Any]:
        indices, digests, samples = zip(*items, strict=True)
        return list(indices), list(digests), self._collate(list(samples))


def seed_all(seed: int) -> None:
    """Seed all global generators, those of cards too."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_digests() -> dict[str, str]:
    """The states of the global generators, by whose they are."""
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": digest([torch.get_rng_state(), *cards]),
        "NumPy": digest(np.random.get_state()),
        "Python": digest(random.getstate()),
    }


def turn_off_dropout(model: nn.Module) -> list[str]:
    """Set every dropout probability to zero. Returns the names of the layers that had one."""
    names = []
    for name, module in model.named_modules():
        # Attention and recurrent layers have theirs in `dropout`.
        attribute = "p" if isinstance(module, _DropoutNd) else "dropout"
        probability = getattr(module, attribute, None)
        if isinstance(probability, float) and probability > 0:
            setattr(module, attribute, 0.0)
            names.append(name)
    return names
