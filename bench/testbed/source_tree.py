"""Paths of this source tree, from which child processes import evenstep."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
