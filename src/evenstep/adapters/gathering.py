"""Results of all workers by number, on every worker, whoever is lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def gather(
    add_up: Callable[[torch.Tensor], torch.Tensor], own: Mapping[int, bytes], num: int
) -> dict[int, bytes]:
    """What all workers have of `num` results, without what was lost on the way.

    `add_up` returns a sum over all workers. A result that two workers have is left out, too.
    """
    table = torch.zeros(num, 2, dtype=torch.float64)
    for i, data in own.items():
        table[i] = torch.tensor([1, len(data) + 1])
    rows = add_up(table).long().tolist()
    sizes = {i: size for i, (copies, size) in enumerate(rows) if copies == 1}
    begins, total = {}, 0
    for i, size in sizes.items():
        begins[i], total = total, total + size
    buffer = torch.zeros(total, dtype=torch.uint8)
    for i in own.keys() & sizes.keys():  # the 1 marks that the data arrived
        marked = torch.frombuffer(bytearray(b"\1" + own[i]), dtype=torch.uint8)
        buffer[begins[i] : begins[i] + sizes[i]] = marked
    buffer = add_up(buffer)
    parts = {i: buffer[begin : begin + sizes[i]] for i, begin in begins.items()}
    return {i: part[1:].numpy().tobytes() for i, part in parts.items() if part[0] == 1}
