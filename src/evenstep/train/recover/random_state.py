"""The random state of a GPU, in a form that workers with and without one can exchange."""

from __future__ import annotations

import torch

CARD_BYTES = 16  # of a CUDA generator's state: a seed and an offset
NO_CARD = 255  # in every byte; zeros would be the state after a seed of 0


def card_random(device: torch.device) -> torch.Tensor:
    """The state of the GPU's generator; for other devices, a placeholder of the same size."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.full((CARD_BYTES,), NO_CARD, dtype=torch.uint8)


def set_card_random(device: torch.device, state: torch.Tensor | None) -> None:
    """Restore what `card_random` returned, here or elsewhere; no-op if either side had no GPU."""
    if device.type == "cuda" and state is not None and not bool((state == NO_CARD).all()):
        torch.cuda.set_rng_state(state, device)
