"""The script's loops over the loader, and the epochs that they are for.

A loop is for the epoch after that of the last loop which counted, or for the one that the script
names. A loop that was left before its first backward pass has used nothing and does not count, as
when a script looks at a batch before it trains. A worker that joins repeats such looks, and finds
loops over past epochs empty.
"""

from __future__ import annotations

import logging
from typing import Any

from evenstep.errors import ConfigError
from evenstep.strict import whole

log = logging.getLogger("evenstep")


class Loop:
    """One loop of the script over the loader."""

    def __init__(self, epoch: int = 0, num_void: int = 0) -> None:
        self.epoch, self.num_void_before = epoch, num_void
        self.data: Any = None  # the batch in hand
        self.index = 0  # its number within the epoch
        self.num_ended = 0  # batches that had a backward pass, repeated ones included
        self.cut_for = 0  # the generation for which batches are cut
        self.is_left = self.is_over = False


class ScriptLoops:
    """Numbers the script's loops by epochs."""

    def __init__(self) -> None:
        self.next_epoch = 0  # that the next loop is for
        self._is_numbered = False  # by `session.epochs`
        self._has_counted = False  # any loop
        self._num_looks = 0  # loops before that one, which do not count
        self._looks_of_run = 0  # those of the workers whose state this one took over
        self._looks_between = self._has_warned = False

    def number(self, epoch: int) -> None:
        """`session.epochs` begins an epoch."""
        self.next_epoch, self._is_numbered = epoch, True

    def set_epoch(self, epoch: int) -> None:
        """The script names the epoch of its next loop."""
        if whole("epoch", epoch, 0) < self.next_epoch:
            raise ConfigError(
                "set_epoch",
                f"{epoch} was trained on already: every loop over the loader is the next epoch, in "
                "another order. Give it growing numbers, or do not call it",
            )
        self.next_epoch = epoch

    def count(self, loop: Loop) -> None:
        """A loop counts as that over its epoch: the next one is for a later epoch."""
        self._has_counted = True
        self.next_epoch = max(self.next_epoch, loop.epoch + 1)

    def looked(self) -> None:
        """A loop has ended that does not count."""
        self._looks_between = self._has_counted
        self._num_looks += not self._has_counted

    def repeats_look(self) -> bool:
        """Whether this loop is one that does not count in the workers which this one has joined."""
        if self._num_looks >= self._looks_of_run:
            return False
        self._num_looks += 1
        return True

    def warn_of_looks(self) -> None:
        """Warn once if workers that join cannot follow this script."""
        if self._looks_between and not (self._is_numbered or self._has_warned):
            self._has_warned = True
            log.warning(
                "a loop over the loader was left before its first backward pass, between other "
                "loops. A worker that joins later cannot tell it from a loop over a past epoch. "
                "Write `for epoch in session.epochs(...)`, or take dataset[0] to look at a sample"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a worker that joins has to know."""
        return {"looks": max(self._num_looks, self._looks_of_run)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follow the loops of others, or of a checkpoint."""
        self._looks_of_run = state.get("looks", 0)  # older checkpoints have none
