"""Figures as scalars for TensorBoard, written without torch or TensorFlow."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigError


class TensorBoard:
    """Writes an event file into a folder; a resumed run replaces the steps that it repeats."""

    def __init__(self, target: str) -> None:
        if not target:
            raise ConfigError("", "tensorboard needs a folder: tensorboard:runs/tensorboard")
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as e:
            raise ConfigError("", f'{e}; run: pip install "evenstep[tensorboard]"') from None
        self._event, self._session, self._summary = Event, SessionLog, Summary
        now_s = datetime.now().timestamp()
        folder = Path(target)
        folder.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        name = f"events.out.tfevents.{now_s:017.6f}.{host}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("xb"))
        self._add(Event(wall_time=now_s, file_version="brain.Event:2"))
        self._last_step = -1

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        """One scalar for each figure."""
        if step < self._last_step or self._last_step < 0:  # drop what is there from this step on
            start = self._session(status=self._session.START)
            self._add(self._event(wall_time=unix_s, step=step, session_log=start))
        self._last_step = step
        values = [self._summary.Value(tag=name, simple_value=x) for name, x in figures.items()]
        summary = self._summary(value=values)
        self._add(self._event(wall_time=unix_s, step=step, summary=summary))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()
