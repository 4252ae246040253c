"""The dashboard and the alerts in examples/grafana use metrics that exist, in ways that work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenstep.observe.figures import OF_RUN, OF_WORKER
from evenstep.observe.sinks.prometheus import UP

FOLDER = Path(__file__).parents[2] / "examples" / "grafana"
METRICS = {metric.name for metric in (UP, *OF_RUN.values(), *OF_WORKER.values())}

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool of Debian's package prometheus"
)


def promtool(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *args],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the examples, with the key that a page writes."""
    copy = shutil.copytree(FOLDER, tmp_path / "grafana")
    (copy / "page.key").write_text("00112233445566778899aabbccddeeff\n")
    return copy


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "evenstep.json").read_text())
    return loaded


def dashboard_queries() -> list[str]:
    shown = dashboard()
    panels = [target["expr"] for panel in shown["panels"] for target in panel["targets"]]
    return panels + [annotation["expr"] for annotation in shown["annotations"]["list"]]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"evenstep_\w+", text))


def test_the_dashboard_uses_metrics_that_exist_and_shows_all_of_a_worker() -> None:
    used = metrics_in(json.dumps(dashboard()))
    assert used <= METRICS
    assert {metric.name for metric in OF_WORKER.values()} <= used


def test_every_query_of_the_dashboard_is_about_the_run_that_was_chosen() -> None:
    for query in dashboard_queries():
        assert len(re.findall(r'evenstep_\w+\{run="\$run"\}', query)) == len(
            re.findall(r"evenstep_\w+", query)
        )


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for at in (panel["gridPos"] for panel in panels):
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        taken |= cells


@needs_promtool
def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [query.replace("$run", "a") for query in dashboard_queries()]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    text = yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    (tmp_path / "rules.yaml").write_text(text)
    checked = promtool("check", "rules", "rules.yaml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert f"{len(rules)} rules found" in checked.stdout


def test_alerts_use_metrics_that_exist() -> None:
    assert metrics_in((FOLDER / "alerts.yaml").read_text()) <= METRICS
    assert metrics_in((FOLDER / "alerts_test.yaml").read_text()) <= METRICS


def test_every_alert_is_tested_for_firing_and_for_staying_silent() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    for fires in (True, False):
        checked = {c["alertname"] for c in checks if bool(c["exp_alerts"]) == fires}
        assert checked == {rule["alert"] for rule in alerts()}


@needs_promtool
@pytest.mark.parametrize(
    "check",
    ["check rules alerts.yaml", "check config prometheus.yaml", "test rules alerts_test.yaml"],
)
def test_promtool_accepts_the_examples(folder: Path, check: str) -> None:
    checked = promtool(*check.split(), cwd=folder)
    assert checked.returncode == 0, checked.stdout
