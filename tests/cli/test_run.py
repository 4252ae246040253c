"""`evenstep run` and operators' commands: real processes, a script that does not train."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench.testbed.source_tree import PYTHONPATH

from evenstep.cli.local_run import LocalRun
from evenstep.cli.signals import DEBOUNCE_S
from evenstep.coordinate.events import Ending, Terms
from evenstep.coordinate.run_folder import RunFolder
from evenstep.journal import read
from evenstep.types import Joined, Left, Lost, Regroup

SCRIPT = Path(__file__).with_name("fake_train.py")
BOUND_S = 600.0
LONG = "1000000"


class Runs:
    """Starts `evenstep` processes; `close` kills them and their children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *args: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "evenstep", *map(str, args)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def start_in(self, terminal: int, *args: str | Path) -> subprocess.Popen[str]:
        """As the first process of a terminal."""
        setsid = ["setsid", "--ctty", sys.executable, "-m", "evenstep", *map(str, args)]
        env = {**os.environ, "PYTHONPATH": PYTHONPATH}
        process = subprocess.Popen(
            setsid,
            cwd=self.folder,
            env=env,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return ended(self.start(*args))

    def close(self) -> None:
        for process in self._started:
            for child in (
                psutil.Process(process.pid).children(recursive=True) if _is_running(process) else ()
            ):
                child.kill()
            process.kill()
            process.communicate()


def _is_running(process: subprocess.Popen[str]) -> bool:
    return process.poll() is None


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=BOUND_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def until(holds: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        if found := holds():
            return found
        time.sleep(0.02)
    raise AssertionError("timeout")


def events(run: Path) -> list[Any]:
    return [record.event for record in read(run / "journal.jsonl")[1]]


def generations(run: Path) -> list[int]:
    actions = [a for record in read(run / "journal.jsonl")[1] for a in record.actions]
    return [a.generation for a in actions if isinstance(a, Regroup)]


def workers_of(run: Path) -> list[psutil.Process]:
    """Live worker processes of a run."""
    found = []
    for process in psutil.process_iter(["environ"]):
        environ = process.info["environ"] or {}
        if environ.get("EVENSTEP_TOKEN_FILE") == str(run / "token"):
            found.append(process)
    return found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()
    for process in workers_of(tmp_path / "run"):
        process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_run_trains_to_the_end(runs: Runs, run: Path) -> None:
    done = runs.run("run", "--workers", "3", "--run", run, SCRIPT, "30")
    assert done.returncode == 0
    assert "trained to the end" in done.stderr
    assert re.search(r"^\d\d:\d\d:\d\d evenstep: generation 1: ", done.stderr, re.MULTILINE)
    for worker in ("w0", "w1", "w2"):
        assert f"[{worker}] {worker} begins 1 of 3\n" in done.stdout
        assert f"{worker} begins 1 of 3\n" in (run / "logs" / f"{worker}.log").read_text()
    assert (run / "token").read_text().strip() not in done.stdout + done.stderr
    assert generations(run) == [1]
    assert workers_of(run) == []
    assert f"  journal       {run}/journal.jsonl\n" in done.stderr
    assert f"  report        `evenstep report {run}` writes {run}/report.html\n" in done.stderr


def test_by_default_the_folder_is_named_after_time_and_script(runs: Runs) -> None:
    assert runs.run("run", SCRIPT, "1").returncode == 0
    (found,) = (runs.folder / "runs").iterdir()
    assert found.name.endswith("-fake_train")
    assert (found / "journal.jsonl").exists()


def test_arguments_after_the_script_are_its_own(runs: Runs, run: Path, tmp_path: Path) -> None:
    script = tmp_path / "args.py"
    script.write_text("import sys; print(sys.argv[1:])")
    done = runs.run(
        "run", "--run", run, script, "--lr", "0.1", "--workers", "7", "--help", "--", "x"
    )
    assert "[w0] ['--lr', '0.1', '--workers', '7', '--help', '--', 'x']" in done.stdout
    # It exited without joining.
    assert done.returncode == 1
    assert "does the script call evenstep.join()?" in done.stderr


@pytest.mark.parametrize("wrong", ["raise", "import", "after"])
def test_a_script_that_fails_is_shown_last(runs: Runs, run: Path, wrong: str) -> None:
    message = {
        "raise": "ValueError: the data is bad",
        "import": "ImportError: no module named tensorbored",
        "after": "RuntimeError: cannot save the model",
    }[wrong]
    done = runs.run("run", "--workers", "3", "--run", run, SCRIPT, "30", wrong, "w1")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(message)
    assert "Traceback (most recent call last)" in done.stderr
    assert workers_of(run) == []


def test_a_worker_killed_while_it_saves_its_model_fails_the_run(runs: Runs, run: Path) -> None:
    done = runs.run("run", "--workers", "3", "--run", run, SCRIPT, "30", "killed after", "w1")
    assert done.returncode == 1
    assert "evenstep: w1 was ended by SIGKILL; run folder" in done.stderr


def test_a_killed_worker_is_replaced_under_a_new_name(runs: Runs, run: Path) -> None:
    done = runs.run("run", "--workers", "3", "--run", run, SCRIPT, "100", "die", "w1")
    assert done.returncode == 0
    assert [e.workers[0].id for e in events(run) if isinstance(e, Joined)] == ["w0", "w3"]
    (lost,) = [e for e in events(run) if isinstance(e, Lost)]
    assert lost.workers == ("w1",)
    assert generations(run) == [1, 2, 3]


def test_without_restarts_the_other_workers_train_on(runs: Runs, run: Path) -> None:
    args = ("--workers", "3", "--restarts", "0", "--run", run, SCRIPT, "30", "die", "w0")
    done = runs.run("run", *args)
    assert done.returncode == 0
    assert [e.workers for e in events(run) if isinstance(e, Lost)] == [("w0",)]
    assert generations(run) == [1, 2]


def test_a_run_that_loses_all_workers_fails(runs: Runs, run: Path) -> None:
    args = ("--workers", "2", "--restarts", "1", "--run", run, SCRIPT, "30", "die", "all")
    done = runs.run("run", *args)
    assert done.returncode == 1
    assert "no worker is left" in done.stderr
    assert "SIGKILL" in done.stderr


def test_a_worker_that_exits_by_itself_ends_the_run(runs: Runs, run: Path) -> None:
    done = runs.run("run", "--workers", "2", "--run", run, SCRIPT, "30", "exit", "w1")
    assert done.returncode == 1
    assert "w1 ended with exit code 7" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stopped_run_resumes_where_it_was(runs: Runs, run: Path, number: signal.Signals) -> None:
    process = runs.start("run", "--workers", "2", "--run", run, SCRIPT, LONG)
    until(lambda: _steps(run) > 3)
    process.send_signal(number)
    done = ended(process)
    assert done.returncode == 0
    assert f"stopped: {number.name}" in done.stderr
    assert isinstance(events(run)[-1], Left)
    assert workers_of(run) == []
    (checkpoint,) = (run / "checkpoints").iterdir()
    steps = _steps(run)

    again = runs.run("run", "--resume", run, SCRIPT, str(steps + 5))
    assert again.returncode == 0
    assert f"w2 is here, resuming {checkpoint}" in again.stdout
    first, second = generations(run)
    assert first == 1
    assert second > 2, "the number under which the end was announced is not used again"
    assert f"w3 begins {second} of 2" in again.stdout  # as many as before, under new names


@pytest.mark.parametrize("both", [False, True])
def test_a_run_whose_output_nobody_reads_stops_gracefully(
    runs: Runs, run: Path, both: bool
) -> None:
    """As in `evenstep run ... | head` and `2>&1 | head`; the script prints nothing afterwards."""
    process = runs.start("run", "--workers", "2", "--run", run, SCRIPT, LONG)
    assert process.stdout is not None
    assert process.stderr is not None
    until(lambda: _steps(run) > 3)
    process.stdout.close()
    if both:
        process.stderr.close()
    assert process.wait(BOUND_S) == 0
    assert both or "stopped: the reader of its output is gone" in process.stderr.read()
    assert list((run / "checkpoints").iterdir())
    assert workers_of(run) == []


def test_a_closed_terminal_stops_a_run_gracefully(runs: Runs, run: Path) -> None:
    """SIGHUP comes, and every write to the terminal fails."""
    ours, terminal = pty.openpty()
    process = runs.start_in(terminal, "run", "--workers", "2", "--run", run, SCRIPT, LONG)
    os.close(terminal)
    until(lambda: _steps(run) > 3)
    os.close(ours)
    assert process.wait(BOUND_S) == 0
    assert list((run / "checkpoints").iterdir())
    assert workers_of(run) == []


class Clocked:
    """`evenstep run` in this process, on a fake clock."""

    def __init__(self, folder: Path, *args: str, **options: Any) -> None:
        self.now_s, self.num_reads = 0.0, 0
        self._made = RunFolder.make(folder)
        command = [str(SCRIPT), *args]
        terms = Terms(run=str(folder))
        options |= {"size_asked": True, "clock": self._clock}
        self.run = LocalRun(self._made, terms, 2, command, **options)

    def _clock(self) -> float:
        self.num_reads += 1
        return self.now_s

    def run_to_end(self, meanwhile: Callable[[], Awaitable[None]]) -> Ending:
        async def both() -> Ending:
            ending = asyncio.create_task(self.run.run_to_end("127.0.0.1", 0, None))
            try:
                await meanwhile()
                return await asyncio.wait_for(ending, BOUND_S)
            finally:
                ending.cancel()
                await asyncio.wait([ending])

        try:
            return asyncio.run(both())
        finally:
            self._made.close()

    async def until_all_say(self, words: str) -> None:
        logs = [self._made.logs / f"w{n}.log" for n in range(2)]
        async with asyncio.timeout(BOUND_S):
            while not all(log.exists() and words in log.read_text() for log in logs):
                await asyncio.sleep(0.02)


@pytest.fixture
def pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers import what the script imports."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


@pytest.mark.usefixtures("pythonpath")
def test_signals_in_quick_succession_are_one_request_and_a_later_one_kills(run: Path) -> None:
    clocked = Clocked(run, LONG, "hang", "all")

    async def meanwhile() -> None:
        await clocked.until_all_say("hangs")
        clocked.run.on_signal(signal.SIGTERM)
        clocked.now_s += DEBOUNCE_S / 2
        clocked.run.on_signal(signal.SIGTERM)  # as `timeout` does
        assert clocked.run._service.state.ending is None
        clocked.now_s += DEBOUNCE_S
        clocked.run.on_signal(signal.SIGINT)

    ending = clocked.run_to_end(meanwhile)
    assert not ending.ok
    assert ending.why == "killed by SIGINT before it could stop gracefully"
    assert workers_of(run) == []


@pytest.mark.usefixtures("pythonpath")
@pytest.mark.parametrize(("script", "num_signals"), [("busy after", 1), ("stubborn after", 2)])
def test_a_signal_after_training_ends_the_scripts_and_the_run_still_succeeds(
    run: Path, script: str, num_signals: int
) -> None:
    clocked = Clocked(run, "3", script, "all")

    async def meanwhile() -> None:
        await clocked.until_all_say("saves its model")
        for _ in range(num_signals):
            clocked.run.on_signal(signal.SIGINT)
            clocked.now_s += DEBOUNCE_S

    ending = clocked.run_to_end(meanwhile)
    assert ending.ok
    assert ending.why == "trained to the end; SIGINT ended scripts that still ran: w0, w1"
    assert workers_of(run) == []


@pytest.mark.usefixtures("pythonpath")
def test_a_worker_that_has_left_is_terminated_if_it_does_not_exit(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clocked = Clocked(run, LONG, "linger", "w1", leave_s=0.05)

    async def meanwhile() -> None:
        while not (run / "steps").exists():
            await asyncio.sleep(0.02)
        clocked.run.on_signal(signal.SIGINT)
        while "waiting for the processes of w1 to end" not in caplog.text:
            await asyncio.sleep(0.02)
        clocked.now_s += 0.05

    with caplog.at_level("INFO", "evenstep"):
        ending = clocked.run_to_end(meanwhile)
    assert ending.ok
    assert "w1 has left the run but is still running after 0.05 s: terminating it" in caplog.text
    assert workers_of(run) == []


@pytest.mark.usefixtures("pythonpath")
def test_a_script_that_has_trained_to_the_end_may_run_on(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clocked = Clocked(run, "3", "busy after", "all", leave_s=0.05)

    async def meanwhile() -> None:
        await clocked.until_all_say("saves its model")
        while "waiting for the processes of w0, w1 to end" not in caplog.text:
            await asyncio.sleep(0.02)
        clocked.now_s += 1.0
        num_reads = clocked.num_reads
        while clocked.num_reads < num_reads + 3 and "terminating" not in caplog.text:
            await asyncio.sleep(0.02)  # past the deadline
        clocked.run.on_signal(signal.SIGINT)

    with caplog.at_level("INFO", "evenstep"):
        assert clocked.run_to_end(meanwhile).ok
    assert "terminating it" not in caplog.text


def test_workers_outlive_a_coordinator_and_the_next_one_adopts_them(runs: Runs, run: Path) -> None:
    process = runs.start("run", "--workers", "2", "--run", run, SCRIPT, LONG)
    until(lambda: _steps(run) > 3)
    pids = {worker.pid for worker in workers_of(run)}
    process.kill()
    process.communicate()
    assert {worker.pid for worker in workers_of(run)} == pids

    again = runs.start("run", "--resume", run, SCRIPT, LONG)
    until(lambda: _said(run, "w0 is back") and _said(run, "w1 is back"))
    until(lambda: _ids(runs, run) == ["w0", "w1"])
    assert generations(run) == [1]
    # The new coordinator notices the end of a worker that is not its child.
    next(worker for worker in workers_of(run) if worker.environ()["EVENSTEP_WORKER"] == "w1").kill()
    until(lambda: _ids(runs, run) == ["w0", "w2"])
    again.send_signal(signal.SIGINT)
    done = ended(again)
    assert done.returncode == 0
    assert "[w0] w0 is back" in done.stdout
    assert workers_of(run) == []


def test_a_resumed_run_has_the_size_that_was_last_asked_for(runs: Runs, run: Path) -> None:
    process = runs.start("run", "--workers", "1:4", "--run", run, SCRIPT, LONG)
    until(lambda: _steps(run) > 3)
    assert runs.run("scale", run, "2").returncode == 0
    until(lambda: _ids(runs, run) == ["w0", "w1"])
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 0
    again = runs.start("run", "--workers", "1:4", "--resume", run, SCRIPT, LONG)
    until(lambda: _said(run, "w3 begins"))
    until(lambda: _ids(runs, run) == ["w2", "w3"])
    again.send_signal(signal.SIGINT)
    assert ended(again).returncode == 0


def test_a_run_can_be_stopped_before_training_begins(runs: Runs, run: Path, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time; print('importing', flush=True); time.sleep(600)")
    process = runs.start("run", "--workers", "2", "--run", run, script)
    until(lambda: _said(run, "importing"))
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 0
    assert workers_of(run) == []


def test_operators_can_see_and_change_a_run(runs: Runs, run: Path) -> None:
    process = runs.start("run", "--workers", "2:4", "--run", run, SCRIPT, LONG)
    until(lambda: _steps(run) > 3)
    first, head, *rows = runs.run("status", run).stdout.splitlines()
    assert first.startswith("training: generation 1, step ")
    assert head.split() == ["worker", "rank", "share", "compute", "wait", "state"]
    assert [row.split()[:3] for row in rows] == [["w0", "0", "32"], ["w1", "1", "32"]]

    assert runs.run("scale", run, "4").stdout == "asked for 4 workers\n"
    until(lambda: _ids(runs, run) == ["w0", "w1", "w2", "w3"])
    assert "this run has 2 to 4 workers" in runs.run("scale", run, "5").stderr
    assert runs.run("drain", run, "w0").returncode == 0
    until(lambda: _ids(runs, run) == ["w1", "w2", "w3"])
    assert runs.run("scale", run, "2").returncode == 0
    until(lambda: len(_ids(runs, run)) == 2)
    refused = runs.run("drain", run, "w0")
    assert refused.returncode == 2
    assert "no worker w0" in refused.stderr

    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 0
    gone = runs.run("status", run)
    assert gone.returncode == 2
    assert "has the run ended?" in gone.stderr


def test_evenstep_join_adds_a_worker_that_leaves_on_sigterm(runs: Runs, run: Path) -> None:
    process = runs.start("run", "--workers", "1", "--run", run, SCRIPT, LONG)
    until(lambda: _steps(run) > 3)
    address = (run / "address").read_text().strip()
    guest = runs.start("join", "--token-file", run / "token", address, SCRIPT, LONG)
    until(lambda: _ids(runs, run) == ["w0", "w1"])
    guest.send_signal(signal.SIGTERM)
    left = ended(guest)
    assert left.returncode == 75
    assert "w1 begins 2 of 2" in left.stdout
    assert "SIGTERM: leaving at the end of the step" in left.stderr
    assert _ids(runs, run) == ["w0"]
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 0


def test_joining_with_the_wrong_token_is_refused_before_the_script_starts(
    runs: Runs, run: Path, tmp_path: Path
) -> None:
    process = runs.start("run", "--run", run, SCRIPT, LONG)
    until(lambda: _steps(run) > 0)
    (tmp_path / "wrong").write_text("60d1" * 16)
    address = (run / "address").read_text().strip()
    refused = runs.run("join", "--token-file", tmp_path / "wrong", address, SCRIPT, LONG)
    assert refused.returncode == 2
    assert "token" in refused.stderr
    assert refused.stdout == ""
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--policy", "autoo", SCRIPT), "unknown name 'autoo'; did you mean auto?"),
        (("--set", "polcy=auto", SCRIPT), "unknown setting polcy; did you mean policy?"),
        (("--set", "batch.size=8", SCRIPT), "belongs to the script"),
        (("--workers", "many", SCRIPT), "expected N or MIN:MAX"),
        (("--workers", "8:2", SCRIPT), "need MIN <= MAX and MAX >= 1"),
        (("--workrs", "8", SCRIPT), "No such option"),
        (("--min", "0", SCRIPT), "--min"),
        (("--lease", "0", SCRIPT), "--lease"),
        (("--silence", "0", SCRIPT), "--silence"),
        (("--resume", "elsewhere", SCRIPT), "is not the folder of a run"),
        (("--run", "a", "--resume", "b", SCRIPT), "give one of them"),
        (("--tls-cert", SCRIPT, SCRIPT), "give both, or neither"),
        (("--tls-cert", SCRIPT, "--tls-key", SCRIPT, SCRIPT), "holds no certificate"),
        (("--tls", "--tls-cert", SCRIPT, "--tls-key", SCRIPT, SCRIPT), "give one of them"),
        (("--host", "192.0.2.1", SCRIPT), "cannot listen"),
        (("missing.py",), "does not exist"),
        ((), "Missing argument"),
    ],
)
def test_bad_input_is_refused(runs: Runs, args: tuple[Any, ...], message: str) -> None:
    done = runs.run("run", *args)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_resumed_run_keeps_its_settings(runs: Runs, run: Path) -> None:
    assert runs.run("run", "--run", run, "--policy", "uniform", SCRIPT, "3").returncode == 0
    assert read(run / "journal.jsonl")[0].settings.policy.name == "uniform"
    done = runs.run("run", "--resume", run, "--policy", "auto", SCRIPT, "3")
    assert done.returncode == 2
    assert "policy: stays as the run's journal has it" in done.stderr
    refused = runs.run("run", "--resume", run, "--workers", "1:4", SCRIPT, "3")
    assert refused.returncode == 2
    assert "--workers: MIN:MAX stays as the run began, 1;" in refused.stderr
    taken = runs.run("run", "--run", run, SCRIPT, "3")
    assert taken.returncode == 2
    assert "holds a run already" in taken.stderr


def test_a_resumed_run_keeps_its_bounds(runs: Runs, run: Path) -> None:
    bounds = ("--workers", "2:4")
    assert runs.run("run", "--run", run, *bounds, SCRIPT, "3").returncode == 0
    settings = read(run / "journal.jsonl")[0].settings
    assert (settings.scaling.min_workers, settings.workers.min, settings.workers.max) == (2, 1, 4)
    for given in ("2:8", "1:4"):
        refused = runs.run("run", "--resume", run, "--workers", given, SCRIPT, "6")
        assert refused.returncode == 2
        assert "--workers: MIN:MAX stays as the run began, 2:4; " in refused.stderr
    refused = runs.run("run", "--resume", run, "--workers", "5", SCRIPT, "6")
    assert "--workers: at most 4, as the run began: got 5" in refused.stderr
    process = runs.start("run", "--resume", run, "--workers", "3", SCRIPT, LONG)
    until(lambda: _said(run, "begins 2 of 3"))
    assert "this run has 2 to 4 workers" in runs.run("scale", run, "5").stderr
    process.send_signal(signal.SIGINT)
    assert ended(process).returncode == 0


def _steps(run: Path) -> int:
    file = run / "steps"
    return int(file.read_text()) if file.exists() else 0


def _said(run: Path, words: str) -> bool:
    return any(words in log.read_text() for log in (run / "logs").glob("*.log"))


def _ids(runs: Runs, run: Path) -> list[str]:
    done = runs.run("status", run, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    return sorted(w["worker"] for w in status["workers"] if w["state"] == "training")
