"""`evenstep run --on ENGINE`, with the launcher in examples/ as if a user had installed it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP
from bench.testbed.live_run import until

from evenstep.cli.engine import run_name, worker_prices
from evenstep.launch.kinds import parse_kinds
from evenstep.ports import EngineJob, Launcher
from evenstep.testing import LauncherContract
from tests.cli.installed import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_launcher"
FAKE = Path(__file__).with_name("fake_train.py")


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "installed"
    folder.mkdir()
    path = install(EXAMPLE, folder)["PYTHONPATH"]
    return {**ENVIRONMENT, "PYTHONPATH": f"{path}:{ENVIRONMENT['PYTHONPATH']}"}


@pytest.fixture
def detached() -> Iterator[type[Launcher]]:
    sys.path.insert(0, str(EXAMPLE))
    from evenstep_detached import Detached

    yield Detached
    sys.path.remove(str(EXAMPLE))


# One launcher leaves its processes to the next one, which is what Popen warns about.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestDetached(LauncherContract):
    """The contract, on the example."""

    @pytest.fixture(autouse=True)
    def _use(self, detached: type[Launcher]) -> None:
        self.detached = detached

    def made(self, job: EngineJob) -> Launcher:
        made: Launcher = self.detached(job)  # type: ignore[call-arg]
        return made


def start(folder: Path, env: dict[str, str], num_steps: int, *more: str) -> subprocess.Popen[str]:
    options = ["--on", "detached", "--kind", "cpu=1,price=2", "--host", "127.0.0.1", *more]
    return subprocess.Popen(
        [EVENSTEP, "run", *options, FAKE, str(num_steps)],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_run_on_an_engine_of_ones_own_trains_to_the_end(
    installed: dict[str, str], tmp_path: Path
) -> None:
    run = start(tmp_path, installed, 10, "--workers", "2:4", "--run", "r")
    out, _ = run.communicate()
    assert run.returncode == 0, out
    assert "launching 2 workers: asked for" in out
    assert "trained to the end" in out
    assert "[w0] w0 is here" in out, "workers' logs are shown"


def test_a_coordinator_that_is_killed_finds_its_workers_again(
    installed: dict[str, str], tmp_path: Path
) -> None:
    first = start(tmp_path, installed, 60, "--workers", "2:4", "--run", "r")
    logs = tmp_path / "r" / "logs"
    until(lambda: all("begins" in _read(logs / f"w{n}.log") for n in range(2)))
    first.kill()
    first.communicate()
    again = start(tmp_path, installed, 60, "--resume", "r")
    out, _ = again.communicate()
    assert again.returncode == 0, out
    assert "launching" not in out, "both still run"
    assert "trained to the end" in out


def test_a_worker_that_is_killed_is_replaced_and_shown_by_its_exit(
    installed: dict[str, str], tmp_path: Path
) -> None:
    run = start(tmp_path, installed, 100_000, "--workers", "2:4", "--run", "r")
    pid, logs = tmp_path / "r" / "pids" / "w1", tmp_path / "r" / "logs"
    until(lambda: "begins" in _read(logs / "w1.log"))
    os.kill(json.loads(pid.read_bytes())["pid"], signal.SIGKILL)
    until(lambda: "begins" in _read(logs / "w2.log"))
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate()
    assert run.returncode == 0, out
    assert "w1 was ended by SIGKILL" in out
    assert "launching 1 worker: in place of w1" in out


def test_a_script_that_fails_ends_the_run_with_its_output(
    installed: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('the data is bad')")
    command = [str(EVENSTEP), "run", "--on", "detached", "--host", "127.0.0.1", "bad.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ValueError: the data is bad" in ended.stderr + ended.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--on", "detachd"], "--on: unknown name 'detachd'; did you mean detached?"),
        (["--on", "detached", "--kind", "8"], "expected cpu=N, gpu=N or gpu=TYPE:N"),
        (["--on", "detached", "--partition", "p"], "--on detached: takes no --partition"),
        (["--kind", "cpu=8"], "--kind: is for workers on an engine: add --on slurm or --on ray"),
        (["--address", "auto"], "--address: is for workers on an engine"),
        (["--on", "detached", "--pending", "soon"], "expected a duration such as 90s"),
    ],
)
def test_wrong_options_are_refused_and_leave_no_folder(
    installed: dict[str, str], tmp_path: Path, options: list[str], told: str
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    command = [str(EVENSTEP), "run", "--run", "r", "--host", "127.0.0.1", *options, str(script)]
    ended = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert told in " ".join(ended.stderr.split())


def test_prices_of_kinds_and_of_options() -> None:
    kinds = parse_kinds(["gpu=A100:4,price=12", "cpu=8,price=0.5", "cpu=4"])
    given = worker_prices(("cpux8=0.4", "3"), tuple(kinds.values()))
    assert dict(given) == {"A100x4": 12, "cpux8": 0.4, "": 3}
    assert worker_prices((), ()) == ()


def test_runs_in_folders_of_one_name_are_told_apart() -> None:
    one, other = (run_name(Path("/shared/run 1"), token) for token in ("token a", "token b"))
    assert one != other
    assert one.startswith("run-1-")
    assert run_name(Path("/elsewhere/run 1"), "token a") == one, "also after it was moved"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
