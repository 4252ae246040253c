"""What a worker reports about itself and its script before it trains."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from evenstep.train.job import Job
from evenstep.train.reduce.loss_scale import disabled_scaler_names


def worker_facts(job: Job) -> dict[str, Any]:
    """Facts about this worker for the brain."""
    loader, options = job.loader, job.options
    cores = _num_cores()
    device = job.model.device if job.has_model else torch.device("cpu")
    return {
        "batch": loader.batch.size,
        "per_worker": loader.batch.per_worker,
        "limit": loader.batch.limit,
        **loader.order.facts,
        "prefetched": loader.prefetched,
        "cores": float(cores),
        "kind": options.kind or os.environ.get("EVENSTEP_KIND", "") or _kind_of(device, cores),
        "cap": options.cap,
        "things": ", ".join(sorted(job.stateful)),
        "processes": job.host.size,
        "disabled_scalers": disabled_scaler_names(job.stateful.items()),
    }


def run_settings(job: Job) -> dict[str, Any]:
    """The script's settings, completed by its loader's batch and the length of the job."""
    settings, size = job.options.settings, job.loader.batch
    batch = settings.get("batch", {})
    defaults = {
        "size": size.size,
        "per_worker": size.per_worker,
        "limit": size.limit,
        "min_share": job.options.min_share,
    }
    return {
        "samples": job.num_epochs * (job.loader.order.length or 0),
        **settings,
        "batch": {**defaults, **batch} if isinstance(batch, dict) else batch,
    }


def _num_cores() -> int:
    """What a launcher gave this worker; it need not keep it from using more."""
    given, usable = os.environ.get("EVENSTEP_CORES", ""), len(os.sched_getaffinity(0))
    return min(int(given), usable) if given.isdecimal() and int(given) else usable


def _kind_of(device: torch.device, cores: int) -> str:
    """A name for workers that are alike: the GPU's, or the processor's with its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).replace(" ", "-")
    return f"{platform.machine()}-{cores}"
