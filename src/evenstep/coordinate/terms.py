"""The terms of a run, where its workers' stores listen, and how a run ended."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from evenstep.types import WorkerId

MAX_WORKERS = 1_000_000


class Store(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rendezvous store of one worker, used by the generations that it leads."""

    address: str
    port: int
    sees_folder: bool = False  # the run's: this worker can write checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the command line says about a run."""

    run: str = ""
    lease_s: float = 3600.0
    checkpoint_every_s: float = 60.0
    checkpoints_kept: int = 3
    sets: tuple[str, ...] = ()  # path=value, over the script's own settings
    min_workers: int = 1  # an operator may not scale below
    max_workers: int = MAX_WORKERS
    restarts: int = 3
    spares: int = 0  # drained workers that stay connected, ready to come back
    prices: tuple[tuple[str, float], ...] = ()  # per worker-hour, by kind; "" for all others
    silence_s: float = 5.0
    patience_s: float = 30.0
    gather_s: float = 60.0  # how long the first workers wait to begin together
    start_s: float = 600.0  # start-up deadline of a launched worker

    def price_of(self, kind: str) -> float:
        """Hourly price for this kind."""
        prices = dict(self.prices)
        return prices.get(kind, prices.get("", 1.0))

    @property
    def silent_s(self) -> float:
        """Seconds without a heartbeat after which a worker is silent."""
        return max(self.silence_s, 3 * min(1.0, self.lease_s / 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    ok: bool
    why: str
    told: str = ""  # the traceback or last output of the script that failed
    worker: WorkerId = ""  # on which it failed
