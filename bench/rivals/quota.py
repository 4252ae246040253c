"""A CPU quota for this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from evenstep.emulate import Quota


@contextmanager
def limit_cores(cores: float) -> Iterator[None]:
    """Run under a quota of `cores`; 0 for none. Enter it after start-up, which must not count."""
    if not cores:
        yield
        return
    with Quota(cores) as quota:
        quota.add(os.getpid())
        yield
