"""What both sides of a comparison have in common: how their script is run."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from evenstep.train.data.random_state import seed_of, seeded


def run_script(script: str, args: Sequence[str]) -> None:
    """Run `python SCRIPT ARGS` in this process, comparably.

    The default dtype is DTYPE; random numbers that a dataset draws for a sample depend on the
    sample's index, as under `evenstep verify`.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, os.environ["DTYPE"]))
    sys.argv = [script, *args]
    with patch.object(_MapDatasetFetcher, "fetch", _fetch_seeded):
        runpy.run_path(script, run_name="__main__")


def _fetch_seeded(self: Any, indices: list[int]) -> Any:
    samples = []
    for index in indices:
        with seeded(seed_of(index) if isinstance(index, int) else 0):
            samples.append(self.dataset[index])
    return self.collate_fn(samples)
