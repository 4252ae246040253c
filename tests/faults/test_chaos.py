"""The same run, whatever the cluster does: workers join, leave and are killed at random."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.faults.conftest import Alone
from tests.faults.running import Running, same

EVENTS = int(os.environ.get("EVENSTEP_CHAOS_EVENTS", "8"))  # 100 and more by hand


@pytest.mark.timeout(120 + 10 * EVENTS)
@pytest.mark.parametrize("seed", [0])
def test_a_run_through_chaos_ends_where_one_process_ends(
    seed: int, tmp_path: Path, alone: Alone
) -> None:
    chance = np.random.default_rng(seed)
    args = ["--epochs", str(25 * EVENTS), "--pause", "0.01"]
    options = ["--restarts", "0", "--checkpoint-every", "1"]
    with Running(tmp_path, workers="5:7", options=options, args=args) as run:
        status = run.until_training(5)
        for _ in range(EVENTS):
            there = run.pids()
            what = chance.choice(["kill", "drain", "grow"]) if len(there) > 3 else "grow"
            worker = str(chance.choice(list(there)))
            generation = status["generation"]
            if what == "kill":
                run.signal(worker, signal.SIGKILL)
                status = run.until_training(len(there) - 1, after=generation)
            elif what == "drain":
                run.ask("drain", worker=worker)
                status = run.until_training(len(there) - 1, after=generation)
            else:
                run.ask("scale", num_workers=len(there) + 1)
                status = run.until_training(len(there) + 1, after=generation)
            status = run.until_step(status["step"] + int(chance.integers(1, 5)))
        run.ask("stop")
        assert run.finish() == 0
        trained = status["step"]
    with Running(tmp_path, workers="3", args=[*args[:1], str(trained // 10 + 2)]) as run:
        assert run.finish() == 0
        assert "going on from" in run.said()
        ends = run.results().values()
        assert len(ends) == 3
        truth = alone("--epochs", str(trained // 10 + 2))
        assert all(same(result, truth) for result in ends)
