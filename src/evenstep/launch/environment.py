"""Where this process is: alone, under torchrun, or under a coordinator, by the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRank:
    """A process's place in a fixed roster."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = True  # rank 0, unless the launcher already runs the store


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddress:
    """Where the coordinator of an elastic run is, and what proves that one belongs to it."""

    host: str
    port: int
    token: str = field(repr=False)
    worker: str = ""  # the name that the launcher gave this worker
    address: str = "127.0.0.1"  # at which other workers reach this one
    tls_ca: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find(environment: Mapping[str, str]) -> StaticRank | CoordinatorAddress:
    """The place that evenstep's or torchrun's variables tell of; without them, alone."""
    if "EVENSTEP_COORDINATOR" in environment:
        return _coordinator(environment)
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return StaticRank()
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise ConfigError("RANK", f"must be below WORLD_SIZE, {world}: got {rank}", "environment")
    if "MASTER_ADDR" not in environment:
        raise ConfigError("MASTER_ADDR", "is missing; torchrun sets it", "environment")
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    return StaticRank(
        rank=rank,
        world=world,
        local_rank=_number(environment, "LOCAL_RANK", str(rank)),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        hosts_store=rank == 0 and not shared,
    )


def _coordinator(environment: Mapping[str, str]) -> CoordinatorAddress:
    told = environment["EVENSTEP_COORDINATOR"]
    found = host_and_port(told)
    if found is None:
        raise ConfigError(
            "EVENSTEP_COORDINATOR", f'expected host:port, got "{told}"', "environment"
        )
    host, port = found
    return CoordinatorAddress(
        host=host,
        port=port,
        token=find_token(environment),
        worker=environment.get("EVENSTEP_WORKER", ""),
        address=environment.get("EVENSTEP_ADDRESS", "127.0.0.1"),
        tls_ca=environment.get("EVENSTEP_TLS_CA", ""),
    )


def host_and_port(text: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT; None if the text is something else."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        return None
    return host.strip("[]"), int(port)


def find_token(environment: Mapping[str, str]) -> str:
    """The run's token: from a file, or from the environment itself."""
    if "EVENSTEP_TOKEN" in environment:
        return environment["EVENSTEP_TOKEN"]
    path = environment.get("EVENSTEP_TOKEN_FILE", "")
    if not path:
        raise ConfigError(
            "EVENSTEP_TOKEN_FILE", "is missing; it is the file token in the run's folder"
        )
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as e:
        raise ConfigError("EVENSTEP_TOKEN_FILE", f"{path} cannot be read: {e.strerror}") from None


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None:
        raise ConfigError(name, "is missing; torchrun sets it", "environment")
    if not text.isdecimal():
        raise ConfigError(name, f'expected a number, got "{text}"', "environment")
    return int(text)
