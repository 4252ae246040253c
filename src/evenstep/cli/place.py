"""Where a run is: its folder, or the address of its coordinator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from evenstep.coordinate.ask import ask
from evenstep.coordinate.run import TLS_CA, read_address
from evenstep.errors import ConfigError
from evenstep.launch.environment import Coordinator, find
from evenstep.messages import Ask

token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="The run's token; else EVENSTEP_TOKEN_FILE or EVENSTEP_TOKEN.",
)


def locate(where: str, token_file: Path | None = None) -> Coordinator:
    """The coordinator that is meant, and the token that opens it. The token comes from a file."""
    environment = dict(os.environ)
    folder = Path(where)
    if folder.is_dir():
        where = read_address(folder)
        if not where:
            raise ConfigError(str(folder), "tells of no coordinator: no run has been started in it")
        token_file = token_file or folder / "token"
        if (folder / TLS_CA).exists():
            environment.setdefault("EVENSTEP_TLS_CA", str(folder / TLS_CA))
    if token_file is not None:
        environment.pop("EVENSTEP_TOKEN", None)
        environment["EVENSTEP_TOKEN_FILE"] = str(token_file.absolute())
    found = find({**environment, "EVENSTEP_COORDINATOR": where})
    assert isinstance(found, Coordinator)
    return found


def question(there: Coordinator, what: str, *, num_workers: int = 0, worker: str = "") -> Any:
    """What the coordinator tells when it is asked."""
    asked = Ask(proof="", what=what, num_workers=num_workers, worker=worker)
    return ask(there.host, there.port, there.token, asked, there.tls_ca)
