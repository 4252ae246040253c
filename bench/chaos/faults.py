"""Faults as data: what happens, when, and to whom. A seed gives a list of them.

Workers differ from one try to the next, so a fault names them by fractions: 0.5 is the one in the
middle of the roster. The same list of faults can be replayed, but not the same nanosecond.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

POINTS = ("forward", "backward", "bucket", "reduced", "stepped", "epoch", "checkpoint")
REGROUP_POINTS = ("rendezvous", "compare", "handover")  # reached when the roster changes
START_POINTS = ("start", "joined", "first")  # reached by a worker that joins
FILES = ("journal.jsonl", "membership.jsonl", "checkpoint")
MOMENTS = ("calm", "join", "checkpoint", "takeover", "epoch", "loss", "at once")
MOMENT_ODDS = (0.3, 0.1, 0.15, 0.1, 0.1, 0.1, 0.15)

# How often each kind is drawn, relative to the others.
ANYWHERE = {
    "kill a worker": 6.0,
    "kill the leader": 4.0,
    "kill several": 3.0,
    "kill at a point": 8.0,
    "kill the coordinator": 3.0,
    "kill everybody": 2.0,
    "stop a worker": 3.0,
    "kill while another is stopped": 2.0,
    "stop the coordinator": 2.0,
    "notice": 4.0,
    "damage a file": 3.0,
    "exit early": 1.0,
}
ONE_HOST = {"joiner fails": 3.0, "drain": 2.0, "scale": 3.0, "stop the run": 1.0}
SMALL_DISK = {"full disk": 2.0}
HOSTS = {"partition": 6.0, "one-way partition": 6.0, "joiner fails elsewhere": 2.0}

PICKED = ("who",)
USES: dict[str, tuple[str, ...]] = {
    "kill a worker": PICKED,
    "kill several": ("who", "num"),
    "kill at a point": ("who", "point"),
    "kill the coordinator": ("lasts_s",),
    "stop a worker": ("who", "lasts_s"),
    "kill while another is stopped": PICKED,
    "stop the coordinator": ("lasts_s",),
    "notice": PICKED,
    "damage a file": ("file", "torn", "where", "everybody"),
    "joiner fails": ("point",),
    "joiner fails elsewhere": ("point",),
    "drain": PICKED,
    "scale": ("num",),
    "stop the run": ("num",),
    "full disk": ("who", "lasts_s", "everybody"),
    "partition": ("who", "lasts_s"),
    "one-way partition": ("who", "where", "lasts_s"),
}

LONG_STOP_S = 14.0  # longer than a silent worker is waited for
LONG_STOP_ODDS, LONG_PARTITION_ODDS = 0.1, 0.3
AT_ONCE_ODDS = 0.5  # no delay: checkpoints and ends of epochs are over in milliseconds


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault; `USES` says which of these a kind needs."""

    kind: str
    moment: str = "calm"  # what goes on when it happens
    steps: int = 1  # to train before it
    delay_s: float = 0.0  # after the moment has come
    who: float = 0.0  # fraction of the roster
    num: int = 1  # workers
    lasts_s: float = 0.0
    point: str = ""  # failpoint
    file: str = ""
    torn: bool = False  # the end of the file is cut off; otherwise a bit is flipped
    where: float = 0.0  # fraction of the file
    everybody: bool = False  # with a damaged file: workers are killed too; full disk: one of them

    @property
    def title(self) -> str:
        """Its kind, and how long it lasts if that is long."""
        return f"{self.kind} for {self.lasts_s:g} s" if self.lasts_s > 1 else self.kind


def method_of(kind: str) -> str:
    """The name of the method that injects this kind of fault."""
    return "_" + kind.replace(" ", "_").replace("-", "_")


def draw_faults(
    rng: np.random.Generator, num: int, kinds: Collection[str], *, long_stops: bool
) -> list[Fault]:
    """Random faults of these kinds."""
    odds = {**ANYWHERE, **ONE_HOST, **SMALL_DISK, **HOSTS}
    names = sorted(kinds)
    weights = np.array([odds[name] for name in names])
    return [
        _draw(rng, str(rng.choice(names, p=weights / weights.sum())), long_stops=long_stops)
        for _ in range(num)
    ]


def _draw(rng: np.random.Generator, kind: str, *, long_stops: bool) -> Fault:
    odds = LONG_PARTITION_ODDS if kind in HOSTS else LONG_STOP_ODDS
    is_long = long_stops and rng.random() < odds
    joins = kind.startswith("joiner")
    points = START_POINTS if joins else (*POINTS, *REGROUP_POINTS, *START_POINTS)
    moment = str(rng.choice(MOMENTS, p=MOMENT_ODDS))
    steps, delay_s = int(rng.integers(1, 6)), round(float(rng.exponential(0.05)), 3)
    delay_s *= float(rng.random() > AT_ONCE_ODDS)
    details = {
        "who": round(float(rng.random()), 3),
        "num": int(rng.integers(2, 6)),
        "lasts_s": LONG_STOP_S if is_long else round(float(rng.uniform(0.05, 1.5)), 3),
        "point": str(rng.choice(points)),
        "file": str(rng.choice(FILES)),
        "torn": bool(rng.random() < 0.5),
        "where": round(float(rng.random()), 6),
        "everybody": bool(rng.random() < 0.4),
    }
    used: dict[str, Any] = {name: details[name] for name in USES.get(kind, ())}
    return Fault(kind=kind, moment=moment, steps=steps, delay_s=delay_s, **used)
