"""Results of all workers by number, on every worker, whoever is lost meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evenstep.errors import EvenstepError
from evenstep.train.recover.flatten import flatten, unflatten
from evenstep.train.session import Session


def gather(session: Session, own: Mapping[int, Any], num: int) -> dict[int, Any]:
    """What all workers have of `num` values, without what was lost on the way.

    A value is made of numbers, text, lists and mappings. No two workers may have the same one.
    """
    encoded = {i: flatten(value)[0] for i, value in own.items()}
    table = torch.zeros(num, 2, dtype=torch.float64)
    for i, data in encoded.items():
        table[i] = torch.tensor([1, len(data) + 1])
    rows = add_up(session, table).long().tolist()
    sizes = {i: size for i, (copies, size) in enumerate(rows) if copies == 1}
    begins, total = {}, 0
    for i, size in sizes.items():
        begins[i], total = total, total + size
    buffer = torch.zeros(total, dtype=torch.uint8)
    for i in encoded.keys() & sizes.keys():  # the 1 marks that the data arrived
        marked = torch.frombuffer(bytearray(b"\1" + encoded[i]), dtype=torch.uint8)
        buffer[begins[i] : begins[i] + sizes[i]] = marked
    buffer = add_up(session, buffer)
    parts = {i: buffer[begin : begin + sizes[i]] for i, begin in begins.items()}
    arrived = {i: part for i, part in parts.items() if part[0] == 1}
    return {i: unflatten(part[1:].numpy().tobytes(), []) for i, part in arrived.items()}


def leaders(session: Session, value: Any) -> Any:
    """The leader's value, on every worker."""
    while True:
        got = gather(session, {0: value} if session.is_leader else {}, 1)
        if got:
            return got[0]


def add_up(session: Session, values: torch.Tensor) -> torch.Tensor:
    """The sum over all workers of what they have after a batch was trained on."""
    summed = session.sum(values)
    if session.void:
        raise EvenstepError(
            f"a worker was lost at step {session.step}, in a sum over all workers for which the "
            "step would have to be repeated, but Trainer has counted it: before its backward pass, "
            "or after several optimizers stepped in it. Resume with evenstep run --resume."
        )
    return summed
