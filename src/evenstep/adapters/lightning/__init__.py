"""Lightning on workers that join, leave and die: `Strategy` for Trainer, `FabricStrategy`."""

from __future__ import annotations

try:
    import lightning as _lightning  # noqa: F401
except ImportError:
    raise ImportError('this adapter needs: pip install "evenstep[lightning]"') from None

from evenstep.adapters.lightning.fabric import FabricStrategy
from evenstep.adapters.lightning.strategy import Strategy

__all__ = ["FabricStrategy", "Strategy"]
