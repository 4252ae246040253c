"""The base class of all errors, and the errors shared by several rooms.

    EvenstepError
    +-- ConfigError         a setting is unknown, of the wrong type, or contradicts another
    |   +-- UnknownSettingError
    +-- InvalidInputError   an input value is impossible: a negative time, a NaN, a duplicate
    +-- BatchBoundsError    the workers' bounds cannot hold the batch
    +-- PausedError         the current workers cannot train
    +-- PlanError           a policy planned shares that break the batch or a worker's bounds
    +-- JournalError        a journal cannot be read or written, with the line number
    |   +-- JournalFormatError

An error of a single room is defined there. Each also inherits the built-in that people catch.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class EvenstepError(Exception):
    """The base class of all errors of evenstep."""


class ConfigError(EvenstepError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another.

    `field` is the dotted path of the setting, `source` the file or flag it came from.
    """

    def __init__(self, field: str, problem: str, source: str = "") -> None:
        super().__init__(field, problem, source)
        self.field, self.problem, self.source = field, problem, source

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.field}: {self.problem}{where}" if self.field else f"{self.problem}{where}"

    def within(self, key: str, source: str = "") -> ConfigError:
        """The same error with `key` prepended to its path."""
        field = f"{key}.{self.field}" if key and self.field else key or self.field
        return type(self)(field, self.problem, self.source or source)


class UnknownSettingError(ConfigError):
    """A setting that does not exist; `problem` names the nearest one that does."""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"unknown setting {self.field}; did you mean {self.problem}?{where}"


class InvalidInputError(EvenstepError, ValueError):
    """An input value is impossible."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class BatchBoundsError(EvenstepError, ValueError):
    """The workers' bounds cannot hold the batch."""

    def __init__(self, batch: int, least: int, most: int, num_workers: int) -> None:
        super().__init__(batch, least, most, num_workers)
        self.batch, self.least, self.most, self.num_workers = batch, least, most, num_workers

    def __str__(self) -> str:
        if self.num_workers == 0:
            return f"there is no worker for a batch of {self.batch}. Add a worker."
        if self.batch > self.most:
            return (
                f"a batch of {self.batch} does not fit {self.num_workers} workers that hold "
                f"{self.most} in total. Lower the batch, raise the caps, or add workers."
            )
        return (
            f"a batch of {self.batch} cannot give {self.num_workers} workers their minimum, "
            f"{self.least} in total. Raise the batch, lower min_share, or use fewer workers."
        )


class PausedError(EvenstepError, RuntimeError):
    """The current workers cannot train: too few, or too small for the batch."""


class PlanError(EvenstepError, ValueError):
    """A policy planned shares that break the batch or a worker's bounds."""

    def __init__(self, policy: str, problem: str) -> None:
        super().__init__(policy, problem)
        self.policy, self.problem = policy, problem

    def __str__(self) -> str:
        return (
            f"policy {self.policy} {self.problem}. A policy must keep each share between "
            "fleet.lower and fleet.upper, and their sum equal to the batch."
        )


class JournalError(EvenstepError, ValueError):
    """A journal cannot be read or written. `line` counts from 1; 0 is the file as a whole."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(path, line, problem)
        self.path, self.line, self.problem = path, line, problem

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else self.path
        return f"{where}: {self.problem}"


class JournalFormatError(JournalError):
    """A journal of another version: not damage."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar known name, empty if none is similar.

    A common prefix takes precedence: `automatic` suggests `auto`, not `static`.
    """
    names = list(known)
    prefixed = [k for k in names if min(len(k), len(name)) > 2 and k.startswith(name[: len(k)])]
    near = get_close_matches(name, prefixed, n=1, cutoff=0.0) or get_close_matches(name, names, n=1)
    return near[0] if near else ""
