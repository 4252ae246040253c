"""A run's status as named numbers: the names are the same in every sink and on every page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple


class Metric(NamedTuple):
    """What a figure is to Prometheus."""

    name: str  # after Prometheus' conventions: base units, `_total` for what only grows
    kind: Literal["gauge", "counter"]
    help: str


OF_RUN = {
    "is_training": Metric(
        "evenstep_training", "gauge", "1 while workers train; 0 if the run starts, pauses or ends."
    ),
    "is_over": Metric(
        "evenstep_over", "gauge", "1 once the run has trained to the end, or is stopped on purpose."
    ),
    "step": Metric("evenstep_step", "gauge", "The last optimizer step, counted from 0."),
    "generation": Metric("evenstep_generation", "gauge", "The number of the newest roster."),
    "num_workers": Metric("evenstep_workers", "gauge", "Workers in the roster."),
    "batch": Metric("evenstep_batch_samples", "gauge", "The global batch: the sum of all shares."),
    "samples_per_s": Metric(
        "evenstep_samples_per_second",
        "gauge",
        "Throughput of the last steps; 0 if the run stands still.",
    ),
    "part_of_limit": Metric(
        "evenstep_part_of_limit_ratio",
        "gauge",
        "Throughput over the most that any shares reach, by the workers' step-time curves.",
    ),
    "speedup": Metric(
        "evenstep_speedup_ratio", "gauge", "Throughput over that of equal shares, likewise."
    ),
    "noise_scale": Metric(
        "evenstep_gradient_noise_scale_samples",
        "gauge",
        "The gradient noise scale, where the learning-rate rule has it measured (adascale).",
    ),
    "wait_fraction": Metric(
        "evenstep_wait_ratio", "gauge", "Part of the workers' time in steps spent waiting, overall."
    ),
    "position": Metric(
        "evenstep_position_samples", "gauge", "Samples of the job that have been trained on."
    ),
    "epoch": Metric("evenstep_epoch", "gauge", "The epoch, counted from 0."),
    "seconds_left": Metric(
        "evenstep_remaining_seconds", "gauge", "Time to the end of the job at this pace."
    ),
    "num_steps": Metric("evenstep_steps_total", "counter", "Optimizer steps."),
    "samples": Metric("evenstep_samples_total", "counter", "Samples in these steps."),
    "trained_s": Metric("evenstep_training_seconds_total", "counter", "Time spent in steps."),
    "idle_s": Metric(
        "evenstep_idle_seconds_total", "counter", "Time without training as the roster changed."
    ),
    "num_changes": Metric("evenstep_roster_changes_total", "counter", "Changes of the roster."),
    "num_lost": Metric("evenstep_lost_workers_total", "counter", "Workers that were lost."),
    "cost": Metric(
        "evenstep_cost_total",
        "counter",
        "Cost of the workers; worker-hours unless there are prices.",
    ),
    "num_refused": Metric(
        "evenstep_refused_connections_total", "counter", "Connections that were turned away."
    ),
    "restarts_left": Metric(
        "evenstep_restarts_left", "gauge", "Lost workers that will still be replaced."
    ),
    "num_problems": Metric(
        "evenstep_problems", "gauge", "Problems that `evenstep status` names at the moment."
    ),
}
"""Figures of the run, by name."""

OF_WORKER = {
    "share": Metric(
        "evenstep_worker_share_samples", "gauge", "Samples that a worker computes in a step."
    ),
    "compute_s": Metric(
        "evenstep_worker_compute_seconds", "gauge", "Forward and backward in a worker's last step."
    ),
    "wait_s": Metric(
        "evenstep_worker_wait_seconds", "gauge", "Waiting for slower workers in its last step."
    ),
}
"""Figures of a worker; its name comes after a slash: `compute_s/w0`."""

OVER = ("finishing", "stopping", "stopped", "ended", "finished")
"""States of a run that takes no further step."""


def figures(status: Mapping[str, Any]) -> dict[str, float]:
    """All that is known by now: what is unknown is left out rather than 0."""
    return {name: x for name, x in _known(status) if x is not None and math.isfinite(x)}


def _known(status: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    progress, totals = status["progress"], status["totals"]
    rostered = [row for row in status["workers"] if row["rank"] is not None]
    measured = [row for row in rostered if row["compute_s"]]
    step = status["step"] if status["step"] >= 0 else None
    yield "is_training", int(status["state"] == "training")
    yield "is_over", int(status["state"] in OVER)
    yield "step", step
    yield "generation", status["generation"]
    yield "num_workers", len(rostered)
    yield "batch", sum(row["share"] for row in measured) or None
    yield "samples_per_s", status["samples_per_s"] if step is not None else None
    yield "part_of_limit", status["part_of_limit"] or None
    yield "speedup", status["speedup"] or None
    yield "noise_scale", status.get("noise_scale") or None  # a page of a journal has none
    yield "wait_fraction", totals["wait_fraction"] if totals["part_of_limit"] else None
    yield "position", progress["samples"]
    yield "epoch", progress["epoch"] if progress["num_epochs"] else None
    yield "seconds_left", progress["seconds_left"] or None
    for name in ("num_steps", "samples", "trained_s", "idle_s", "num_changes", "num_lost", "cost"):
        yield name, totals[name]
    if "restarts_left" in status:  # else there is no coordinator, as under torchrun
        yield "restarts_left", status["restarts_left"]
        yield "num_refused", sum(status["refused"].values())
    yield "num_problems", len(status["problems"])
    for row in measured:
        for name in OF_WORKER:
            yield f"{name}/{row['worker']}", row[name]
