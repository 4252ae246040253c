"""What a worker tells of itself and of its script before it trains."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from evenstep.train.data.loader import Loader
from evenstep.train.reduce.loss_scale import disabled_scaler_names


def facts_of(
    loader: Loader, things: Mapping[str, Any], device: torch.device, *, kind: str, cap: int | None
) -> dict[str, Any]:
    """What the brain has to know of a worker; without a `kind`, that of its device."""
    cores = len(os.sched_getaffinity(0))
    return {
        "batch": loader.batch.size,
        "per_worker": loader.batch.per_worker,
        "limit": loader.batch.limit,
        **loader.order.facts,
        "prefetched": loader.prefetched,
        "cores": float(cores),
        "kind": kind or _kind_of(device, cores),
        "cap": cap,
        "things": ", ".join(sorted(things)),
        "disabled_scalers": disabled_scaler_names(things.items()),
    }


def settings_of(
    settings: dict[str, Any], loader: Loader, *, num_epochs: int, min_share: int
) -> dict[str, Any]:
    """The script's settings with what its loader says of the batch and the job's length."""
    size = {"size": loader.batch.size, "per_worker": loader.batch.per_worker}
    own = {**size, "limit": loader.batch.limit, "min_share": min_share}
    told = settings.get("batch", {})
    return {
        "samples": num_epochs * loader.order.length,
        **settings,
        "batch": {**own, **told} if isinstance(told, dict) else told,
    }


def _kind_of(device: torch.device, cores: int) -> str:
    """A name for workers that are alike: the GPU's, or that of the processor and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{platform.machine()}-{cores}"
