"""Find by trial the largest share that fits into a device's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.errors import EvenstepError


class NothingFitsError(EvenstepError, MemoryError):
    """Not even one sample fits into memory."""


def largest_share(run: Callable[[int], object], *, limit: int, start: int = 1) -> int:
    """The largest number of samples, up to `limit`, for which `run` does not run out of memory.

    `run(n)` does what a step does with n samples: forward and backward. The search doubles n until
    memory runs out, then bisects. Only for devices that recover from running out of memory (CUDA;
    not a host whose kernel kills the process). Pass the result as `evenstep.join(cap=...)`.
    """
    if not 1 <= start <= limit:
        raise ValueError(f"need 1 <= start <= limit, got start={start} and limit={limit}")
    fits, too_many = 0, limit + 1
    share = start
    while share < too_many:
        if _fits(run, share):
            fits = share
        else:
            too_many = share
        share = min(2 * share, limit) if too_many > limit else (fits + too_many) // 2
        if share <= fits:
            break
    if fits == 0:
        raise NothingFitsError("not even one sample fits into memory")
    return fits


def _fits(run: Callable[[int], object], share: int) -> bool:
    try:
        run(share)
        return True
    except (torch.OutOfMemoryError, MemoryError):
        return False
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
