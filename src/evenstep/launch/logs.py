"""evenstep's own log on stderr, with the time of day."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from evenstep.launch.console import ERASE

log = logging.getLogger("evenstep")

LINE, TIME = "%(asctime)s evenstep: %(message)s", "%H:%M:%S"
_EVERYTHING = 1  # no script would choose this level: it marks a level set here


def show_log() -> None:
    """Print the log of `evenstep run`."""
    logging.basicConfig(level=logging.INFO, handlers=[_formatted(logging.StreamHandler())])


@contextmanager
def log_through(say: Callable[[str], bool]) -> Iterator[None]:
    """Meanwhile, hand the lines of the log of `evenstep run` to a console that draws in place."""
    before, through = logging.root.handlers[:], _Through(say)
    through.setFormatter(logging.Formatter(LINE, TIME))
    logging.root.handlers[:] = [through]
    try:
        yield
    finally:
        logging.root.handlers[:] = before


class _Through(logging.Handler):
    def __init__(self, say: Callable[[str], bool]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if not self._say(line):
            with suppress(OSError):
                sys.stderr.write(f"{line}\n")


def show_log_by_default() -> None:
    """Print a worker's log unless its script configures logging itself, before or after this.

    The script's configuration then applies as if this had never been called.
    """
    if any(isinstance(handler, _Default) for handler in log.handlers):
        return
    log.addHandler(_formatted(_Default()))
    if log.level == logging.NOTSET:
        log.setLevel(_EVERYTHING)
        log.addFilter(_is_wanted)


class _Default(logging.StreamHandler[TextIO]):
    def filter(self, record: logging.LogRecord) -> bool:
        return not _is_configured()


def _is_configured() -> bool:
    own = any(not isinstance(handler, _Default) for handler in log.handlers)
    return own or bool(logging.root.handlers) or not log.propagate


def _is_wanted(record: logging.LogRecord) -> bool:
    if log.level != _EVERYTHING:
        return True  # the script has set a level, which the record has passed
    return record.levelno >= (logging.root.level if _is_configured() else logging.INFO)


def _formatted(handler: logging.StreamHandler[TextIO]) -> logging.StreamHandler[TextIO]:
    over_a_bar = ERASE if sys.stderr.isatty() else ""
    handler.setFormatter(logging.Formatter(f"{over_a_bar}{LINE}", TIME))
    return handler
