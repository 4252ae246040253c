"""What Prometheus reads of a run: checked by its own parser and by promtool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from evenstep.observe.figures import OF_RUN, OF_WORKER, figures
from evenstep.observe.sinks.prometheus import PrometheusFile, exposition
from evenstep.testing import SinkContract
from tests.observe.a_status import status, worker

PROMTOOL = shutil.which("promtool")


class TestPrometheusFile(SinkContract):
    make = PrometheusFile


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by metric and worker."""
    found = [sample for family in parse(text) for sample in family.samples]
    return {(s.name, s.labels.get("worker", "")): s.value for s in found}


def test_a_scrape_has_every_figure_under_its_metric() -> None:
    known, scraped = figures(status()), samples(exposition(status()))
    assert scraped.pop(("evenstep_up", "")) == 1
    assert len(scraped) == len(known)
    for name, value in known.items():
        figure, _, of = name.partition("/")
        assert scraped[(OF_RUN | OF_WORKER)[figure].name, of] == value


def test_types_and_help_are_those_of_the_table() -> None:
    of = {f.name: f for f in parse(exposition(status()))}
    assert of["evenstep_steps"].type == "counter"  # the parser takes `_total` off
    assert of["evenstep_samples_per_second"].type == "gauge"
    assert of["evenstep_workers"].documentation == "Workers in the roster."


def test_without_news_a_scrape_says_whether_the_run_is_over_and_no_old_figures() -> None:
    assert samples(exposition(None)) == {("evenstep_up", ""): 0}
    for state, over in (("training", 0), ("finished", 1)):
        scraped = samples(exposition(status(state=state, is_live=False)))
        assert scraped == {("evenstep_up", ""): 0, ("evenstep_over", ""): over}


def test_a_worker_may_be_called_anything() -> None:
    name = 'a "b" \\ c\nd/e'
    scraped = samples(exposition(status(workers=[worker(name, 0)])))
    assert scraped["evenstep_worker_compute_seconds", name] == 0.25


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool of Debian's package prometheus")
@pytest.mark.parametrize("text", [exposition(status()), exposition(None)], ids=["up", "down"])
def test_promtool_finds_nothing_to_complain_about(text: str) -> None:
    assert PROMTOOL is not None
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=600
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_file_holds_the_newest_figures_and_goes_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    sink = PrometheusFile(str(path))
    for step in (1, 2):
        sink.write(1e9, step, figures(status(step)))
    assert samples(path.read_text())["evenstep_step", ""] == 2
    assert list(tmp_path.iterdir()) == [path]
    sink.close()
    assert not path.exists()
