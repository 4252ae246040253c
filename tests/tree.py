"""Where this tree is: child processes import evenstep from it, whatever is installed."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
