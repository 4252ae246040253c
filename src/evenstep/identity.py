"""Names that everybody must agree on: a run's token and id, and what a worker may be called."""

from __future__ import annotations

import hashlib
import re

from evenstep.errors import ConfigError

TOKEN_BYTES = 32
"""Of a new token: 256 random bits."""

WORKER_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
"""Worker names are file names in the run folder and words in commands."""

_TOKEN = re.compile(r"[0-9A-Fa-f]{32,}")  # 128 bits or more
_NAME = re.compile(WORKER_NAME)


def check_token(text: str, field: str, source: str = "") -> str:
    """`text` without surrounding whitespace; a ConfigError unless it is a token of 128 bits."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            field,
            f"holds no token: expected 32 hex digits or more, got {len(token)} characters. Was "
            "the disk full when it was written? Copy the file `token` from where the run still "
            "has it, or begin a new run",
            source,
        )
    return token


def run_id(token: str) -> str:
    """A run's public id: it tells runs apart and does not reveal the token."""
    return hashlib.sha256(f"evenstep run {token}".encode()).hexdigest()[:16]


def check_worker_name(text: str, field: str, source: str = "") -> str:
    """`text` if a worker may have this name; else a ConfigError."""
    if not _NAME.fullmatch(text):
        raise ConfigError(
            field,
            f"{text[:80]!r} is not a worker's name: up to 64 letters, digits, `.`, `_` and `-`, "
            "and no `.` first",
            source,
        )
    return text
