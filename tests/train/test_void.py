"""Checkpoints of a worker whose lease ends in the midst of things: committed steps, or none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from evenstep.launch.environment import CoordinatorAddress
from evenstep.train.comm.group import WorkerLostError
from evenstep.train.join import elastic_session
from evenstep.train.recover.checkpoint import load_checkpoint
from evenstep.train.roster.elastic import ElasticRoster
from evenstep.train.roster.generations import LeaseOverError
from evenstep.train.session import Session
from tests.coordinate.hosted import Hosted, hosted

STEPS = 3  # of a batch of 4, before things happen
DATA = torch.utils.data.TensorDataset(torch.randn(64, 2, generator=torch.manual_seed(0)))


class Training:
    """A worker alone in its run, which saves checkpoints."""

    def __init__(self, session: Session, num_optimizers: int = 1) -> None:
        assert isinstance(session._roster, ElasticRoster)
        self.session, self.roster = session, session._roster
        self.model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=0.1) for _ in range(num_optimizers)
        ]
        session.prepare(self.model, *self.optimizers)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        session.register("average", self.average)
        self.loader = session.loader(DATA, batch=4)

    def backward(self, x: torch.Tensor) -> None:
        self.model.zero_grad()
        self.model(x).square().mean().backward()

    def step(self, x: torch.Tensor) -> None:
        self.backward(x)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.update_parameters(self.model)

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def lose_peer(self) -> None:
        """As when the group is lost within this step."""
        self.roster.lost(WorkerLostError("a peer is gone"))

    def end_lease(self) -> None:
        """As when nothing was heard of the coordinator for the length of a lease."""
        control = self.roster._tracker.control
        control.welcome = replace(control.welcome, lease_s=-1e9)  # one that is on its way is, too
        control._leased_s = 0.0


Body = Callable[[Training, torch.Tensor], None]


def train(run: Hosted, body: Body, num_optimizers: int = 1) -> dict[str, torch.Tensor]:
    """Some steps, then `body` with the next batch; the state after the last committed step."""
    where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
    committed: dict[str, torch.Tensor] = {}
    with suppress(LeaseOverError), elastic_session(where) as session:
        training = Training(session, num_optimizers)
        for (x,) in training.loader:
            assert not committed, "the lease is over"
            if session.step < STEPS:
                training.step(x)
                continue
            committed = training.copy()
            body(training, x)
            training.end_lease()
    return committed


def saved(folder: Path) -> list[dict[str, Any]]:
    return [load_checkpoint(path).tree for path in sorted(folder.glob("checkpoints/*.pt"))]


def void_in_the_forward_pass(training: Training, x: torch.Tensor) -> None:
    """The group is lost in a layer's all-reduce; the pass runs on and updates later layers."""
    training.lose_peer()
    training.step(x)


def void_in_the_backward_pass(training: Training, x: torch.Tensor) -> None:
    training.model(x)
    training.lose_peer()
    training.step(x)


@pytest.mark.parametrize("body", [void_in_the_forward_pass, void_in_the_backward_pass])
def test_a_void_step_leaves_no_trace_in_the_last_checkpoint(tmp_path: Path, body: Body) -> None:
    """The loop has run to the void step's end when the lease turns out to be over."""
    with hosted(tmp_path / "run") as run:
        committed = train(run, body)
    (tree,) = saved(tmp_path / "run")
    assert tree["plain"]["step"] == STEPS
    assert tree["things"]["average"]["n_averaged"] == STEPS
    for name, tensor in tree["models"]["model"].items():
        assert torch.equal(tensor, committed[name]), name


def test_an_object_registered_in_the_loop_is_undone_too(tmp_path: Path) -> None:
    def body(training: Training, x: torch.Tensor) -> None:
        late = torch.optim.swa_utils.AveragedModel(training.model)
        training.session.register("late", late)
        training.lose_peer()
        training.step(x)
        late.update_parameters(training.model)

    with hosted(tmp_path / "run") as run:
        train(run, body)
    (tree,) = saved(tmp_path / "run")
    assert tree["things"]["late"]["n_averaged"] == 0


def in_hand(training: Training, x: torch.Tensor) -> None:
    training.model(x)
    training.end_lease()
    training.roster._tracker.check_membership()


def test_a_step_that_is_not_reduced_is_undone_for_the_last_checkpoint(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        committed = train(run, in_hand)
    (tree,) = saved(tmp_path / "run")
    assert tree["plain"]["step"] == STEPS
    for name, tensor in tree["models"]["model"].items():
        assert torch.equal(tensor, committed[name]), name


def reduced(training: Training, x: torch.Tensor) -> None:
    training.backward(x)
    training.end_lease()
    training.roster._tracker.check_membership()


def stepped_before_another_backward_pass(training: Training, x: torch.Tensor) -> None:
    """For the first time: nobody expected it, so nothing was kept to undo it with."""
    training.step(x)
    training.roster._rollback.alternation.backward()
    training.end_lease()
    training.roster._tracker.check_membership()


@pytest.mark.parametrize("body", [reduced, stepped_before_another_backward_pass])
def test_what_cannot_be_undone_is_not_saved(tmp_path: Path, body: Body) -> None:
    with hosted(tmp_path / "run") as run:
        train(run, body)
    assert saved(tmp_path / "run") == []


def test_a_batch_that_is_undone_takes_its_part_in_accumulating_along(tmp_path: Path) -> None:
    """Gradients of earlier batches are no state to resume from, whatever came after them."""

    def body(training: Training, x: torch.Tensor) -> None:
        rollback = training.roster._rollback
        assert rollback.num_unused_before == 0
        rollback.num_unused_before = 2  # as if two batches were accumulated
        training.step(x)
        training.end_lease()
        training.roster._tracker.check_membership()

    with hosted(tmp_path / "run") as run:
        train(run, body, num_optimizers=2)
    assert saved(tmp_path / "run") == []


def test_the_last_checkpoint_is_of_the_last_step_whatever_the_script_does_then(
    tmp_path: Path,
) -> None:
    """As one that loads its best weights for a test, or closes the session itself."""
    with hosted(tmp_path / "run") as run:
        where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
        with elastic_session(where) as session:
            training = Training(session)
            for _ in session.epochs(1):
                for (x,) in training.loader:
                    training.step(x)
            trained = training.copy()
            with torch.no_grad():
                next(training.model.parameters()).fill_(42.0)
            session.close()
    (tree,) = saved(tmp_path / "run")
    assert tree["plain"]["step"] == len(DATA) // 4
    for name, tensor in tree["models"]["model"].items():
        assert torch.equal(tensor, trained[name]), name


class Unkept:
    """An object with a state that no checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_last_checkpoint_that_fails_does_not_fail_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hosted(tmp_path / "run") as run:
        where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
        with elastic_session(where) as session:
            training = Training(session)
            training.roster.enter()
            state = training.roster._state
            state.stateful = {**state.stateful, "file": Unkept()}
            for _ in session.epochs(1):
                for (x,) in training.loader:
                    training.step(x)
        assert run.ending().ok
    assert saved(tmp_path / "run") == []
    assert "the last checkpoint was not written" in caplog.text
