"""The device of this worker."""

from __future__ import annotations

import os

import torch


def own_device() -> torch.device:
    """This process's first card, or the one of its local rank; else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
