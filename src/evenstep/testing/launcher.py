"""The contract of launchers, on an engine that the author of one has at hand."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from evenstep.ports import EngineJob, Launcher, Observed, Stage, WorkerKind
from evenstep.types import WorkerId


class LauncherContract:
    """What every launcher does. Subclass it as `TestMine`, with its engine at hand.

    `made` makes a launcher for a job whose only kind is `kind`. Workers must see the test's folder.
    """

    kind: ClassVar[WorkerKind] = WorkerKind(name="")
    remembers: ClassVar[bool] = True  # the engine shows workers to later launchers of the run

    def made(self, job: EngineJob) -> Launcher:
        raise NotImplementedError

    def job(self, folder: Path) -> EngineJob:
        """A job whose workers run until they are told to end; see `end`."""
        script = folder / "worker.py"
        script.write_text(_WORKER)
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "token").write_text(_TOKEN + "\n")
        env = {
            "EVENSTEP_COORDINATOR": "127.0.0.1:1",
            "EVENSTEP_TOKEN_FILE": str(folder / "token"),
        }
        return EngineJob(
            run=f"contract-{folder.name}-{zlib.crc32(str(folder).encode()):08x}",
            folder=folder,
            command=(str(script), str(folder)),
            env=env,
            token=_TOKEN,
            kinds={self.kind.name: self.kind},
            options={},
        )

    @contextmanager
    def opened(self, folder: Path) -> Iterator[Launcher]:
        """A launcher; all of its workers have ended afterwards."""
        launcher = self.made(self.job(folder))
        try:
            yield launcher
        finally:
            self.end(folder, 0)
            launcher.stop([w for w, o in launcher.observe().items() if o.stage is not Stage.ENDED])
            self.until(launcher, lambda shown: all(o.stage is Stage.ENDED for o in shown.values()))
            launcher.close()

    @staticmethod
    def end(folder: Path, code: int) -> None:
        """Have all workers end with an exit code."""
        part = folder / "end.part"
        part.write_text(str(code))
        part.rename(folder / "end")

    @staticmethod
    def until(
        launcher: Launcher, holds: Callable[[Mapping[WorkerId, Observed]], bool]
    ) -> Mapping[WorkerId, Observed]:
        """Wait until what is observed satisfies a condition."""
        while not holds(shown := launcher.observe()):
            time.sleep(_POLL_S)
        return shown

    @staticmethod
    def until_runs(folder: Path, *workers: WorkerId) -> None:
        """Wait until the script runs on these workers."""
        while not all((folder / worker).exists() for worker in workers):
            time.sleep(_POLL_S)

    def test_nothing_is_shown_of_workers_that_were_not_asked_for(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as launcher:
            assert launcher.observe() == {}

    def test_workers_run_the_script_under_their_names(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as launcher:
            launcher.start(self.kind.name, ["w3", "w5"])
            self.until_runs(tmp_path, "w3", "w5")
            shown = self.until(launcher, lambda shown: len(_in(Stage.RUNNING, shown)) == 2)
            assert _in(Stage.RUNNING, shown) == {"w3", "w5"}
            assert "127.0.0.1:1" in (tmp_path / "w3").read_text()
            assert "token known: True" in (tmp_path / "w5").read_text()

    def test_the_token_is_on_no_command_line(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as launcher:
            launcher.start(self.kind.name, ["w0"])
            self.until_runs(tmp_path, "w0")
            told = [_read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
            assert not [line for line in told if _TOKEN.encode() in line]

    def test_an_exit_code_is_shown(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as launcher:
            for worker, code in (("w0", 0), ("w1", 3), ("w2", 75)):
                (tmp_path / "end").unlink(missing_ok=True)
                launcher.start(self.kind.name, [worker])
                self.until_runs(tmp_path, worker)
                self.end(tmp_path, code)
                shown = self.until(launcher, lambda shown: not _in(Stage.RUNNING, shown))
                assert shown[worker].exit_code == code

    def test_a_worker_that_is_stopped_is_asked_and_ends_and_the_others_run_on(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as launcher:
            launcher.start(self.kind.name, ["w0", "w1"])
            self.until_runs(tmp_path, "w0", "w1")
            launcher.stop(["w0"])
            shown = self.until(launcher, lambda shown: "w0" not in _in(Stage.RUNNING, shown))
            assert "w1" in _in(Stage.RUNNING, shown)
            while not (tmp_path / "w0.asked").exists():
                time.sleep(_POLL_S)

    def test_to_stop_workers_that_are_not_there_is_no_error(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as launcher:
            launcher.stop(["w7"])
            launcher.start(self.kind.name, ["w0"])
            self.until_runs(tmp_path, "w0")
            self.end(tmp_path, 0)
            self.until(launcher, lambda shown: "w0" not in _in(Stage.RUNNING, shown))
            launcher.stop(["w0", "w7"])

    def test_workers_outlive_their_launcher_and_the_next_one_shows_them(
        self, tmp_path: Path
    ) -> None:
        if not self.remembers:
            return
        first = self.made(self.job(tmp_path))
        first.start(self.kind.name, ["w0", "w2"])
        self.until_runs(tmp_path, "w0", "w2")
        first.close()
        with self.opened(tmp_path) as second:
            assert _in(Stage.RUNNING, second.observe()) == {"w0", "w2"}

    def test_another_run_s_workers_are_not_shown(self, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "other").mkdir()
        with self.opened(tmp_path / "one") as one, self.opened(tmp_path / "other") as other:
            one.start(self.kind.name, ["w0"])
            self.until_runs(tmp_path / "one", "w0")
            assert other.observe() == {}


_POLL_S = 0.05
_TOKEN = "contract-token-that-nobody-else-may-read"
_WORKER = """
import os, pathlib, signal, sys, time

folder, name = pathlib.Path(sys.argv[1]), os.environ["EVENSTEP_WORKER"]

def asked(*_):
    (folder / f"{name}.asked").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, asked)
file = os.environ.get("EVENSTEP_TOKEN_FILE", "")
token = os.environ.get("EVENSTEP_TOKEN") or open(file).read()
part = folder / f"{name}.part"
known = "contract-token" in token
part.write_text(f"{os.environ['EVENSTEP_COORDINATOR']}, token known: {known}")
part.rename(folder / name)
while not (folder / "end").exists():
    time.sleep(0.02)
sys.exit(int((folder / "end").read_text()))
"""


def _in(stage: Stage, shown: Mapping[WorkerId, Observed]) -> set[WorkerId]:
    return {worker for worker, observed in shown.items() if observed.stage is stage}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
