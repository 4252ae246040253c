"""Check that all ranks use the same loss scale: gradients scaled differently must not be summed.

GradScalers that start equal stay equal, since they see the same reduced gradients. So they are
compared once per roster; a scale in host memory is free to read, and is compared in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.amp import GradScaler

from evenstep.errors import ConfigError
from evenstep.train.report import Report

UNKNOWN = 0.0
WAY_OUT = (
    "Make the GradScaler in the same way on all workers, enabled on all or on none, and give it to "
    "session.prepare(model, optimizer, scaler)"
)


class LossScale:
    """The GradScalers that the session knows of."""

    def __init__(self) -> None:
        self._scalers: list[GradScaler] = []
        self._looked = False  # whether scales on a GPU were read for this roster

    def add(self, thing: Any) -> None:
        """Compare this one too, if it is a GradScaler."""
        if isinstance(thing, GradScaler) and not self.knows(thing):
            self._scalers.append(thing)
            self._looked = False

    def knows(self, scaler: GradScaler) -> bool:
        """Whether it was added before."""
        return any(scaler is known for known in self._scalers)

    def begin_roster(self) -> None:
        """The roster has changed: compare again."""
        self._looked = False

    def of_step(self) -> float:
        """The factor of the loss in the step at hand; UNKNOWN: not used yet, or on a card."""
        product = 1.0
        for scaler in self._scalers:
            if not scaler.is_enabled():
                continue
            scale = scaler._get_scale_async()
            if scale is None or (scale.device.type != "cpu" and self._looked):
                return UNKNOWN  # from a card, a look makes the host wait: one for each roster
            product *= float(scale)
        self._looked = True
        return product


def check_scales(reports: Sequence[Report]) -> None:
    """Refuse to sum gradients of losses that ranks have scaled by different factors."""
    known = [(rank, r.loss_scale) for rank, r in enumerate(reports) if r.loss_scale != UNKNOWN]
    for rank, scale in known[1:]:
        first, expected = known[0]
        if scale != expected:
            raise ConfigError(
                "scaler",
                f"the loss is scaled by {expected:.10g} on rank {first}, by {scale:.10g} on rank "
                f"{rank}, so their gradients cannot be summed. {WAY_OUT}",
            )


def disabled_scaler_names(things: Iterable[tuple[str, Any]]) -> str:
    """Names of the GradScalers that are disabled."""
    return ", ".join(
        sorted(name for name, t in things if isinstance(t, GradScaler) and not t.is_enabled())
    )
