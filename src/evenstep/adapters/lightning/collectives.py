"""Collectives used after a batch; they raise if the step is voided."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from evenstep.adapters.gathering import gather as gather_bytes
from evenstep.errors import EvenstepError
from evenstep.train.recover.flatten import flatten, unflatten
from evenstep.train.session import Session


def gather(session: Session, own: Mapping[int, Any], num: int) -> dict[int, Any]:
    """All workers' values by number, out of `num`: numbers, text, lists and mappings."""
    encoded = {i: flatten(value)[0] for i, value in own.items()}
    gathered = gather_bytes(partial(add_up, session), encoded, num)
    return {i: unflatten(data, []) for i, data in gathered.items()}


def leaders(session: Session, value: Any) -> Any:
    """Broadcast the leader's value; if the leader is lost, the next one's."""
    while True:
        got = gather(session, {0: value} if session.is_leader else {}, 1)
        if got:
            return got[0]


def add_up(session: Session, values: torch.Tensor) -> torch.Tensor:
    """All-reduce (sum) after a batch; raises if the step is voided."""
    summed = session.sum(values)
    if session.void:
        raise EvenstepError(
            f"a worker was lost at step {session.step}, in a sum over all workers for which the "
            "step would have to be repeated, but Trainer has counted it: before its backward pass, "
            "or after several optimizers stepped in it. Resume with evenstep run --resume."
        )
    return summed
