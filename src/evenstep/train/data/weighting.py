"""What a batch's mean loss counts for, where that is not its samples: its tokens, say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from evenstep.errors import EvenstepError
from evenstep.train.comm.host import Host
from evenstep.train.step import Batch


def weighted(batch: Batch, data: Any, weight: Callable[[Any], float], host: Host) -> Batch:
    """A batch with the weight that the script's function gives to its data."""
    own = float(weight(data)) if batch.own else 0.0
    if not 0 <= own < math.inf:
        raise EvenstepError(
            f"weight=... returned {own} for the batch of step {batch.step}; it must return what "
            "the batch's mean loss counts for, such as its number of tokens: a finite number that "
            "is not negative"
        )
    total = float(host.sum(torch.tensor([own], dtype=torch.float64)))
    return replace(batch, weight=total, part=own / total if total else 0.0)
