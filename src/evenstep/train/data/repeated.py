"""Loops of a fixed number of steps, whatever the number of samples."""

from __future__ import annotations

from typing import Any

from evenstep.train.data.order import Samples


class Repeated:
    """Samples pass after pass, as loops of a fixed length: the next loop continues where one ends.

    A pass over all samples is complete before the next one begins, and batches cross from one into
    the other.
    """

    def __init__(self, samples: Samples, *, steps: int, batch: int) -> None:
        self._samples = samples
        self.length = steps * batch
        size = "" if samples.length is None else f" of {samples.length} samples"
        self.kind = f"{samples.kind}{', ' if samples.kind else ''}in passes{size}"

    def end(self, epoch: int, begin: int, end: int) -> int:
        return min(end, self.length)

    def items(self, epoch: int, begin: int, end: int) -> list[Any]:
        found: list[Any] = []
        first = epoch * self.length
        while begin < end:
            number, offset = self._find(first + begin)
            until = self._samples.end(number, offset, offset + end - begin)
            found += self._samples.items(number, offset, until)
            begin += until - offset
        return found

    def digest(self, epoch: int, begin: int, end: int) -> int:
        number, offset = self._find(epoch * self.length + begin)
        until = self._samples.end(number, offset, offset + end - begin)
        return self._samples.digest(number, offset, until)

    def forget(self, epoch: int, begin: int) -> None:
        self._samples.forget(*self._find(epoch * self.length + begin))

    def _find(self, position: int) -> tuple[int, int]:
        """The pass that a position is in, and the position in it; a stream repeats by itself."""
        length = self._samples.length
        return (0, position) if length is None else divmod(position, length)
