"""The numbers of a report as four CSV files, each with the run in its first column."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evenstep.observe.history import History
from evenstep.observe.report.tables import run_data


def write_csv(histories: Sequence[History], folder: Path) -> list[Path]:
    """Write summary, workers, decisions and series; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run_data(history) for history in histories]
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[Any]]]] = {
        "summary": (("run", "figure", "value"), _summary(runs)),
        "workers": (("run", *_names(runs, "workers")), _rows(runs, "workers")),
        "decisions": (("run", *_names(runs, "decisions")), _rows(runs, "decisions")),
        "series": (("run", "picture", "series", "unit", "at_s", "value"), _series(runs)),
    }
    written = []
    for name, (head, rows) in tables.items():
        path = folder / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)
        written.append(path)
    return written


def _summary(runs: Sequence[dict[str, Any]]) -> Iterator[Sequence[Any]]:
    for run in runs:
        for name, value in run["totals"].items():
            yield run["name"], name, value


def _names(runs: Sequence[dict[str, Any]], table: str) -> list[str]:
    return next((list(row) for run in runs for row in run[table]), [])


def _rows(runs: Sequence[dict[str, Any]], table: str) -> Iterator[Sequence[Any]]:
    for run in runs:
        for row in run[table]:
            yield run["name"], *map(_cell, row.values())


def _series(runs: Sequence[dict[str, Any]]) -> Iterator[Sequence[Any]]:
    for run in runs:
        for of in run["series"]:
            for at_s, value in zip(of["at_s"], of["values"], strict=True):
                yield run["name"], of["picture"], of["name"], of["unit"], at_s, _cell(value)


def _cell(value: Any) -> Any:
    if isinstance(value, dict):  # shares
        return " ".join(f"{worker}:{share}" for worker, share in value.items())
    return "" if value is None else value
