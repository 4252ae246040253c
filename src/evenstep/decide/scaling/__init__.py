"""How many workers, and which: the size search, its heuristics, and the kinds of worker."""

from __future__ import annotations

from typing import Any

from evenstep.decide.scaling.efficiency import Efficiency
from evenstep.decide.scaling.utility import Utility

HEURISTICS: dict[str, type[Any]] = {"efficiency": Efficiency, "utility": Utility}
