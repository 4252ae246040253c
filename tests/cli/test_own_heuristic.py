"""The heuristic in examples/, found by its entry point as if a user had installed it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.installed import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_heuristic"
EVENSTEP = Path(sys.executable).with_name("evenstep")


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment with the heuristic installed."""
    return install(EXAMPLE, tmp_path)


def run(env: dict[str, str], scale: str, script: Path) -> subprocess.CompletedProcess[str]:
    options = ["--workers", "1:3", "--scale", scale, "--restarts", "0"]
    return subprocess.run(
        [EVENSTEP, "run", *options, script],
        env=env,
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_it_is_found_by_its_name(installed: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("raise SystemExit(3)")
    ended = run(installed, "deadline:seconds=600", script)
    assert "w0 ended with exit code 3" in ended.stderr  # the heuristic was found; the script failed


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ("deadline:seconds=-1", "scaling.heuristic.seconds: must be above 0, got -1"),
        ("deadlin:seconds=1", "did you mean deadline?"),
        ("efficiency:threshold=2", "scaling.heuristic.threshold: must lie in [0, 1], got 2"),
        ("efficiency:0.2", "expected NAME:KEY=VALUE"),
        ("utility:linear=-5,10", "must not rise"),
        ("utility:step=1:10,5:20", "must not rise"),
        ("utility", "give either linear"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    installed: dict[str, str], tmp_path: Path, scale: str, message: str
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    ended = run(installed, scale, script)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "3:3", "--scale", "efficiency"], "needs a range of sizes"),
        (["--workers", "3:2"], "need MIN <= MAX and MAX >= 1"),
        (["--workers", "1:3", "--min", "5"], "need 1 <= min <= max, got 5 and 3"),
        (["--price", "cheap"], "expected PRICE or KIND=PRICE"),
        (["--price", "-1"], "must be 0 or more"),
    ],
)
def test_contradicting_limits_and_invalid_prices_are_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    ended = subprocess.run(
        [EVENSTEP, "run", *options, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 2
    assert message in ended.stderr
