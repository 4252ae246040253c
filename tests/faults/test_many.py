"""Many workers and many generations, without leaks."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from bench.testbed.cli_run import CliRun
from bench.testbed.live_run import HELD, same

from tests.faults.conftest import Alone

pytestmark = pytest.mark.long

WORKERS = int(os.environ.get("EVENSTEP_MANY_WORKERS", "10"))  # 64 when run by hand
GENERATIONS = int(os.environ.get("EVENSTEP_GENERATIONS", "60"))  # 1,000 when run by hand
WINDOW = 10  # generations per measurement


@pytest.mark.timeout(600 + 30 * WORKERS)
def test_many_workers_join_train_shrink_and_finish(tmp_path: Path, alone: Alone) -> None:
    args = ["--samples", "960", "--batch", "192", *HELD]
    few = max(2, WORKERS // 4)
    with CliRun(tmp_path, workers=f"{few}:{WORKERS}", args=args) as run:
        run.until_training(few)
        run.ask("scale", num_workers=WORKERS)
        before = run.until_training(WORKERS)["generation"]
        run.ask("scale", num_workers=few)
        step = run.until_training(few, after=before)["step"]
        run.ask("stop")
        assert run.wait() == 0
    whole = [*args, "--epochs", str(step // 5 + 5)]
    with CliRun(tmp_path, workers=str(few), args=whole) as run:
        assert run.finish() == 0
        ends = run.results().values()
        assert len(ends) == few
        assert all(same(end, alone(*whole)) for end in ends)


@pytest.mark.timeout(600 + 10 * GENERATIONS)
def test_memory_and_open_files_stay_flat_over_many_generations(tmp_path: Path) -> None:
    args, options = ["--epochs", "1000000"], ["--spares", "1"]
    with CliRun(tmp_path, workers="3:4", options=options, args=args) as run:
        generation = run.until_training(3)["generation"]
        run.ask("scale", num_workers=4)
        status = run.until_training(4, after=generation)
        first = status["generation"]
        watched = [psutil.Process(pid) for pid in (run.process.pid, *run.pids().values())]
        used: list[list[tuple[int, int]]] = []  # by process: open files, RSS in bytes
        while status["generation"] < first + GENERATIONS:
            num = 3 if (status["generation"] - first) % 2 == 0 else 4
            run.ask("scale", num_workers=num)
            status = run.until_training(num, after=status["generation"])
            used.append([(p.num_fds(), p.memory_info().rss) for p in watched])
        warm, last = lowest(used[GENERATIONS // 4 :][:WINDOW]), lowest(used[-WINDOW:])
        for (files, memory), (files_then, memory_then) in zip(warm, last, strict=True):
            assert files_then <= files + 16  # at most one old group is still closing
            assert memory_then <= memory * 1.1 + 8e6


def lowest(used: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The minimum by process: a group that was dropped takes a moment to close."""
    return [
        (min(files for files, _ in samples), min(memory for _, memory in samples))
        for samples in zip(*used, strict=True)
    ]
