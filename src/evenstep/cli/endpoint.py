"""Finds a run's coordinator, and the address at which other hosts reach this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from evenstep.coordinate.addresses import EVERYWHERE, outward_address
from evenstep.coordinate.client import UnreachableError, ask_from
from evenstep.coordinate.run_folder import address_from_here, read_addresses
from evenstep.errors import ConfigError
from evenstep.identity import Credentials
from evenstep.launch.environment import (
    CoordinatorAddress,
    find_credentials,
    host_and_port,
    read_credentials,
)
from evenstep.messages import Ask

token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="The run's file `token`, or a copy.  [default: EVENSTEP_TOKEN_FILE or EVENSTEP_TOKEN]",
)


def find_coordinator(run: str, token_file: Path | None = None) -> CoordinatorAddress:
    """The coordinator of a run, given as the run's folder or as HOST:PORT."""
    folder, address = Path(run), run
    is_folder = folder.is_dir()
    if is_folder:
        address = _address_in(folder)
        token_file = token_file or folder / "token"
    parts = host_and_port(address)
    if parts is None:
        raise ConfigError(run, "is neither a run folder nor HOST:PORT")
    host, port = parts
    token, fingerprint = _credentials(token_file)
    return CoordinatorAddress(
        host=host,
        port=port,
        token=token,
        fingerprint=fingerprint,
        folder=folder.absolute() if is_folder else None,
    )


def _credentials(file: Path | None) -> Credentials:
    if file is not None:
        return read_credentials(file)
    if "EVENSTEP_TOKEN" not in os.environ and not os.environ.get("EVENSTEP_TOKEN_FILE"):
        raise ConfigError(
            "--token-file",
            "is missing: give a copy of the file `token` in the run's folder, or name it in "
            "EVENSTEP_TOKEN_FILE",
        )
    return find_credentials(os.environ)


def _address_in(folder: Path) -> str:
    """The coordinator's address in a run's folder, as seen from this host."""
    try:
        address = address_from_here(folder)
    except OSError:
        host, _, port = read_addresses(folder)[1].rpartition(":")
        raise ConfigError(
            str(folder),
            f"the coordinator is on host {host}, a name that this machine cannot resolve. Give "
            f"HOST:PORT instead of the folder, with an address of that host and port {port}",
        ) from None
    if not address:
        raise UnreachableError(f"{folder} has no coordinator: no run has been started in it.")
    return address


def ask_status(coordinator: CoordinatorAddress) -> tuple[dict[str, Any], str]:
    """The run's status, and where other hosts reach this one: empty if both are on loopback."""
    c, request = coordinator, Ask(proof="", what="status")
    told, local = ask_from(c.host, c.port, c.token, request, c.fingerprint)
    return told, advertised_address(c.host, local)


def advertised_address(host: str, local: str) -> str:
    """What workers tell each other: `local`, or the outbound address if `host` is a wildcard.

    Empty if `local` is loopback.
    """
    if host not in EVERYWHERE:
        return "" if local in ("127.0.0.1", "::1", "localhost") else local
    return outward_address(host)
