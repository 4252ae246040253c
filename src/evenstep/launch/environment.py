"""How this process was started, by its environment: alone, as a rank, or by a coordinator."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.errors import ConfigError
from evenstep.identity import Credentials, check_worker_name, parse_credentials
from evenstep.launch.ranks import StaticRank, find_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddress:
    """Address and credentials of the coordinator of an elastic run."""

    host: str
    port: int
    token: str = field(repr=False)
    fingerprint: str = ""  # of its certificate; empty: it does not speak TLS
    worker: str = ""  # the name from the launcher
    address: str = "127.0.0.1"  # where other workers reach this one
    folder: Path | None = None  # of the run, where a later coordinator writes its address
    wait_s: float | None = None  # for a coordinator that does not answer; None: two minutes
    notice: str = ""  # what tells that this machine will be taken away

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def read_environment(environment: Mapping[str, str]) -> StaticRank | CoordinatorAddress:
    """Read evenstep's or a launcher's variables; without them the process is alone."""
    if "EVENSTEP_COORDINATOR" in environment:
        return _read_coordinator(environment)
    return find_rank(environment)


def torchrun_variables(world: int) -> dict[str, str]:
    """What torchrun would set for all ranks of a run on this machine; each has its RANK besides."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _read_coordinator(environment: Mapping[str, str]) -> CoordinatorAddress:
    text = environment["EVENSTEP_COORDINATOR"]
    parts = host_and_port(text)
    if parts is None:
        raise ConfigError(
            "EVENSTEP_COORDINATOR", f'expected host:port, got "{text}"', "environment"
        )
    host, port = parts
    token, fingerprint = find_credentials(environment)
    worker = environment.get("EVENSTEP_WORKER", "")
    return CoordinatorAddress(
        host=host,
        port=port,
        token=token,
        fingerprint=fingerprint,
        worker=worker and check_worker_name(worker, "EVENSTEP_WORKER", "environment"),
        address=environment.get("EVENSTEP_ADDRESS", "127.0.0.1"),
        folder=_run_folder(environment),
        wait_s=_wait_s(environment),
        notice=environment.get("EVENSTEP_NOTICE", ""),
    )


def _run_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder of the file `token`; None if that may be a copy."""
    path = Path(environment.get("EVENSTEP_TOKEN_FILE", ""))
    named = "EVENSTEP_TOKEN" not in environment and path.name == "token"
    return path.parent if named else None


def host_and_port(text: str) -> tuple[str, int] | None:
    """Split HOST:PORT; None if the text has another form."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        return None
    return host.strip("[]"), int(port)


def find_credentials(environment: Mapping[str, str]) -> Credentials:
    """The run's, from EVENSTEP_TOKEN or the file that EVENSTEP_TOKEN_FILE names."""
    if "EVENSTEP_TOKEN" in environment:
        return parse_credentials(environment["EVENSTEP_TOKEN"], "EVENSTEP_TOKEN", "environment")
    path = environment.get("EVENSTEP_TOKEN_FILE", "")
    if not path:
        raise ConfigError(
            "EVENSTEP_TOKEN_FILE", "is missing; set it to the file `token` in the run's folder"
        )
    return read_credentials(Path(path), "EVENSTEP_TOKEN_FILE")


def read_credentials(path: Path, source: str = "") -> Credentials:
    """The content of a token file; `source` is the variable that names the file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise ConfigError(str(path), f"cannot be read: {e.strerror}", source) from None
    return parse_credentials(text, str(path), source)


def _wait_s(environment: Mapping[str, str]) -> float | None:
    text = environment.get("EVENSTEP_WAIT", "")
    try:
        return float(text) if text else None
    except ValueError:
        problem = f'expected a number of seconds, got "{text}"'
        raise ConfigError("EVENSTEP_WAIT", problem, "environment") from None
