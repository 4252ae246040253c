"""Workers join, leave and are killed at random; the result stays that of one process."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.cli_run import CliRun
from tests.faults.conftest import Alone
from tests.faults.live_run import HELD, epoch_args, same

pytestmark = pytest.mark.long

SHRINK = ["kill", "drain", "kill while another is stopped"]
EVENTS = int(os.environ.get("EVENSTEP_CHAOS_EVENTS", "20"))  # 100 or more when run by hand


def is_gone(worker: str, status: dict[str, Any]) -> bool:
    """Whether the coordinator knows that a worker is gone."""
    return worker not in {w["worker"] for w in status["workers"] if w["state"] != "gone"}


@pytest.mark.timeout(900 + 60 * EVENTS)
def test_a_run_through_chaos_ends_where_one_process_ends(
    seed: int, tmp_path: Path, alone: Alone
) -> None:
    rng = np.random.default_rng(seed)
    options = ["--restarts", "0", "--checkpoint-every", "1"]
    with CliRun(tmp_path, workers="3:7", options=options, args=HELD) as run:
        run.until_training(3)
        run.ask("scale", num_workers=5)
        status = run.until_training(5)
        for _ in range(EVENTS):
            there, generation = run.pids(), status["generation"]
            few, many = len(there) <= 3, len(there) >= 7
            what = str(rng.choice([*([] if few else SHRINK), *([] if many else ["grow"])]))
            chosen = [str(w) for w in rng.choice(list(there), 2, replace=False)]
            if what == "grow":
                num = len(there) + 1
                run.ask("scale", num_workers=num)
            elif what == "drain":
                num = len(there) - 1
                run.ask("drain", worker=chosen[0])
            elif what == "kill":
                num = len(there) - 1
                run.signal(chosen[0], signal.SIGKILL)
            else:  # the stopped worker must not be taken for dead
                num = len(there) - 1
                run.signal(chosen[1], signal.SIGSTOP)
                os.kill(there[chosen[0]], signal.SIGKILL)
                run.until(partial(is_gone, chosen[0]))
                os.kill(there[chosen[1]], signal.SIGCONT)
            status = run.until_training(num, after=generation)
            status = run.until_step(status["step"] + int(rng.integers(1, 5)))
        run.ask("stop")
        assert run.wait() == 0
    args = epoch_args(status["step"] + 100)
    with CliRun(tmp_path, workers="3", args=args) as run:
        assert run.finish() == 0
        assert "resuming from" in run.output()
        ends = run.results().values()
        assert len(ends) == 3
        assert all(same(result, alone(*args)) for result in ends)
