"""Where a run is, by its folder or its coordinator's address, and where this machine is to it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import click

from evenstep.coordinate.ask import ask, ask_from
from evenstep.coordinate.dial import EVERYWHERE, is_here, way_out
from evenstep.coordinate.run import TLS_CA, read_addresses
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
        where = _from_here(folder)
        token_file = token_file or folder / "token"
        if (folder / TLS_CA).exists():
            environment.setdefault("EVENSTEP_TLS_CA", str((folder / TLS_CA).absolute()))
    if token_file is not None:
        environment.pop("EVENSTEP_TOKEN", None)
        environment["EVENSTEP_TOKEN_FILE"] = str(token_file.absolute())
    found = find({**environment, "EVENSTEP_COORDINATOR": where})
    assert isinstance(found, Coordinator)
    return found


def _from_here(folder: Path) -> str:
    """The address of a folder's run, as this host is to dial it."""
    where, elsewhere = read_addresses(folder)
    if not where:
        raise ConfigError(str(folder), "tells of no coordinator: no run has been started in it")
    if not elsewhere:
        return where
    host, _, port = elsewhere.rpartition(":")
    host = host.strip("[]")
    try:
        return where if host == socket.gethostname() or is_here(host) else elsewhere
    except OSError:
        raise ConfigError(
            str(folder),
            f"its coordinator is on the host {host}, a name that is not known here. Give "
            f"HOST:PORT instead of the folder, with an address of that host and port {port}",
        ) from None


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
    return way_out(host)
