"""`evenstep run` on disks that are full, fail or lose what was written, and killed while it writes.

Training goes on, files are written again when that is possible, and the run ends where one process
ends.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.chaos.cluster import ChaosRun, send
from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP, CliRun
from bench.testbed.disk import Disk, FailingDisk, failing_disk, small_disk
from bench.testbed.fork_server import fork_server
from bench.testbed.live_run import HELD, SCRIPT, same, until

from evenstep.journal import read
from evenstep.train.recover.checkpoint import CheckpointError, load_checkpoint
from tests.faults.conftest import Alone

ARGS = [*HELD, "--prints", "2000"]
FILES = ("journal.jsonl", "membership.jsonl", "term")


def evenstep(*args: str | Path) -> str:
    command = [str(EVENSTEP), *map(str, args)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(tmp_path: Path, folder: Path, env: Mapping[str, str] | None = None) -> CliRun:
    return CliRun(
        tmp_path,
        workers="3",
        args=ARGS,
        options=["--checkpoint-every", "0.2", "--keep", "3", "--restarts", "1000"],
        script=SCRIPT.with_name("warm_start.py"),
        env={**ENVIRONMENT, "FORK_SERVER": fork_server().path, **(env or {})},
        run_folder=folder,
    )


def told(run: CliRun, words: str) -> int:
    return len(re.findall(words, run.output()))


def assert_told_once_each_time(run: CliRun, file: str) -> None:
    """There may be room for a while: as old checkpoints are removed, before a new one takes it."""
    said = re.findall(f"{file}: (cannot be|is) written", run.output())
    assert said
    assert said == ["cannot be", "is"] * (len(said) // 2)


def steps_on(run: CliRun, num: int) -> None:
    run.until_step(run.status()["step"] + num)


def assert_same_as(alone: Alone, run: CliRun) -> None:
    assert run.results()
    assert all(same(result, alone(*ARGS, *run.epochs)) for result in run.results().values())


def until_it_shows(run: CliRun, files: Sequence[str]) -> None:
    """Have the coordinator write until it cannot; the last pages of its files may have room."""

    def shows(status: dict[str, Any]) -> bool:
        problems = " ".join(status["problems"])
        return all(f"{file}: cannot be written" in problems for file in files)

    while not shows(status := run.until_training(3)):
        run.signal(list(run.pids())[-1])
        run.until_training(3, after=status["generation"])


@pytest.mark.long
@pytest.mark.parametrize(("make_disk", "files"), [(small_disk, FILES), (failing_disk, FILES[:1])])
def test_a_full_disk_is_borne_and_written_again_when_there_is_room(
    tmp_path: Path,
    alone: Alone,
    make_disk: Callable[..., AbstractContextManager[Disk]],
    files: Sequence[str],
) -> None:
    """The failing disk tells of it only when it is asked to sync, so only for the journal."""
    with make_disk(tmp_path / "disk", "32m") as disk:
        folder = disk.path / "run"
        with start(tmp_path, folder) as run:
            run.until_step(20)
            disk.fill()
            until_it_shows(run, files)
            assert "journal.jsonl: cannot be written: No space left" in evenstep("status", folder)
            run.until(lambda status: "cannot write checkpoints" in " ".join(status["problems"]))
            steps_on(run, 50)
            disk.free()
            run.until(lambda status: not status["problems"])
            until(lambda: told(run, "checkpoints are written again") > 0)
            steps_on(run, 10)
            assert run.finish() == 0
            for file in files:
                assert_told_once_each_time(run, file)
            assert_same_as(alone, run)
            assert "each decided as recorded" in evenstep("replay", folder)


@pytest.mark.long
@pytest.mark.parametrize("fail", [FailingDisk.make_read_only, FailingDisk.shut_down])
def test_a_disk_that_fails_for_good_ends_no_training(
    tmp_path: Path, alone: Alone, fail: Callable[[FailingDisk], None]
) -> None:
    """With EROFS and with EIO. What was saved before stands."""
    witness = tmp_path / "witness"
    with failing_disk(tmp_path / "disk", "32m") as disk:
        folder = disk.path / "run"
        with start(tmp_path, folder, {"WITNESS": str(witness), "CLUSTER": "one"}) as run:
            run.until_step(20)
            until(lambda: any((folder / "checkpoints").glob("*.pt")))
            fail(disk)
            step = num_steps(witness)
            until(lambda: num_steps(witness) > step + 50)
            assert run.finish() == 0
            assert told(run, "journal.jsonl: cannot be written") == 2  # and once more at the end
            assert_same_as(alone, run)
        if fail is FailingDisk.make_read_only:
            shutil.copytree(folder, tmp_path / "copy")
            shutil.rmtree(run.out)
    if fail is FailingDisk.make_read_only:
        with start(tmp_path, tmp_path / "copy") as again:
            again.until_step(20)
            assert again.finish() == 0
            assert_same_as(alone, again)


def num_steps(witness: Path) -> int:
    return witness.read_bytes().count(b"\n")


# Killed while it writes, and damaged afterwards.


def kill_all(run: ChaosRun) -> None:
    pids = run.everybody()
    run.kill_coordinator()
    send(pids, signal.SIGKILL)


def assert_whole(folder: Path) -> None:
    """Every record but the last, which may be torn, and every checkpoint can be read."""
    for _ in read(folder / "journal.jsonl")[1]:
        pass
    for path in (folder / "checkpoints").glob("*.pt"):
        try:
            load_checkpoint(path)
        except CheckpointError:
            assert not path.exists()  # an older one, removed meanwhile


@pytest.mark.long
def test_who_is_killed_while_writing_leaves_whole_records_and_checkpoints(
    tmp_path: Path, alone: Alone, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with ChaosRun(tmp_path, 3, None, None) as run:
        parts = run.folder / "checkpoints"
        for who in ["coordinator", "leader", "everybody"] * 4:
            run.settle(3)
            if who == "coordinator":
                send(run.roster()[-1:], signal.SIGKILL)  # so that the journal is written
            else:
                until(lambda: any(parts.glob("*.part")))
            time.sleep(rng.exponential(0.1 if who == "coordinator" else 0.003))
            if who == "everybody":
                kill_all(run)
            elif who == "leader":
                send(run.roster()[:1], signal.SIGKILL)
            else:
                run.kill_coordinator()
            assert_whole(run.folder)
            if who != "leader":
                run.restart()
        run.settle(3)
        assert run.finish() == 0
        assert not told(run, "given up|damaged|Traceback")
        assert_same_as(alone, run)


@pytest.mark.long
def test_flipped_bytes_in_the_journal_and_in_the_newest_checkpoint(
    tmp_path: Path, alone: Alone, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with ChaosRun(tmp_path, 3, None, None) as run:
        checkpoints = run.folder / "checkpoints"
        until(lambda: len(list(checkpoints.glob("*.pt"))) >= 2)
        send(run.roster()[-1:], signal.SIGKILL)
        run.settle(3)
        kill_all(run)
        journal = run.folder / "journal.jsonl"
        content = bytearray(journal.read_bytes())
        header = content.index(b"\n")
        content[int(rng.integers(header + 1, len(content) - 1))] ^= 0xFF
        journal.write_bytes(content)
        newest = max(checkpoints.glob("*.pt"))
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 0xFF
        newest.write_bytes(content)
        run.restart()
        run.settle(3)
        assert (
            told(run, r"lines from there on \(\d+ bytes\) are given up, the damaged file is") == 1
        )
        assert told(run, f"{newest.name}.*; kept as {newest.name}.damaged, trying an older") == 1
        assert (run.folder / "journal.jsonl.damaged-1").exists()
        assert run.finish() == 0
        assert_whole(run.folder)  # the one that it ends by naming, too
        assert_same_as(alone, run)
