"""Coordinators that wait for workers to join, workers that wait for a coordinator, and exit codes.

Real processes, as an engine that places them would start them; the script does not train.
"""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from evenstep.cli.duration import duration
from evenstep.cli.main import main
from evenstep.coordinate.client import MAX_RETRY_S, RETRY_S, await_coordinator, retry_pauses
from evenstep.messages import Done, Goodbye
from tests.cli.test_run import LONG, SCRIPT, Runs, ended, until
from tests.coordinate.hosted import hosted

TOKEN = "51c0" * 16


class Site:
    """A port, a token and a folder that all of a run know before it begins."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self.runs, self.folder, self.token = runs, folder / "run", folder / "secret"
        self.token.write_text(f"{TOKEN}\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"

    def coordinate(self, *options: str, num_steps: str = LONG) -> subprocess.Popen[str]:
        port = self.address.rpartition(":")[2]
        where = "--resume" if self.folder.exists() else "--run"
        command = ["run", "--workers", "0:8", where, str(self.folder), "--port", port]
        return self.runs.start(*command, "--token-file", self.token, *options, SCRIPT, num_steps)

    def join(
        self, num_steps: str = LONG, wait: str = "10m", script: Path = SCRIPT
    ) -> subprocess.Popen[str]:
        options = ["--wait", wait, "--token-file", str(self.token)]
        return self.runs.start("join", *options, self.address, script, num_steps)

    def check(self) -> int:
        """The exit code of `status --check`."""
        options = ["--check", "--token-file", str(self.token)]
        return CliRunner().invoke(main, ["status", *options, self.address]).exit_code

    @property
    def num_steps(self) -> int:
        steps = self.folder / "steps"
        return int(steps.read_text()) if steps.exists() else 0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    runs = Runs(tmp_path)
    yield Site(runs, tmp_path)
    runs.close()


def test_workers_and_their_coordinator_may_start_in_any_order(site: Site) -> None:
    early = site.join("40")
    assert early.stderr is not None
    told = ""
    while "Trying again for" not in told:
        line = early.stderr.readline()
        assert line, told
        told += line
    assert f"no coordinator listens at {site.address}" in told
    coordinator = site.coordinate(num_steps="40")
    done = ended(early)
    assert done.returncode == 0, done.stderr
    end = ended(coordinator)
    assert end.returncode == 0, end.stderr
    text = f"evenstep join --token-file {site.folder}/token {site.address} {SCRIPT}"
    assert f"waiting for them to join by `{text}`" in end.stderr
    assert site.num_steps == 40


def test_health_checks_tell_by_exit_code_whether_workers_train(site: Site) -> None:
    assert site.check() == 2
    coordinator = site.coordinate()
    until(lambda: site.check() == 3)  # it waits for the first worker
    only = site.join()
    until(lambda: site.check() == 0)
    only.send_signal(signal.SIGTERM)
    assert ended(only).returncode == 75
    until(lambda: site.check() == 3)  # it waits for the next one
    coordinator.send_signal(signal.SIGINT)
    assert ended(coordinator).returncode == 0
    assert site.check() == 2


def test_a_worker_asked_to_leave_before_its_script_has_joined_ends_with_75(site: Site) -> None:
    site.coordinate()
    until(lambda: site.check() == 3)
    started = site.folder.parent / "started"
    script = site.folder.parent / "slow.py"
    script.write_text(f"import time\nopen({str(started)!r}, 'w').close()\ntime.sleep(600)\n")
    worker = site.join(script=script)
    until(started.exists)
    worker.send_signal(signal.SIGTERM)
    assert ended(worker).returncode == 75


def test_when_the_last_worker_has_left_the_next_one_goes_on_where_it_stopped(site: Site) -> None:
    coordinator = site.coordinate()
    first = site.join()
    until(lambda: site.num_steps > 3)
    first.send_signal(signal.SIGTERM)
    assert ended(first).returncode == 75
    assert coordinator.poll() is None
    done = site.num_steps
    second = site.join(num_steps=str(done + 20))
    assert ended(second).returncode == 0
    assert ended(coordinator).returncode == 0
    assert site.num_steps == done + 20


def test_a_coordinator_that_hands_over_leaves_its_workers_training(site: Site) -> None:
    first = site.coordinate("--hand-over")
    worker = site.join()
    until(lambda: site.num_steps > 3)
    first.send_signal(signal.SIGTERM)
    assert ended(first).returncode == 75
    assert worker.poll() is None
    second = site.coordinate("--hand-over")
    until(lambda: site.check() == 0)
    before = site.num_steps
    until(lambda: site.num_steps > before)
    worker.send_signal(signal.SIGTERM)
    left = ended(worker)
    assert left.returncode == 75
    assert "is back" in left.stdout
    second.send_signal(signal.SIGINT)
    assert ended(second).returncode == 0


def test_a_worker_whose_coordinator_does_not_come_ends_with_75(site: Site) -> None:
    done = ended(site.join(wait="1s"))
    assert done.returncode == 75
    assert done.stderr.endswith(
        f"evenstep: no coordinator listens at {site.address}; has the run ended?\n"
    )


def test_a_worker_that_comes_after_the_end_has_nothing_to_do(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        worker = run.worker()
        worker.begin(worker.enter())
        worker.say(Done(step=1))
        worker.hear(Goodbye)
        result = CliRunner().invoke(main, ["join", str(tmp_path / "run"), str(SCRIPT)])
    assert result.exit_code == 0
    assert result.stderr == f"evenstep: the run at {run.address} has been trained to the end\n"


def test_a_run_keeps_its_token(site: Site, tmp_path: Path) -> None:
    coordinator = site.coordinate()
    until(lambda: site.check() == 3)
    coordinator.send_signal(signal.SIGINT)
    assert ended(coordinator).returncode == 0
    assert (site.folder / "token").read_text() == f"{TOKEN}\n"
    site.token.write_text("60d1" * 16)
    refused = ended(site.coordinate())
    assert refused.returncode == 2
    assert "is not the token of the run" in refused.stderr


def test_pauses_between_attempts_double_up_to_a_bound_and_differ_by_chance() -> None:
    longest = list(itertools.islice(retry_pauses(lambda: 1.0), 8))
    assert longest == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]
    assert next(retry_pauses(lambda: 0.0)) == RETRY_S / 2
    some = [next(itertools.islice(retry_pauses(), 6, None)) for _ in range(50)]
    assert len(set(some)) > 40
    assert all(MAX_RETRY_S / 2 <= pause_s <= MAX_RETRY_S for pause_s in some)


def test_only_a_coordinator_that_does_not_answer_is_waited_for() -> None:
    def refuse() -> None:
        raise ValueError("a wrong token")

    with pytest.raises(ValueError, match="a wrong token"):
        await_coordinator(refuse, 600.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("0", 0), ("1.5h", 5400)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10 m", "m", "-5s", "1d", "1e3", "inf"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="90s, 10m or 1h"):
        duration(text)


@pytest.mark.parametrize("text", ["0:0", "3:2", ":4", "0:"])
def test_a_range_of_workers_has_room_for_one(tmp_path: Path, text: str) -> None:
    result = CliRunner().invoke(main, ["run", "--workers", text, str(SCRIPT), "1"])
    assert result.exit_code == 2
    assert "--workers" in result.stderr
