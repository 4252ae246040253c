"""evenstep's own log on stderr, with the time of day."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from evenstep.launch.console import ERASE

log = logging.getLogger("evenstep")

_EVERYTHING = 1  # no script would choose this level: it marks a level set here


def show_log() -> None:
    """Print the log of `evenstep run`."""
    logging.basicConfig(level=logging.INFO, handlers=[_formatted(logging.StreamHandler())])


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
    line = f"{over_a_bar}%(asctime)s evenstep: %(message)s"
    handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    return handler
