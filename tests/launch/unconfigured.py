"""Unconfigured logging, as a script finds it, although pytest adds its own handlers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unconfigured() -> Iterator[None]:
    """Remove all handlers; restore the configuration on exit."""
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
