"""Even steps on uneven machines: data-parallel training on clusters that are not alike.

Importing does nothing but name things: torch and numpy are loaded by what needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.balancer import Balancer
    from evenstep.cli.from_python import run
    from evenstep.errors import EvenstepError
    from evenstep.train.data.batch_size import largest_share
    from evenstep.train.data.tar_shards import TarShards
    from evenstep.train.join import join
    from evenstep.train.session import Session
    from evenstep.types import Worker

__version__ = "0.1.0.dev0"

_HOME = {
    "Balancer": "evenstep.balancer",
    "EvenstepError": "evenstep.errors",
    "Session": "evenstep.train.session",
    "TarShards": "evenstep.train.data.tar_shards",
    "Worker": "evenstep.types",
    "join": "evenstep.train.join",
    "largest_share": "evenstep.train.data.batch_size",
    "run": "evenstep.cli.from_python",
}

__all__ = [
    "Balancer",
    "EvenstepError",
    "Session",
    "TarShards",
    "Worker",
    "join",
    "largest_share",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
