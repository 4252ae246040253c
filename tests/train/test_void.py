"""Checkpoints of a worker whose lease expires mid-step: a committed step, or none."""

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

STEPS = 3  # committed before the fault
DATA = torch.utils.data.TensorDataset(torch.randn(64, 2, generator=torch.manual_seed(0)))


class Training:
    """The only worker of a run; it saves checkpoints."""

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
        """Void this step, as if a peer was lost."""
        self.roster.lost(WorkerLostError("a peer is gone"))

    def end_lease(self) -> None:
        """Expire the lease, as if the coordinator was unreachable."""
        control = self.roster._tracker.control
        control.welcome = replace(control.welcome, lease_s=-1e9)  # renewals in flight expire, too
        control._leased_s = 0.0


Body = Callable[[Training, torch.Tensor], None]


def train(run: Hosted, body: Body, num_optimizers: int = 1) -> dict[str, torch.Tensor]:
    """Take `STEPS` steps, then call `body` with a batch; returns the last committed state."""
    where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
    committed: dict[str, torch.Tensor] = {}
    with suppress(LeaseOverError), elastic_session(where) as session:
        training = Training(session, num_optimizers)
        for (x,) in training.loader:
            assert not committed, "the loop went on after the lease expired"
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
    """The group is lost in a layer's all-reduce; the rest of the pass updates later layers."""
    training.lose_peer()
    training.step(x)


def void_in_the_backward_pass(training: Training, x: torch.Tensor) -> None:
    training.model(x)
    training.lose_peer()
    training.step(x)


@pytest.mark.parametrize("body", [void_in_the_forward_pass, void_in_the_backward_pass])
def test_a_void_step_leaves_no_trace_in_the_last_checkpoint(tmp_path: Path, body: Body) -> None:
    """The lease expires after the void step has run to its end."""
    with hosted(tmp_path / "run") as run:
        committed = train(run, body)
    (tree,) = saved(tmp_path / "run")
    assert tree["plain"]["step"] == STEPS
    assert tree["things"]["average"]["n_averaged"] == STEPS
    for name, tensor in tree["models"]["model"].items():
        assert torch.equal(tensor, committed[name]), name


def test_a_lease_that_ends_while_others_are_waited_for_leaves_the_position_in_the_data(
    tmp_path: Path,
) -> None:
    """The error ends the loop in the middle of an epoch; it is not the script that leaves it."""

    def body(training: Training, x: torch.Tensor) -> None:
        training.model(x)
        training.end_lease()
        training.roster._tracker.check_membership()  # as in a wait during the backward pass

    with hosted(tmp_path / "run") as run:
        train(run, body)
    (tree,) = saved(tmp_path / "run")
    order = tree["plain"]["order"]
    assert (order["epoch"], order["index"]) == (0, STEPS)


def test_an_object_registered_in_the_loop_is_rolled_back_too(tmp_path: Path) -> None:
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


def open_step(training: Training, x: torch.Tensor) -> None:
    training.model(x)
    training.end_lease()
    training.roster._tracker.check_membership()


def test_an_open_step_is_rolled_back_for_the_last_checkpoint(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        committed = train(run, open_step)
    (tree,) = saved(tmp_path / "run")
    assert tree["plain"]["step"] == STEPS
    for name, tensor in tree["models"]["model"].items():
        assert torch.equal(tensor, committed[name]), name


def reduced(training: Training, x: torch.Tensor) -> None:
    training.backward(x)
    training.end_lease()
    training.roster._tracker.check_membership()


def stepped_before_another_backward_pass(training: Training, x: torch.Tensor) -> None:
    """The first such step: no rollback state was saved for it."""
    training.step(x)
    training.roster._rollback.alternation.backward()
    training.end_lease()
    training.roster._tracker.check_membership()


@pytest.mark.parametrize("body", [reduced, stepped_before_another_backward_pass])
def test_a_step_that_cannot_be_rolled_back_is_not_saved(tmp_path: Path, body: Body) -> None:
    with hosted(tmp_path / "run") as run:
        train(run, body)
    assert saved(tmp_path / "run") == []


def test_no_checkpoint_is_saved_while_accumulating(tmp_path: Path) -> None:
    """Checkpoints have no gradients, so a run cannot resume between accumulated batches."""

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


def test_what_a_script_does_after_training_does_not_reach_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    """For instance, it loads its best weights for a test, or closes the session itself."""
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


class Unsupported:
    """An object whose state cannot be saved."""

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
            state = training.roster._saver._state
            state.stateful = {**state.stateful, "file": Unsupported()}
            for _ in session.epochs(1):
                for (x,) in training.loader:
                    training.step(x)
        assert run.ending().ok
    assert saved(tmp_path / "run") == []
    assert "the last checkpoint was not written" in caplog.text
