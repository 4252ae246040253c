"""Less than a core for the process at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from evenstep.emulate import Quota


@contextmanager
def held(cores: float) -> Iterator[None]:
    """With a quota for this process, if there is to be one: starting up is nobody's figure here."""
    if not cores:
        yield
        return
    with Quota(cores) as quota:
        quota.add(os.getpid())
        yield
