"""What a worker tells the others about itself and its script before it trains."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from evenstep.train.reduce.loss_scale import disabled_scaler_names
from evenstep.train.replica import Replica


def worker_facts(replica: Replica) -> dict[str, Any]:
    """What the brain has to know about this worker."""
    loader, options = replica.loader, replica.options
    cores = len(os.sched_getaffinity(0))
    device = replica.model.device if replica.has_model else torch.device("cpu")
    return {
        "batch": loader.batch.size,
        "per_worker": loader.batch.per_worker,
        "limit": loader.batch.limit,
        **loader.order.facts,
        "prefetched": loader.prefetched,
        "cores": float(cores),
        "kind": options.kind or _kind_of(device, cores),
        "cap": options.cap,
        "things": ", ".join(sorted(replica.stateful)),
        "disabled_scalers": disabled_scaler_names(replica.stateful.items()),
    }


def run_settings(replica: Replica) -> dict[str, Any]:
    """The script's settings, completed by its loader's batch and the length of the job."""
    settings, size = replica.options.settings, replica.loader.batch
    batch = settings.get("batch", {})
    defaults = {
        "size": size.size,
        "per_worker": size.per_worker,
        "limit": size.limit,
        "min_share": replica.options.min_share,
    }
    return {
        "samples": replica.num_epochs * replica.loader.order.length,
        **settings,
        "batch": {**defaults, **batch} if isinstance(batch, dict) else batch,
    }


def _kind_of(device: torch.device, cores: int) -> str:
    """A name for workers that are alike: the GPU's, or the processor's with its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{platform.machine()}-{cores}"
