"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

from evenstep.errors import ConfigError

token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the run's token.  [default: EVENSTEP_TOKEN_FILE or EVENSTEP_TOKEN]",
)


def require_name(flag: str, text: str) -> str:
    """`text`, unless it is blank."""
    if not text.strip():
        raise ConfigError(flag, "is empty; give a name, or leave the option out")
    return text
