"""TRL's SFTTrainer with the mixin, compared with itself in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.testbed.fork_server import fork_server

from tests.faults.cluster import Cluster

SCRIPT = Path(__file__).with_name("trl_train.py")
PRELOAD = ("evenstep.adapters.hf",)

pytestmark = pytest.mark.long


def test_workers_are_killed_while_sft_trainer_accumulates(tmp_path: Path) -> None:
    """Sentences of different lengths: the mean loss is over the tokens of all workers."""
    pytest.importorskip("trl", reason='pip install "evenstep[adapters]"')
    argv: list[str | Path] = [SCRIPT, "--out", tmp_path, "--plain"]
    log = tmp_path / "plain-log"
    assert fork_server(*PRELOAD).run(argv, {}, log).wait() == 0, log.read_text()
    expected = torch.load(tmp_path / "plain.pt", weights_only=True)
    faults = (("rank1", "bucket", 4), ("leader", "bucket", 9))
    with Cluster(tmp_path, workers=4, script=SCRIPT, preload=PRELOAD, faults=faults) as cluster:
        assert cluster.finish() == 0
        assert len(cluster.results()) == 2
        for result in cluster.results().values():
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
            for name, tensor in expected["model"].items():
                error = (result["model"][name] - tensor).abs().max()
                assert float(error) <= 1e-6 * max(1.0, float(tensor.abs().max())), name
