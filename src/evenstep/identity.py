"""What everybody must agree on: a run's credentials and id, and what a worker may be called."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from evenstep.errors import ConfigError

TOKEN_BYTES = 32
"""Of a new token: 256 random bits."""

MIN_DIGITS = 4
"""Different ones in a token: random tokens have more, by all odds; 32 zeros have not."""

WORKER_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
"""Worker names are file names in the run folder and words in commands."""

FINGERPRINT = "sha256:"
"""Begins the fingerprint of a certificate; 64 hex digits follow."""

# A token of 128 bits or more; then, if the coordinator speaks TLS, its certificate.
_CREDENTIALS = re.compile(rf"([0-9A-Fa-f]{{32,}})(?:\s+({FINGERPRINT}[0-9a-f]{{64}}))?")
_NAME = re.compile(WORKER_NAME)


class Credentials(NamedTuple):
    """What a run's file `token` holds, a line each; EVENSTEP_TOKEN may hold the same."""

    token: str
    fingerprint: str = ""  # of the coordinator's certificate; empty: it does not speak TLS


def parse_credentials(text: str, field: str, source: str = "") -> Credentials:
    """The content of a token file; a ConfigError unless its token has 128 bits."""
    found = _CREDENTIALS.fullmatch(text.strip())
    if found is None:
        is_file = source != "environment"
        raise ConfigError(
            field,
            "holds no token: expected 32 hex digits or more, and with TLS a second line of "
            f"`{FINGERPRINT}` and 64 hex digits, got {len(text.strip())} characters. "
            + ("Was the disk full when it was written? " if is_file else "")
            + "Copy the file `token` from where the run still has it, or begin a new run",
            source,
        )
    if (num := len(set(found[1].lower()))) < MIN_DIGITS:
        raise ConfigError(
            field,
            f"holds a token that can be guessed: it has {num} different digits of 16. Make one by "
            "`openssl rand -hex 32`, or let `evenstep run` make it",
            source,
        )
    return Credentials(*found.groups(default=""))


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
