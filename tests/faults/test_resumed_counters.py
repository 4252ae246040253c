"""What a loop counts by itself begins anew in a run that is resumed: it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cluster import Cluster

SCRIPT = Path(__file__).with_name("scheduled.py")


@pytest.mark.parametrize("counter", [["--own"], []], ids=["its own", "session.step"])
def test_a_learning_rate_by_a_counter_of_ones_own_is_told_after_a_resume(
    tmp_path: Path, counter: list[str]
) -> None:
    with Cluster(tmp_path, workers=2, script=SCRIPT, args=counter) as run:
        run.until_step(4)
        run.ask("stop")
        assert run.wait() == 0
    with Cluster(tmp_path, workers=2, script=SCRIPT, args=counter) as run:
        run.until_training(2)
        assert run.finish() == 0
        assert "resuming from step-" in run.output()
        told = "has the optimizer settings of step 0 again (lr was "
        assert run.output().count(told) == len(counter)
