"""A run that is over, in a few lines."""

from __future__ import annotations

from evenstep.observe.block import duration, number
from evenstep.observe.tally import Totals


def summary(totals: Totals) -> list[str]:
    """What was reached, beside the limit and equal shares, and what it cost."""
    return [f"{name:<14}{text}" for name, text in figures(totals)]


def figures(totals: Totals) -> list[tuple[str, str]]:
    """The same as names and texts."""
    if not totals.num_steps:
        return []
    t = totals
    lines = [
        ("trained", f"{t.num_steps:,} steps, {t.samples:,} samples in {duration(t.elapsed_s)}"),
        ("throughput", f"{number(t.samples_per_s)} samples/s in steps"),
    ]
    if t.part_of_limit:
        lines += [
            ("of the limit", f"{t.part_of_limit:.0%}, by the step-time curves of the workers"),
            ("speed-up", f"{t.speedup:.2f}x over equal shares"),
            ("waiting", _waiting(t)),
        ]
    lines.append(("roster", _roster(t)))
    lines.append(("cost" if t.is_priced else "worker-hours", f"{t.cost:.4g}"))
    return lines


def _waiting(t: Totals) -> str:
    return (
        f"{t.wait_fraction:.0%} of the workers' time in steps; "
        f"with equal shares {t.equal_wait_fraction:.0%}"
    )


def _roster(t: Totals) -> str:
    if not t.num_changes:
        return "no changes"
    changes = "1 change" if t.num_changes == 1 else f"{t.num_changes} changes"
    lost = "1 worker" if t.num_lost == 1 else f"{t.num_lost} workers"
    idle = f"idle {t.idle_s:.2f} s in all, {t.longest_idle_s:.2f} s at most"
    return f"{changes}, {lost} lost; {idle}"
