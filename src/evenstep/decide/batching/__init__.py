"""The batch policies by name."""

from __future__ import annotations

from evenstep.decide.batching.auto import Auto
from evenstep.decide.batching.curve import Curve
from evenstep.decide.batching.fixed import Fixed
from evenstep.decide.batching.predictive import Predictive
from evenstep.decide.batching.proportional import Proportional
from evenstep.decide.batching.shift import Shift
from evenstep.decide.batching.static import Static
from evenstep.decide.batching.uniform import Uniform

POLICIES: dict[str, type] = {
    "uniform": Uniform,
    "fixed": Fixed,
    "static": Static,
    "proportional": Proportional,
    "predictive": Predictive,
    "curve": Curve,
    "shift": Shift,
    "auto": Auto,
}
