"""Where this process is: alone, or a rank under torchrun, read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in a fixed roster."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = True  # rank 0, unless the launcher already runs the store


def find(environment: Mapping[str, str]) -> Place:
    """The place that torchrun's variables tell of; without them, alone."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Place()
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise ConfigError("RANK", f"must be below WORLD_SIZE, {world}: got {rank}", "environment")
    if "MASTER_ADDR" not in environment:
        raise ConfigError("MASTER_ADDR", "is missing; torchrun sets it", "environment")
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    return Place(
        rank=rank,
        world=world,
        local_rank=_number(environment, "LOCAL_RANK", str(rank)),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        hosts_store=rank == 0 and not shared,
    )


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None:
        raise ConfigError(name, "is missing; torchrun sets it", "environment")
    if not text.isdecimal():
        raise ConfigError(name, f'expected a number, got "{text}"', "environment")
    return int(text)
