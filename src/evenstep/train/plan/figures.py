"""Feeds the sinks of a run without a coordinator, from the planner's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from evenstep.decide.cluster import Cluster
from evenstep.engine import Engine
from evenstep.observe.feed import EVERY_S, SinkFeed
from evenstep.observe.overview import overview
from evenstep.observe.tally import Tally
from evenstep.types import StepDone, Steps

log = logging.getLogger("evenstep")


class LocalFigures:
    """Tallies the decisions of a fixed roster's engine, and offers figures to the sinks."""

    def __init__(
        self, sinks: SinkFeed, epoch_samples: int = 0, num_epochs: Callable[[], int] = lambda: 0
    ) -> None:
        self._sinks = sinks
        self._epoch_samples, self._num_epochs = epoch_samples, num_epochs
        self._tally = Tally()
        self._cluster: Cluster | None = None
        self._newest: StepDone | None = None
        self._recent = Steps()  # since the last offer
        self._next_s = 0.0

    def follow(self, engine: Engine) -> None:
        """Have the engine keep its newest record, which `add` reads."""
        engine.is_watched = engine.is_watched or bool(self._sinks)

    def add(self, engine: Engine) -> None:
        """Tally the engine's newest record; call it after each event."""
        if not self._sinks or engine.newest is None:
            return
        with self._harmless():
            record, event = engine.newest, engine.newest.event
            self._tally.add(record)
            if isinstance(event, StepDone):
                self._cluster, self._newest = engine.cluster, event
                self._recent += event.steps
                if record.at_s >= self._next_s:
                    self._offer()
                    self._next_s = record.at_s + EVERY_S

    def offer_last(self) -> None:
        """Training is over: offer the steps since the last offer."""
        with self._harmless():
            self._offer()

    def _offer(self) -> None:
        if self._sinks and self._newest is not None and self._recent.num:
            self._sinks.offer(self._status(self._newest))
            self._recent = Steps()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Log an exception and drop the sinks: planning must go on."""
        try:
            yield
        except Exception:
            log.exception("the sinks get no more figures")
            self._sinks = SinkFeed()

    def _status(self, newest: StepDone) -> dict[str, Any]:
        assert self._cluster is not None
        settings, length = self._cluster.settings, self._epoch_samples
        if not settings.samples:  # they were read before the script's loop over epochs began
            settings = replace(settings, samples=length * self._num_epochs())
        samples_per_s = self._recent.samples / self._recent.seconds
        return {
            "state": "training",
            "generation": newest.generation,
            "step": newest.step,
            "samples_per_s": samples_per_s,
            "workers": [
                {
                    "worker": report.worker,
                    "rank": rank,
                    "share": report.samples,
                    "compute_s": report.compute_s,
                    "wait_s": report.wait_s,
                }
                for rank, report in enumerate(newest.reports)
            ],
            **overview(self._tally, settings, {"length": length}, samples_per_s),
            "noise_scale": self._cluster.noise.known_scale,
            "problems": self._sinks.problems,
        }
