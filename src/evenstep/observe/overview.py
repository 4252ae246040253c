"""A run at a glance, as plain data: what `evenstep status --json` has of it, and `top` draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from evenstep.config import Settings
from evenstep.observe.tally import Tally, Totals, kind_of


def overview(
    tally: Tally, settings: Settings | None, facts: Mapping[str, Any], samples_per_s: float
) -> dict[str, Any]:
    """Progress, the newest estimate and decisions, and totals. `facts`: reported by the loader."""
    totals, now = tally.totals, tally.estimate
    return {
        "progress": _progress(
            tally.position,
            settings.samples if settings is not None else 0,
            int(facts.get("length", 0)),
            samples_per_s * _training_fraction(totals),
        ),
        "part_of_limit": now.part_of_limit if now else 0.0,
        "speedup": now.speedup if now else 0.0,
        "decisions": [
            {"at_s": at_s, "kind": kind_of(action), "reason": action.reason}
            for at_s, action in tally.decisions
        ],
        "totals": asdict(totals),
    }


def _progress(position: int, total: int, epoch: int, samples_per_s: float) -> dict[str, Any]:
    """How far the job is; zeros where that is unknown, as in a stream."""
    left = max(0, total - position)
    return {
        "samples": position,
        "total_samples": total,
        "epoch": position // epoch if epoch else 0,
        "num_epochs": total // epoch if epoch else 0,
        "seconds_left": left / samples_per_s if total and samples_per_s else 0.0,
    }


def _training_fraction(totals: Totals) -> float:
    """Of the time so far that was spent in steps: evaluation and the like go on as before."""
    return min(1.0, totals.trained_s / totals.elapsed_s) if totals.elapsed_s else 1.0
