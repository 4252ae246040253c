"""What can be summed over workers: numbers of some dtypes as they are, others in a wider one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.errors import EvenstepError

SUMMED = (  # by Gloo and NCCL, in place; the order is that of numbers in announced sums
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.complex64,
    torch.complex128,
)

# Exact, but for sums that the dtype itself cannot hold: these wrap, as the dtype does.
WIDER = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


def check_summable(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that cannot be summed over workers, by name."""
    if tensor.layout is not torch.strided:
        raise EvenstepError(
            f"{what} got a tensor of layout {tensor.layout}, and only dense ones are summed over "
            "workers. Give tensor.to_dense()."
        )
    if tensor.dtype not in SUMMED and tensor.dtype not in WIDER:
        raise EvenstepError(
            f"{what} got a tensor of {tensor.dtype}, which is not summed over workers. Convert it "
            "to torch.float32, torch.int64 or another common dtype."
        )


def summed_wide(
    tensor: torch.Tensor, add_up: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The sum that `add_up` returns, by way of a wider dtype if need be.

    Of truth values: whether any is true.
    """
    wider = WIDER.get(tensor.dtype)
    return add_up(tensor) if wider is None else add_up(tensor.to(wider)).to(tensor.dtype)
