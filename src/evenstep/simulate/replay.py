"""Decides a recorded run again: the same events, with the same or other settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from evenstep.config import Settings
from evenstep.engine import Engine, without_repeats
from evenstep.journal import Record
from evenstep.types import AnyAction, Regroup, StepDone


def replay(
    records: Iterable[Record], settings: Settings, *, forecast_anew: bool = False
) -> Iterator[tuple[Record, tuple[AnyAction, ...]]]:
    """Each record, with the actions that are decided on its event now.

    Forecasts are part of the record and are reused, unless `forecast_anew`. With other settings the
    events are still the recorded ones: the result is what would have been decided on them, not how
    the cluster would have reacted.
    """
    engine = Engine(settings)
    recorded_generation, stays_because = 0, ""
    for record in records:
        event = record.event
        if isinstance(event, StepDone):
            if event.generation == recorded_generation:
                # Other settings may have counted generations differently.
                now = engine.cluster.generation
                event = msgspec.structs.replace(event, generation=now)
            if forecast_anew:
                event = msgspec.structs.replace(event, forecasts=None)
        # Journals of older versions repeat a Stay at every step.
        recorded, stays_because = without_repeats(record.actions, stays_because)
        yield msgspec.structs.replace(record, actions=recorded), engine.handle(record.at_s, event)
        for action in recorded:
            if isinstance(action, Regroup):
                recorded_generation = action.generation
