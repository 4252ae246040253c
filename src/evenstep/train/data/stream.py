"""Streams: every worker reads all samples in the same order, and decodes only its share of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from evenstep.errors import EvenstepError
from evenstep.train.data.random_state import (
    RandomState,
    digest,
    reseed,
    seed_of,
    small_digest,
)


@runtime_checkable
class Readable(Protocol):
    """A stream that can begin at any sample. Others are read and skipped up to there."""

    def samples_from(self, epoch: int, begin: int) -> Iterator[Any]:
        """The samples of an epoch, from one on."""


class Stream:
    """The samples of an iterable, or of what a function of the epoch returns.

    Those that may still be asked for are kept. A new epoch is announced by `set_epoch(epoch)`, if
    the iterable has it, and a new `iter()`.
    Random numbers drawn while reading are seeded by the epoch, and leave the script's alone. If
    `repeats`, all passes are one epoch without end.
    """

    length = None

    def __init__(self, stream: Any, *, seed: int, repeats: bool = False) -> None:
        self._stream, self._seed, self._repeats = stream, seed, repeats
        self.kind = f"read from {type(stream).__name__}"
        self._epoch = -1
        self._kept: deque[Any] = deque()
        self._begin = 0  # the position of the first one kept
        self._is_over = False
        self._pass = 0
        self._pass_begin = 0  # the position at which the pass has begun
        self._samples: Iterator[Any] = iter(())
        self._random = RandomState(seed)

    def end(self, epoch: int, begin: int, end: int) -> int:
        self._fill(epoch, begin, end)
        return min(end, self._num_read)

    def items(self, epoch: int, begin: int, end: int) -> list[Any]:
        self._fill(epoch, begin, end)
        return list(islice(self._kept, begin - self._begin, end - self._begin))

    def digest(self, epoch: int, begin: int, end: int) -> int:
        """Of the first sample, and of the number of samples in the next step.

        A stream that ends earlier on one worker is then noticed in its last step, while all still
        exchange something.
        """
        if begin == end:  # of the sample at a position that a run has reached
            if begin == 0:
                return 0  # do not begin to read for that
            return small_digest(self.items(epoch, begin, self.end(epoch, begin, begin + 1)))
        num_next = self.end(epoch, begin, end + end - begin) - end
        return small_digest([digest(self._kept[begin - self._begin]), num_next])

    def forget(self, epoch: int, begin: int) -> None:
        while epoch == self._epoch and self._kept and self._begin < begin:
            self._kept.popleft()
            self._begin += 1

    @property
    def stated(self) -> int | None:
        """The length that the stream itself says it has. It ends where it ends."""
        try:
            return len(self._stream)
        except (TypeError, NotImplementedError):
            return None

    @property
    def _num_read(self) -> int:
        """Samples of the epoch that were read so far."""
        return self._begin + len(self._kept)

    def _fill(self, epoch: int, begin: int, end: int) -> None:
        """Keep samples from `begin`, or an earlier one, to `end`, or the epoch's."""
        if epoch != self._epoch or begin < self._begin:
            self._open(epoch, begin)
        if end <= self._num_read or self._is_over:
            return
        with self._random.installed():
            if begin > self._num_read:
                self._skip_to(begin)
            while self._num_read < end and self._advance(self._kept.append):
                pass
        if self._is_over and not self._num_read:
            raise EvenstepError(
                f"the stream has no samples in epoch {epoch}. An iterator can be read once only: "
                "give an iterable whose every iter() begins anew, or steps=... for one loop"
            )

    def _open(self, epoch: int, begin: int) -> None:
        """Begin to read an epoch, for samples from `begin` on."""
        self._epoch, self._is_over = epoch, False
        self._kept.clear()
        self._begin = self._pass_begin = 0
        with self._random.installed():
            self._open_pass(epoch, begin)

    def _open_pass(self, number: int, begin: int = 0) -> None:
        self._pass = number
        reseed(seed_of(self._seed, number))
        if isinstance(self._stream, Readable) and not self._repeats:
            self._samples, self._begin = self._stream.samples_from(number, begin), begin
        elif isinstance(self._stream, Readable):
            self._samples = self._stream.samples_from(number, 0)
        else:
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(number)
            # Without __iter__ it is a function of the epoch.
            is_iterable = isinstance(self._stream, Iterable)
            self._samples = iter(self._stream if is_iterable else self._stream(number))

    def _skip_to(self, begin: int) -> None:
        self._begin = self._num_read
        self._kept.clear()

        def skip(sample: Any) -> None:
            self._begin += 1

        while self._begin < begin and self._advance(skip):
            pass

    def _advance(self, keep: Callable[[Any], None]) -> bool:
        """Read one more sample; False at the end of the epoch."""
        for sample in self._samples:
            keep(sample)
            return True
        if not self._repeats or self._num_read == self._pass_begin:
            self._is_over = True
            return False
        self._pass_begin = self._num_read
        self._open_pass(self._pass + 1)
        return self._advance(keep)
