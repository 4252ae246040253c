"""`evenstep page` and `evenstep run --page`: real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from bench.testbed.source_tree import PYTHONPATH

from evenstep.config import Choice
from evenstep.simulate.run import run as simulate
from evenstep.simulate.scenario import load_scenario
from tests.cli.test_run import LONG, SCRIPT, Runs, ended, until

SCENARIO = Path(__file__).parents[2] / "scenarios" / "two-cards.yaml"
URL = r"http://127\.0\.0\.1:\d+/\?key=[0-9a-f]{32}"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "simulated.jsonl"
    simulate(load_scenario(SCENARIO, ["steps=20"]), Choice("auto"), journal=path)
    return path


def opened(url: str, path: str = "/session") -> str:
    """What a program with the key of a URL reads at a path."""
    where, _, key = url.strip().partition("/?key=")
    asked = urllib.request.Request(where + path, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked) as answer:
        return str(answer.read().decode())


def test_the_page_of_a_journal_is_served_until_it_is_interrupted(runs: Runs, journal: Path) -> None:
    page = runs.start("page", journal)
    assert page.stdout is not None
    url = page.stdout.readline()
    assert re.fullmatch(URL, url.strip())
    assert '"simulated.jsonl"' in opened(url)
    with pytest.raises(HTTPError, match="401"):
        opened(url.replace("key=", "key=0"))
    page.send_signal(signal.SIGINT)
    done = ended(page)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_run_with_a_page_prints_its_url_and_the_page_ends_with_the_run(
    runs: Runs, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = runs.start("run", "--page", "--workers", "2", "--run", folder, SCRIPT, LONG)
    assert process.stderr is not None
    told = next(found for line in process.stderr if (found := re.search(URL, line)))
    until(lambda: '"training"' in opened_status(told[0]))
    metrics = opened(told[0], "/metrics")
    assert "evenstep_up 1" in metrics
    assert "evenstep_workers 2" in metrics
    key = folder / "page.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert opened(re.sub("key=.*", f"key={key.read_text().strip()}", told[0]))
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.returncode == 0
    assert f"the page ended with the run; `evenstep page {folder}` opens it again" in done.stderr
    with pytest.raises(OSError, match="refused"):
        opened(told[0])


def opened_status(url: str) -> str:
    """The first status that the page tells."""
    where, _, key = url.partition("/?key=")
    asked = urllib.request.Request(f"{where}/events", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked) as answer:
        return next(str(line.decode()) for line in answer if b'"state":' in line)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"", "has no complete header; is this a journal?"),
        (b"no journal\n", "line 1: is not one line of JSON"),
        (b'{"format":99}\n', "has format 99; this evenstep reads 1"),
    ],
)
def test_what_is_no_journal_is_refused_with_one_line(
    runs: Runs, tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "wrong.jsonl"
    if content is not None:
        path.write_bytes(content)
    done = runs.run("page", path)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_torn_last_line_is_left_out_and_said(runs: Runs, journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-5])
    page = runs.start("page", journal)
    assert page.stdout is not None
    url = page.stdout.readline()
    until(lambda: "the last line is not complete" in opened_status(url.strip()))


def test_mistakes_are_told_with_the_way_out(runs: Runs, journal: Path, tmp_path: Path) -> None:
    done = runs.run("page", journal, "--commands")
    assert done.returncode == 2
    assert "commands need the folder of a run" in done.stderr
    done = runs.run("page", tmp_path)
    assert done.returncode == 2
    assert "is not the folder of a run" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = runs.run("page", journal, "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in done.stderr


@pytest.mark.parametrize("command", [("page", "x.jsonl"), ("run", "--page", SCRIPT)])
def test_without_its_packages_the_page_says_how_to_install_them(
    tmp_path: Path, command: tuple[str | Path, ...]
) -> None:
    """As `find_spec` sees a package that is not installed."""
    (tmp_path / "without.py").write_text(
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'uvicorn' else find(name)\n"
        "from evenstep.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "without.py", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert done.returncode == 2
    assert done.stderr == 'evenstep: the page needs: pip install "evenstep[ui]"\n'
