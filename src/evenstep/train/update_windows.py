"""Detects loops that count batches themselves and so update something a batch too early or late.

A batch that is repeated after the loss of a worker is one more iteration of the script's loop. A
loop that counts iterations, say to step an optimizer every fourth time, then steps it in another
batch and silently trains differently.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from evenstep.errors import EvenstepError
from evenstep.train.step import Step

WAY_OUT = (
    "Count with `for i, batch in session.enumerate(loader)`, in which a repeated batch keeps its "
    "number, or loop over session.accumulate(loader, ...)."
)


class Update(NamedTuple):
    """A kind of update, in words and numbers."""

    does: str
    did: str
    may_depend_on_data: bool = False  # then only a pattern without exception counts
    num_sure: int = 2  # equal windows, one after the other, that a loop must be counting


OPTIMIZER = Update("steps an optimizer", "an optimizer stepped")
SCHEDULER = Update("steps a scheduler", "a scheduler stepped")


def registered(name: str) -> Update:
    """An update of an object that the script has registered."""
    return Update(f"updates {name!r}", f"{name!r} was updated", may_depend_on_data=True, num_sure=4)


class UpdatePlace(NamedTuple):
    """Where the script was when it updated something."""

    batch: int  # the number of its step
    num_void: int
    num_adopted: int
    epoch: int = -1  # -1: between two loops


class UpdateWindow(NamedTuple):
    """The batches between two updates."""

    num_batches: int
    num_void: int

    def is_miscounted(self, usual: int) -> bool:
        """Whether iterations make full windows where batches that count do not."""
        num_all = self.num_batches + self.num_void
        return self.num_batches % usual != 0 and num_all % usual == 0


class WindowHistory:
    """The windows of one thing that the script updates."""

    def __init__(self, last: UpdatePlace) -> None:
        self.last = last
        self.usual = 0  # batches in the last window without void steps; 0: there was none
        self.num_equal = 0  # windows of that size, one after the other
        self.is_regular = True  # all were of that size
        self.suspect: UpdateWindow | None = None  # seen before the usual number was known

    @property
    def is_sure(self) -> bool:
        """Whether the size has been shown to be the usual one."""
        return self.is_regular and self.num_equal > 1

    def add(self, num_batches: int) -> None:
        """A window without void steps, in the middle of an epoch."""
        self.is_regular = self.is_regular and num_batches in (self.usual or num_batches,)
        self.num_equal = self.num_equal + 1 if num_batches == self.usual else 1
        self.usual = num_batches


class Epochs(Protocol):
    """What is asked of the loader."""

    @property
    def epoch(self) -> int: ...
    @property
    def is_last(self) -> bool: ...


class UpdateWindows:
    """The windows of everything that the script updates."""

    def __init__(self, step: Step, loader: Callable[[], Epochs]) -> None:
        self.is_counted = False  # the script reads the session's own numbers
        self.is_trusted = False  # and counts with nothing else
        self.way_out = WAY_OUT
        self._step, self._loader = step, loader
        self._begin = UpdatePlace(-1, 0, 0)  # before the first batch
        self._known: dict[Hashable, WindowHistory] = {}
        step.on_fetched.append(self._begin_counting)

    def _begin_counting(self) -> None:
        step = self._step
        self._begin = self._begin._replace(batch=step.batch.step - 1, num_adopted=step.num_adopted)
        step.on_fetched.remove(self._begin_counting)

    def updated(self, key: Hashable, update: Update) -> None:
        """The script has updated something. Raises if it did so by a count that went wrong."""
        step = self._step
        history = self._known.setdefault(key, WindowHistory(self._begin))
        here = UpdatePlace(step.batch.step, step.num_void, step.num_adopted)
        if not step.has_batch or step.is_left:  # between two loops
            history.last = here
            return
        loader = self._loader()
        here = here._replace(epoch=loader.epoch)
        last, history.last = history.last, here
        window = UpdateWindow(here.batch - last.batch, here.num_void - last.num_void)
        if not window.num_batches:  # another update in the same batch
            return
        if here.num_adopted > last.num_adopted:  # others made updates that were skipped here
            return
        # Numbers of session.enumerate begin anew in each epoch, and so may windows.
        if self.is_trusted and here.epoch > last.epoch:
            return
        if window.num_void:
            self._check(history, window, update, is_last=loader.is_last)
        elif not loader.is_last:  # the last window of an epoch may be shorter
            history.add(window.num_batches)
            self._check_suspect(history, update)
            self._refuse_counting(history, update)

    def _check(
        self, history: WindowHistory, window: UpdateWindow, update: Update, *, is_last: bool
    ) -> None:
        """Raise if a window with void steps is not what it usually is."""
        usual, needs_proof = history.usual, self._needs_proof(update)
        if needs_proof and is_last:
            return
        if not usual:
            history.suspect = window
        elif window.num_batches < usual and not needs_proof:
            if window.is_miscounted(usual) or not is_last:
                raise self._miscounted(window, usual, update)
        elif window.is_miscounted(usual):
            history.suspect = window
            self._check_suspect(history, update)

    def _check_suspect(self, history: WindowHistory, update: Update) -> None:
        """Judge a window by those without void steps, before or after it."""
        if (suspect := history.suspect) is None:
            return
        is_short = suspect.num_batches < history.usual
        if history.is_sure or (is_short and not self._needs_proof(update)):
            history.suspect = None
            if suspect.is_miscounted(history.usual):
                raise self._miscounted(suspect, history.usual, update)

    def _needs_proof(self, update: Update) -> bool:
        """Whether windows of unusual sizes are to be expected."""
        return self.is_trusted or update.may_depend_on_data

    def _refuse_counting(self, history: WindowHistory, update: Update) -> None:
        """Refuse a count before it goes wrong."""
        if self.is_counted or self.is_trusted or history.usual == 1:
            return
        if update.may_depend_on_data and not history.is_regular:
            return
        if history.num_equal == update.num_sure:
            raise EvenstepError(
                f"this loop {update.does} every {history.usual} batches, and counts them by "
                "itself. Under evenstep run a batch is repeated when a worker is lost, and workers "
                f"join in the middle of an epoch: such a count would be wrong then. {self.way_out}"
            )

    def _miscounted(self, window: UpdateWindow, usual: int, update: Update) -> EvenstepError:
        batches = "1 batch" if window.num_batches == 1 else f"{window.num_batches} batches"
        return EvenstepError(
            f"{update.did} after {batches} instead of {usual}, because {window.num_void} had to be "
            f"repeated after the loss of a worker, and the loop counted those again. {self.way_out}"
        )
