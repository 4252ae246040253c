"""What came of the faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.chaos.faults import Fault


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One run, after its faults."""

    folder: Path
    faults: Sequence[Fault]  # as planned
    num_faults: int = 0  # that came to pass
    num_steps: int = 0
    lost: int = 0  # samples
    repeated: int = 0
    differs: str = ""
    hang: str = ""
    crash: str = ""
    idle_s: float = 0.0  # longest time between two steps
    idle_after: str = ""  # the fault before it
    happened: list[tuple[float, Fault]] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """What went wrong, in one line; empty if nothing did."""
        samples = f"{self.lost} samples lost, {self.repeated} repeated"
        found = [self.hang, self.crash, self.differs, samples if self.lost + self.repeated else ""]
        return "; ".join(part for part in found if part)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The final line."""
    worst = max(outcomes, key=lambda o: o.idle_s)
    return (
        f"{sum(o.num_faults for o in outcomes)} faults in {len(outcomes)} runs: "
        f"{sum(o.lost for o in outcomes)} samples lost, "
        f"{sum(o.repeated for o in outcomes)} repeated, "
        f"{sum(bool(o.differs) for o in outcomes)} runs that differ, "
        f"{sum(bool(o.hang) for o in outcomes)} hangs, "
        f"{sum(bool(o.crash) for o in outcomes)} crashes, "
        f"worst idle {worst.idle_s:.1f} s ({worst.idle_after or 'no fault'})"
    )


def save_faults(path: Path, faults: Sequence[Fault]) -> None:
    """One fault a line, for `--replay`."""
    path.write_bytes(b"".join(msgspec.json.encode(fault) + b"\n" for fault in faults))


def load_faults(path: Path) -> list[Fault]:
    """What `save_faults` wrote."""
    return [msgspec.json.decode(line, type=Fault) for line in path.read_bytes().splitlines()]
