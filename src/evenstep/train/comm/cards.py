"""GPUs: whether gradients are reduced on them (NCCL) or in host memory, and their random state.

NCCL needs a GPU of its own for every rank. In an elastic run a worker that dies may leave NCCL
hanging, so gradients go through host memory there unless EVENSTEP_NCCL=1 is set on all workers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import torch

from evenstep.train.comm.group import Group

log = logging.getLogger("evenstep")

USE_NCCL = "EVENSTEP_NCCL"
CARD_BYTES = 16  # of a CUDA generator's state: a seed and an offset
NO_CARD = 255  # fills every byte; zeros would be the state of seed 0


def card_of(device: torch.device) -> int:
    """A number that identifies the device's GPU in all processes; 0 if NCCL cannot use it."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return 0
    name = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def on_cards(group: Group, card: int, *, elastic: bool) -> bool:
    """Whether gradients are reduced on the GPUs that they are on. All ranks call it."""
    table = torch.zeros(group.world, 2, dtype=torch.int64)  # floats could not tell GPUs apart
    willing = not elastic or os.environ.get(USE_NCCL) == "1"
    table[group.rank, 0], table[group.rank, 1] = card, willing
    cards, wills = group.sum(table).T.tolist()
    why = why_on_host(cards, wills)
    if why and any(cards) and group.rank == 0:
        _log_once(why)
    return not why


def why_on_host(cards: Sequence[int], willing: Sequence[int]) -> str:
    """Why gradients go through host memory, given the GPU of each rank; empty if they do not."""
    if 0 in cards:
        return "not all workers have a GPU that NCCL can use"
    if shared := [rank for rank, card in enumerate(cards) if cards.count(card) > 1]:
        return f"ranks {', '.join(map(str, shared))} share GPUs, and NCCL needs one for each rank"
    if not all(willing):
        return (
            "in an elastic run a worker that dies may leave NCCL hanging; "
            f"set {USE_NCCL}=1 on all workers to use NCCL anyway"
        )
    return ""


@cache  # once for each reason, not in every generation
def _log_once(why: str) -> None:
    log.info("gradients on CUDA are reduced in host memory, by Gloo: %s", why)


def card_random(device: torch.device) -> torch.Tensor:
    """The state of the GPU's random generator; elsewhere, a placeholder of the same size.

    So workers with and without a GPU can exchange it.
    """
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.full((CARD_BYTES,), NO_CARD, dtype=torch.uint8)


def set_card_random(device: torch.device, state: torch.Tensor | None) -> None:
    """Restore what `card_random` returned, here or elsewhere; no-op if either side had no GPU."""
    if device.type == "cuda" and state is not None and not bool((state == NO_CARD).all()):
        torch.cuda.set_rng_state(state, device)
