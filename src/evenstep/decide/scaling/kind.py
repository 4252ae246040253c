"""Which kind of worker to add and whom to drop, where kinds differ in speed and price."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenstep.types import Worker, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one worker of a kind brings to the cluster, and what it costs."""

    name: str
    samples_per_s: float
    price_per_hour: float

    @property
    def samples_per_price(self) -> float:
        """Samples for one unit of money. What is free and does something has no bound."""
        if self.price_per_hour > 0:
            return self.samples_per_s * 3600 / self.price_per_hour
        return float("inf") if self.samples_per_s > 0 else 0.0


def kinds_of(roster: Iterable[Worker], samples_per_s: Mapping[WorkerId, float]) -> dict[str, Kind]:
    """The kinds in a roster: mean contribution and mean price of those whose speed is known."""
    members: dict[str, list[Worker]] = {}
    for worker in roster:
        if worker.id in samples_per_s:
            members.setdefault(worker.kind, []).append(worker)
    return {
        name: Kind(
            name=name,
            samples_per_s=sum(samples_per_s[w.id] for w in workers) / len(workers),
            price_per_hour=sum(w.price_per_hour for w in workers) / len(workers),
        )
        for name, workers in sorted(members.items())
    }


def kind_to_add(kinds: Iterable[Kind]) -> tuple[str, str]:
    """The kind that brings most for its price, and why; "" (any) while no kind is known.

    Ties go to the faster kind, then by name.
    """
    ranked = sorted(kinds, key=lambda k: (-k.samples_per_price, -k.samples_per_s, k.name))
    if not ranked:
        return "", "no kind measured yet: any will do"
    return ranked[0].name, f"{_value(ranked[0])}: the best of {len(ranked)}"


def whom_to_drop(
    roster: Sequence[Worker], kinds: Mapping[str, Kind], num_workers: int
) -> tuple[tuple[WorkerId, ...], str]:
    """The `num_workers` to drop from a roster in rank order, first to go first, and why.

    The kind that brings least for its price goes first, and of equal ones the last in rank, so
    that with one kind it is the tail of the roster that leaves. The leader never goes. A kind that
    was never measured is the last to be judged.
    """
    unknown = Kind(name="", samples_per_s=1.0, price_per_hour=0.0)
    ranked = sorted(
        enumerate(roster[1:]),
        key=lambda row: (kinds.get(row[1].kind, unknown).samples_per_price, -row[0]),
    )
    dropped = [worker for _, worker in ranked[:num_workers]]
    told = sorted({w.kind for w in dropped} & kinds.keys())
    why = "; ".join(_value(kinds[name]) for name in told)
    return tuple(w.id for w in dropped), why or "the last in rank"


def _value(kind: Kind) -> str:
    if kind.price_per_hour == 0:
        return f"{kind.name} is free"
    return f"{kind.name} gives {kind.samples_per_price:.4g} samples for its price"
