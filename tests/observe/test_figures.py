"""A run's status as named figures."""

from __future__ import annotations

import math
import re
from pathlib import Path

from evenstep.observe.figures import OF_RUN, OF_WORKER, figures
from tests.observe.a_status import NO_TOTALS, status, worker


def test_a_run_that_trains_has_the_figures_of_the_run_and_of_each_worker() -> None:
    known = figures(status())
    assert known["samples_per_s"] == 5210.5
    assert known["batch"] == 64
    assert known["num_refused"] == 3
    assert known["share/w1"] == 34
    assert known["compute_s/w0"] == 0.25
    assert known["wait_s/w0"] == 0.125


def test_every_figure_has_a_meaning() -> None:
    totals = NO_TOTALS["totals"] | {"part_of_limit": 0.9, "wait_fraction": 0.1}
    progress = NO_TOTALS["progress"] | {"num_epochs": 3, "epoch": 1, "seconds_left": 7.0}
    known = figures(status(totals=totals, progress=progress))
    assert {name for name in known if "/" not in name} == OF_RUN.keys()
    assert {name.partition("/")[0] for name in known if "/" in name} == OF_WORKER.keys()


def test_what_is_unknown_is_left_out() -> None:
    unknown = dict.fromkeys(("part_of_limit", "speedup", "noise_scale"), 0.0)
    known = figures(status(step=-1, state="starting", workers=[], **unknown))
    assert known["is_training"] == 0
    assert not known.keys() & {"step", "samples_per_s", "batch", *unknown}
    assert not any("/" in name for name in known)


def test_workers_outside_of_the_roster_or_without_a_measurement_have_no_figures() -> None:
    rows = [worker("w0", 0), worker("w1", 1, compute_s=0.0), worker("w2", None)]
    known = figures(status(workers=rows))
    assert known["num_workers"] == 2
    assert {name for name in known if "/" in name} == {"share/w0", "compute_s/w0", "wait_s/w0"}


def test_a_run_without_a_coordinator_has_no_figures_of_one() -> None:
    local = status()
    del local["restarts_left"], local["refused"]
    assert not figures(local).keys() & {"restarts_left", "num_refused"}


def test_all_figures_are_finite() -> None:
    assert "samples_per_s" not in figures(status(samples_per_s=math.inf))
    assert "speedup" not in figures(status(speedup=math.nan))


def test_metrics_are_named_after_prometheus_conventions() -> None:
    meanings = [*OF_RUN.values(), *OF_WORKER.values()]
    assert len({m.name for m in meanings}) == len(meanings)
    for metric, kind, help_text in meanings:
        assert re.fullmatch(r"evenstep_[a-z_]+", metric)
        assert metric.endswith("_total") == (kind == "counter")
        assert help_text.endswith(".")
        assert "\n" not in help_text


def test_the_page_lists_every_figure_with_its_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "sinks.md").read_text()
    of_workers = {f"{name}/w0": metric for name, metric in OF_WORKER.items()}
    rows = re.findall(r"^\| `(\S+)` \| `(evenstep_\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(name, m.name, m.help) for name, m in (OF_RUN | of_workers).items()]
