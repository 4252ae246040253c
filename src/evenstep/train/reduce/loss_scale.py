"""Check that all ranks use the same loss scale: gradients scaled differently must not be summed.

GradScalers that start equal stay equal, since they see the same reduced gradients. So they are
compared once per roster; a scale in host memory is free to read, and is compared in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.amp import GradScaler

from evenstep.errors import ConfigError
from evenstep.train.step import Report

UNKNOWN = 0.0
SAME_SCALER = (
    "Create the GradScaler with the same arguments on all workers and pass it to "
    "session.prepare(model, optimizer, scaler)"
)


class LossScale:
    """The product of the scales of all GradScalers that the session knows."""

    def __init__(self) -> None:
        self._scalers: list[GradScaler] = []
        self._read_in = -1  # the generation for which scales on a GPU were read last

    def add(self, obj: Any) -> None:
        """Include an object, if it is a GradScaler."""
        if isinstance(obj, GradScaler) and not self.knows(obj):
            self._scalers.append(obj)
            self._read_in = -1

    def knows(self, scaler: GradScaler) -> bool:
        """Whether a scaler was added before."""
        return any(scaler is known for known in self._scalers)

    def current(self, generation: int) -> float:
        """The scale of the loss in this step; UNKNOWN if not used yet, or not read from a GPU."""
        product = 1.0
        for scaler in self._scalers:
            if not scaler.is_enabled():
                continue
            scale = scaler._get_scale_async()
            if scale is None or (scale.device.type != "cpu" and self._read_in == generation):
                return UNKNOWN  # reading it from a GPU blocks the host: once per roster only
            product *= float(scale)
        self._read_in = generation
        return product


def check_scales(reports: Sequence[Report]) -> None:
    """Raise if ranks have scaled their losses by different factors."""
    known = [(rank, r.loss_scale) for rank, r in enumerate(reports) if r.loss_scale != UNKNOWN]
    for rank, scale in known[1:]:
        first, expected = known[0]
        if scale != expected:
            raise ConfigError(
                "scaler",
                f"the loss is scaled by {expected:.10g} on rank {first}, by {scale:.10g} on rank "
                f"{rank}, so their gradients cannot be summed. {SAME_SCALER}",
            )


def disabled_scaler_names(stateful: Iterable[tuple[str, Any]]) -> str:
    """Names of the GradScalers that are disabled."""
    scalers = [(name, obj) for name, obj in stateful if isinstance(obj, GradScaler)]
    return ", ".join(sorted(name for name, scaler in scalers if not scaler.is_enabled()))
