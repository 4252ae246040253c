"""How many workers, and which: the search, the conditions it asks, and the kinds it weighs."""

from __future__ import annotations

from typing import Any

from evenstep.decide.scaling.efficiency import Efficiency
from evenstep.decide.scaling.utility import Utility

HEURISTICS: dict[str, type[Any]] = {"efficiency": Efficiency, "utility": Utility}
