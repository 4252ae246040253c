"""Logging as a script finds it, although pytest has handlers of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unconfigured() -> Iterator[None]:
    """No handlers anywhere; nothing that is configured within is left behind."""
    loggers = (logging.root, logging.getLogger("evenstep"))
    before = [(logger, logger.handlers, logger.filters, logger.level) for logger in loggers]
    for logger, level in zip(loggers, (logging.WARNING, logging.NOTSET), strict=True):
        logger.handlers, logger.filters = [], []
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, handlers, filters, level in before:
            logger.handlers, logger.filters = handlers, filters
            logger.setLevel(level)
