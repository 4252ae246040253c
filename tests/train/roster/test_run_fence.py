"""Checkpoints go to this run's folder only, and only while the run goes on with their writer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from bench.testbed.live_run import until
from torch import nn

from evenstep.coordinate.run_folder import RunFolder
from evenstep.coordinate.term import Claim
from evenstep.errors import ConfigError
from evenstep.identity import run_id
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Alive
from evenstep.train.failpoint import on_failpoint
from evenstep.train.recover.checkpoint import Checkpoints
from evenstep.train.recover.state import TrainingState
from evenstep.train.roster.checkpointing import open_checkpoints
from evenstep.train.roster.control import Control
from tests.coordinate.fake import ready
from tests.coordinate.hosted import Hosted, hosted


@contextmanager
def joined(run: Hosted) -> Iterator[tuple[Control, Checkpoints]]:
    """A worker of the run's first generation, and the checkpoints that it writes."""
    where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
    control = Control(where, lambda: Alive(generation=0, step=0, waiting=False))
    control.send(ready())
    until(lambda: control.newest == 1)
    checkpoints = open_checkpoints(control.welcome, run.token, control)
    assert checkpoints is not None
    try:
        yield control, checkpoints
    finally:
        control.close()


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, TrainingState({"net": nn.Linear(2, 2)}, {}, {"step": step}))
    checkpoints.close()


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("checkpoints/*.pt"))


def test_a_checkpoint_carries_run_term_and_generation(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run, joined(run) as (_, checkpoints):
        save(checkpoints, 5)
        (path,) = (tmp_path / "run").glob("checkpoints/*.pt")
        content = torch.load(path, weights_only=True)
        assert [content[key] for key in ("run", "term", "generation")] == [run_id(run.token), 1, 1]
        assert run.token.encode() not in path.read_bytes()
        found = checkpoints.newest()
        assert found is not None
        assert found.step == 5


def test_an_orphan_does_not_make_a_removed_folder_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with hosted(folder) as run, joined(run) as (_, checkpoints):
        shutil.rmtree(folder)
        for step in (5, 6):
            save(checkpoints, step)
        assert not folder.exists()
        assert caplog.text.count("does not hold this run") == 1
        RunFolder.make(folder).close()
        save(checkpoints, 7)  # the folder of another run
        assert steps(folder) == []
        shutil.rmtree(folder)


def test_checkpoints_of_another_run_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hosted(tmp_path / "old") as run, joined(run) as (_, checkpoints):
        save(checkpoints, 817)
        save(Checkpoints(tmp_path / "old" / "checkpoints"), 3)  # as an older evenstep wrote it
        old = run_id(run.token)
    with hosted(tmp_path / "run") as run, joined(run) as (_, checkpoints):
        for path in (tmp_path / "old").glob("checkpoints/*.pt"):
            shutil.copy(path, tmp_path / "run" / "checkpoints")
        found = checkpoints.newest()
        assert found is not None
        assert found.step == 3
        said = f"step-00000817.pt: is of run {old}, and this is run {run_id(run.token)}"
        assert said in caplog.text


def test_a_writer_that_the_run_has_left_behind_is_refused_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another coordinator, which this worker cannot reach, has given it up."""
    folder = tmp_path / "run"
    with ExitStack() as stack:
        with hosted(folder) as run:
            control, checkpoints = stack.enter_context(joined(run))
            save(checkpoints, 5)
        until(lambda: not control.connected)
        claim = Claim(folder, 1.0)
        save(checkpoints, 6)  # nobody has gone on yet: these are the newest steps of the run
        assert steps(folder) == [5, 6]
        assert control.goodbye is None
        claim.move_fence(2)
        for step in (7, 8):
            save(checkpoints, step)
        assert steps(folder) == [5, 6]
        assert caplog.text.count("the run goes on without this worker") == 1
        assert "term 1 and generation 1" in str(control.goodbye)


def test_a_fence_that_moves_while_a_checkpoint_is_written_is_obeyed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with hosted(folder) as run, joined(run) as (control, checkpoints):
        claim = Claim(folder, 1.0)
        on_failpoint(lambda _: claim.move_fence(2))
        try:
            until(lambda: control.goodbye is not None)
            save(checkpoints, 5)
        finally:
            on_failpoint(None)
        assert steps(folder) == []
        assert not list(folder.glob("checkpoints/*.part"))


def test_a_new_run_among_old_checkpoints_is_refused(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run, joined(run) as (_, checkpoints):
        save(checkpoints, 5)
    (tmp_path / "run" / "token").unlink()
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        RunFolder.make(tmp_path / "run")
