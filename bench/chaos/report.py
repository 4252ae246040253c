"""What came of the faults."""

from __future__ import annotations

from collections import Counter
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
    hits: Counter[str] = field(default_factory=Counter)  # faults that came to pass, by phase
    on_hosts: bool = False  # several
    num_steps: int = 0
    lost: int = 0  # samples
    repeated: int = 0
    differs: str = ""
    hang: str = ""
    crash: str = ""
    failure: str = ""  # of the driver
    idle_s: float = 0.0  # longest time between two steps
    idle_after: str = ""  # the faults in it, and the one before
    happened: list[tuple[float, Fault]] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """How many came to pass."""
        return self.hits.total()

    @property
    def problem(self) -> str:
        """What went wrong, in one line; empty if nothing did."""
        samples = f"{self.lost} samples lost, {self.repeated} repeated"
        found = [
            *(self.hang, self.crash, self.differs, self.failure),
            samples if self.lost + self.repeated else "",
        ]
        return "; ".join(part for part in found if part)


def phases(outcomes: Sequence[Outcome]) -> str:
    """What the run was doing when a fault came, and how often."""
    hits = sum((o.hits for o in outcomes), Counter[str]())
    return "during: " + ", ".join(f"{phase} {num}" for phase, num in hits.most_common())


def summary(outcomes: Sequence[Outcome]) -> str:
    """The final line."""
    failed = sum(bool(o.failure) for o in outcomes)
    return (
        f"{sum(o.num_faults for o in outcomes)} faults in {len(outcomes)} runs: "
        f"{sum(o.lost for o in outcomes)} samples lost, "
        f"{sum(o.repeated for o in outcomes)} repeated, "
        f"{sum(bool(o.differs) for o in outcomes)} runs that differ, "
        f"{sum(bool(o.hang) for o in outcomes)} hangs, "
        f"{sum(bool(o.crash) for o in outcomes)} crashes, "
        + (f"{failed} failures of the driver, " if failed else "")
        + _worst_idle(outcomes)
    )


def _worst_idle(outcomes: Sequence[Outcome]) -> str:
    """By number of hosts: a takeover waits for a lease if workers of other hosts were killed."""
    worst = []
    for on_hosts, where in ((False, "one host"), (True, "several")):
        found = [o for o in outcomes if o.on_hosts is on_hosts]
        if found:
            most = max(found, key=lambda o: o.idle_s)
            worst.append(f"{most.idle_s:.1f} s on {where} ({most.idle_after or 'no fault'})")
    return "worst idle " + ", ".join(worst)


def save_faults(path: Path, faults: Sequence[Fault]) -> None:
    """One fault a line, for `--replay`."""
    path.write_bytes(b"".join(msgspec.json.encode(fault) + b"\n" for fault in faults))


def load_faults(path: Path) -> list[Fault]:
    """What `save_faults` wrote."""
    return [msgspec.json.decode(line, type=Fault) for line in path.read_bytes().splitlines()]
