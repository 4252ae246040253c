"""Figures in Prometheus' text format: for `/metrics` on a run's page, or in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigError
from evenstep.observe.figures import OF_RUN, OF_WORKER, Metric, figures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

UP = Metric("evenstep_up", "gauge", "1 if there is news of the run: its coordinator answers, say.")


def exposition(status: Mapping[str, Any] | None) -> str:
    """What a scrape gets of a run: `status` as `evenstep status --json` has it.

    Of one that is None, or whose `is_live` is false, there is no more than whether the run is over:
    old figures would be taken for new ones.
    """
    is_live = status is not None and status.get("is_live", True)
    known = figures(status) if status is not None else {}
    if not is_live:
        known = {name: value for name, value in known.items() if name == "is_over"}
    return "".join([*_family(UP, [("", int(is_live))]), *_lines(known)])


class PrometheusFile:
    """Rewrites a file, for the textfile collector of Prometheus' node exporter."""

    def __init__(self, target: str) -> None:
        if not target:
            raise ConfigError("", "prometheus needs a file: prometheus:/var/lib/metrics/run.prom")
        self._path = Path(target)
        self._fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._replace("")

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        """Replace the file atomically: readers see old or new figures, never a mix."""
        self._replace("".join(_lines(figures)))

    def _replace(self, text: str) -> None:
        self._fresh.write_text(text, encoding="utf-8")
        self._fresh.replace(self._path)

    def close(self) -> None:
        """Remove the file: old figures would be scraped as if they were new."""
        for path in (self._path, self._fresh):
            path.unlink(missing_ok=True)


def _lines(known: Mapping[str, float]) -> Iterator[str]:
    """One metric after the other, each with all of its samples."""
    for name, metric in OF_RUN.items():
        if name in known:
            yield from _family(metric, [("", known[name])])
    of_workers: dict[str, list[tuple[str, float]]] = {name: [] for name in OF_WORKER}
    for name, value in known.items():
        figure, slash, worker = name.partition("/")
        if slash and figure in of_workers:
            of_workers[figure].append((f'{{worker="{_escaped(worker)}"}}', value))
    for name, samples in of_workers.items():
        yield from _family(OF_WORKER[name], samples)


def _family(metric: Metric, samples: list[tuple[str, float]]) -> Iterator[str]:
    if samples:
        yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    for labels, value in samples:
        yield f"{metric.name}{labels} {value!r}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
