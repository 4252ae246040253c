"""Where a run is, by its folder or its coordinator's address, and where this machine is to it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import click

from evenstep.coordinate.addresses import EVERYWHERE, is_here, outward_address
from evenstep.coordinate.ask import ask, ask_from
from evenstep.coordinate.run_folder import TLS_CA, read_addresses, read_token
from evenstep.errors import ConfigError
from evenstep.launch.environment import CoordinatorAddress, find_token, host_and_port
from evenstep.messages import Ask

token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="The run's token; else EVENSTEP_TOKEN_FILE or EVENSTEP_TOKEN.",
)


def locate(where: str, token_file: Path | None = None) -> CoordinatorAddress:
    """The coordinator of a run, by the run's folder or its HOST:PORT, and the run's token."""
    folder, address, tls_ca = Path(where), where, os.environ.get("EVENSTEP_TLS_CA", "")
    if folder.is_dir():
        address = _from_here(folder)
        token_file = token_file or folder / "token"
        if not tls_ca and (folder / TLS_CA).exists():
            tls_ca = str((folder / TLS_CA).absolute())
    found = host_and_port(address)
    if found is None:
        raise ConfigError(where, "is neither the folder of a run nor HOST:PORT")
    host, port = found
    return CoordinatorAddress(host=host, port=port, token=_token(token_file), tls_ca=tls_ca)


def _token(file: Path | None) -> str:
    if file is not None:
        return read_token(file)
    if "EVENSTEP_TOKEN" not in os.environ and not os.environ.get("EVENSTEP_TOKEN_FILE"):
        raise ConfigError(
            "--token-file",
            "is missing: give a copy of the file `token` in the run's folder, or name it in "
            "EVENSTEP_TOKEN_FILE",
        )
    return find_token(os.environ)


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


def question(
    there: CoordinatorAddress, what: str, *, num_workers: int = 0, worker: str = ""
) -> Any:
    """What the coordinator tells when it is asked."""
    asked = Ask(proof="", what=what, num_workers=num_workers, worker=worker)
    return ask(there.host, there.port, there.token, asked, there.tls_ca)


def own_address(there: CoordinatorAddress) -> str:
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
    return outward_address(host)
