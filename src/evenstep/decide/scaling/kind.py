"""Which kind of worker to add and which workers to drop, if kinds differ in speed and price."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenstep.types import Worker, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The mean throughput and price of one worker of a kind."""

    name: str
    samples_per_s: float
    price_per_hour: float

    @property
    def samples_per_price(self) -> float:
        """Samples per unit of money; infinite for a free worker with any throughput."""
        if self.price_per_hour > 0:
            return self.samples_per_s * 3600 / self.price_per_hour
        return float("inf") if self.samples_per_s > 0 else 0.0


def kinds_of(roster: Iterable[Worker], samples_per_s: Mapping[WorkerId, float]) -> dict[str, Kind]:
    """The kinds in a roster: mean speed and price over the workers whose speed is known."""
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
    """The kind with the most samples per price, and why; "" (any) while no kind is known.

    Ties go to the faster kind, then by name.
    """
    ranked = sorted(kinds, key=lambda k: (-k.samples_per_price, -k.samples_per_s, k.name))
    if not ranked:
        return "", "no kind measured yet: any kind"
    return ranked[0].name, f"{_value(ranked[0])}: the best of {len(ranked)} kinds"


def workers_to_drop(
    roster: Sequence[Worker], kinds: Mapping[str, Kind], num_workers: int
) -> tuple[tuple[WorkerId, ...], str]:
    """The `num_workers` to drop from a roster in rank order, first to leave first, and why.

    The kind with the fewest samples per price leaves first, and within a kind the last in rank:
    with one kind, the tail of the roster. The leader never leaves. Kinds never measured come last.
    """
    unknown = Kind(name="", samples_per_s=1.0, price_per_hour=0.0)
    ranked = sorted(
        enumerate(roster[1:]),
        key=lambda row: (kinds.get(row[1].kind, unknown).samples_per_price, -row[0]),
    )
    dropped = [worker for _, worker in ranked[:num_workers]]
    measured = sorted({w.kind for w in dropped} & kinds.keys())
    why = "; ".join(_value(kinds[name]) for name in measured)
    return tuple(w.id for w in dropped), why or "last in rank"


def _value(kind: Kind) -> str:
    if kind.price_per_hour == 0:
        return f"{kind.name} is free"
    return f"{kind.name} trains {kind.samples_per_price:.4g} samples per unit of price"
