"""Graphics cards of this machine: each worker that is started here sees one of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenstep.types import WorkerId

log = logging.getLogger("evenstep")

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Cards:
    """Gives out cards, to each worker the one that fewest others have."""

    def __init__(self, cards: Sequence[str]) -> None:
        self._held: dict[str, set[WorkerId]] = {card: set() for card in cards}

    @classmethod
    def of(cls, environment: Mapping[str, str], devices: Path = Path("/dev")) -> Cards:
        """Those that the user lets CUDA see, or all that are there."""
        told = environment.get(VISIBLE)
        if told is None:
            names = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia*"))
            return cls([str(number) for number in range(sum(map(str.isdecimal, names)))])
        cards = [card.strip() for card in told.split(",")]
        return cls([card for card in cards if card and not card.startswith("-")])

    def take(self, worker: WorkerId) -> dict[str, str]:
        """What to put into the environment of a worker. Nothing, where there are no cards."""
        if not self._held:
            return {}
        card = min(self._held, key=lambda card: len(self._held[card]))
        if others := self._held[card]:
            told = "%s shares card %s with %s: its memory and its time, and NCCL is not for them"
            log.warning(told, worker, card, ", ".join(sorted(others)))
        others.add(worker)
        return {VISIBLE: card}

    def hold(self, worker: WorkerId, environment: Mapping[str, str]) -> None:
        """A worker that runs already has the card that it was given."""
        if (card := environment.get(VISIBLE, "")) in self._held:
            self._held[card].add(worker)

    def give_back(self, worker: WorkerId) -> None:
        """A worker has ended."""
        for workers in self._held.values():
            workers.discard(worker)
