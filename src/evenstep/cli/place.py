"""Where a run is, by its folder or its coordinator's address, and where this machine is to it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from evenstep.coordinate.ask import EVERYWHERE, ask, ask_from
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
            environment.setdefault("EVENSTEP_TLS_CA", str((folder / TLS_CA).absolute()))
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


def own_address(there: Coordinator) -> str:
    """Where the other workers of a run reach one of this machine; empty for its own loopback.

    Asks the coordinator, so that a wrong token is told by who finds it first.
    """
    asked = Ask(proof="", what="status")
    _, mine = ask_from(there.host, there.port, there.token, asked, there.tls_ca)
    return outward(there.host, mine)


def outward(host: str, mine: str) -> str:
    """`mine`, unless it is loopback, or unless the coordinator's `host` means all addresses."""
    if host not in EVERYWHERE:
        return "" if mine in ("127.0.0.1", "::1", "localhost") else mine
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("2001:db8::1" if ":" in host else "192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""
