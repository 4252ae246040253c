"""An elastic worker's process: signals, registration, logging and clean-up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.optim import lr_scheduler

import evenstep
from evenstep.errors import ConfigError
from evenstep.journal import read
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import Generation
from evenstep.train.comm.group import WorkerLostError
from evenstep.train.job import Options
from evenstep.train.join import elastic_session
from evenstep.train.roster.elastic import ElasticRoster
from evenstep.train.roster.generations import LeftError, leave_message
from evenstep.train.session import Session
from evenstep.types import Left
from tests.coordinate.hosted import Hosted, hosted
from tests.launch.metadata_servers import AwsServer
from tests.launch.unconfigured import unconfigured

WAIT_S = 600.0
threaded = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # and forks


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Hosted]:
    with hosted(tmp_path / "run") as there:
        yield there


def join(run: Hosted) -> closing[Session]:
    return closing(
        elastic_session(CoordinatorAddress(host=run.name, port=run.port, token=run.token))
    )


def apart(session: Session) -> bool:
    assert isinstance(session._roster, ElasticRoster)
    return session._roster._tracker._progress().apart


def run_forever(up: Any) -> None:
    up.set()
    while True:
        time.sleep(0.01)


def exit_code_after_sigterm() -> int | None:
    """The exit code of a forked process after SIGTERM; None if it keeps running."""
    fork = multiprocessing.get_context("fork")
    up = fork.Event()
    process = fork.Process(target=run_forever, args=(up,))
    process.start()
    try:
        assert up.wait(WAIT_S)
        process.terminate()
        process.join(WAIT_S)
        return process.exitcode
    finally:
        process.kill()
        process.join()


@threaded
def test_sigterm_ends_a_process_forked_by_a_worker(run: Hosted) -> None:
    with join(run):
        assert exit_code_after_sigterm() == -signal.SIGTERM


@threaded
def test_a_forked_process_keeps_the_scripts_sigterm_handler(run: Hosted) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    try:
        with join(run):
            assert exit_code_after_sigterm() == 7
    finally:
        signal.signal(signal.SIGTERM, before)


Make = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def step_lr(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, 1)


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ChainedScheduler([step_lr(optimizer), step_lr(optimizer)])


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    both = [step_lr(optimizer), step_lr(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, both, milestones=[3])


@pytest.mark.parametrize("make", [step_lr, chained, sequential])
@pytest.mark.parametrize("how", ["not", "prepare", "register"])
def test_a_scheduler_unknown_to_the_session_is_refused(run: Hosted, make: Make, how: str) -> None:
    with join(run) as session:
        model = torch.nn.Linear(2, 1)
        optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        schedule = make(optimizer)
        session.prepare(model, optimizer, other, *([schedule] if how == "prepare" else []))
        if how == "register":
            session.register("schedule", schedule)
        session.loader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch=4)
        if how == "not":
            message = "the scheduler of SGD is not known to the run: .* session.prepare"
            with pytest.raises(ConfigError, match=message):
                session._roster.enter()
        else:
            session._roster.enter()
            assert session.generation == 1


def test_schedulers_and_scalers_cannot_be_registered_after_the_first_batch(run: Hosted) -> None:
    with join(run) as session:
        model = torch.nn.Linear(2, 1)
        optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        session.prepare(model, optimizer)
        session.loader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch=4)
        session._roster.enter()
        for late in (step_lr(other), torch.amp.GradScaler("cpu")):
            with pytest.raises(ConfigError, match="before the first batch"):
                session.register("late", late)


def test_a_heartbeat_distinguishes_steps_from_work_between_steps(run: Hosted) -> None:
    with join(run) as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        loader = session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
        reported = []
        for (x,) in loader:
            reported.append(apart(session))
            model(x).mean().backward()
            reported.append(apart(session))
            optimizer.step()
        reported.append(apart(session))
        session._roster.settle(in_loop=True)  # an evaluation may follow
        reported.append(apart(session))
    assert reported == [False, True, False, True, True, True]


@unconfigured()
def test_a_worker_logs_when_it_joins_and_when_and_why_it_leaves(
    run: Hosted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("COORDINATOR", run.address), ("TOKEN", run.token), ("WORKER", "w7")):
        monkeypatch.setenv(f"EVENSTEP_{name}", value)
    with evenstep.join() as session:
        model = torch.nn.Linear(2, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
        session._roster.enter()
    printed = capsys.readouterr().err.splitlines()
    logged = [line.partition(" evenstep: ")[2] for line in printed]  # the coordinator's, too
    assert f"admitted to the run at {run.address} as w7" in logged
    (joined,) = (line for line in logged if line.startswith("w7 is rank"))
    assert joined.startswith("w7 is rank 0 of 1 in generation 1, at step 0 after ")
    assert joined.endswith("; w7 joined")
    assert "w7 leaves the run at step 0: trained to the end" in logged


def generation_of(number: int, world: int) -> Generation:
    """A generation of so many workers."""
    roster = tuple(f"w{rank}" for rank in range(world))
    return Generation(
        number=number, roster=roster, shares=(8,) * world, planned=True, reason="joined"
    )


def test_the_leave_message_tells_drains_evictions_and_stops_apart() -> None:
    others = Generation(
        number=3,
        roster=("w0",),
        shares=(8,),
        planned=True,
        saves="w0",
        reason="w1 left: SIGTERM",
    )
    asked = "w1 leaves the run at step 9, as asked: w1 left: SIGTERM"
    assert leave_message("w1", 9, others) == asked
    lost = replace(others, planned=False, reason="w1 lost: not heard of for 30 s")
    evicted = "w1 is evicted at step 9: w1 lost: not heard of for 30 s"
    assert leave_message("w1", 9, lost) == evicted
    end = replace(others, roster=(), shares=(), reason="SIGINT")
    stops = "w1 leaves the run at step 9: the run is stopping (SIGINT)"
    assert leave_message("w1", 9, end) == stops


def test_the_leader_of_several_workers_warns_of_local_batch_norm(
    run: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    def one(num_workers: int) -> int:
        where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
        with elastic_session(where, Options(settings={"workers": {"min": num_workers}})) as session:
            session.prepare(torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)))
            session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
            session._roster.enter()
            return session.world

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, [2, 2])) == [2, 2]
    (warning,) = (m for m in caplog.messages if "BatchNorm" in m)
    assert "sync_batchnorm=True" in warning


def test_a_single_worker_gets_no_warning_of_local_batch_norm(
    run: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    with join(run) as session:
        session.prepare(torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)))
        session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
        session._roster.enter()
    assert "BatchNorm" not in caplog.text


def test_after_a_session_that_ends_in_a_void_step_optimizers_and_schedulers_are_unwrapped(
    run: Hosted,
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, bare = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedule = lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.__dict__["step"]
    with join(run) as session:
        session.prepare(model, optimizer, bare, schedule)
        session.register("again", schedule)
        loader = session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
        for (x,) in loader:
            model(x).mean().backward()
            session._roster.lost(WorkerLostError("a worker was lost"))
            optimizer.step()
            schedule.step()
            break
        assert session.void
        assert schedule.last_epoch == 0
    assert type(schedule) is lr_scheduler.StepLR
    assert optimizer.__dict__["step"] == before
    assert "step" not in bare.__dict__
    was = model.weight.detach().clone()
    model.weight.grad = torch.ones(1, 2)
    optimizer.step()
    schedule.step()
    assert schedule.last_epoch == 1
    assert not torch.equal(model.weight, was)


def test_a_worker_that_leaves_keeps_its_priority(run: Hosted) -> None:
    """At a lower priority, a worker would take minutes to leave a busy host."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
    with pytest.raises(LeftError) as left, elastic_session(where) as session:
        train_until_stopped(run, session)
    assert left.value.code == 75
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_notice_drains_the_worker_as_sigterm_does_with_its_reason_in_the_journal(
    run: Hosted,
) -> None:
    with AwsServer() as cloud:
        where = CoordinatorAddress(
            host=run.name, port=run.port, token=run.token, notice=f"aws:endpoint={cloud.endpoint}"
        )
        with pytest.raises(LeftError) as left, elastic_session(where) as session:
            train_until(cloud.goes.set, session)
    assert left.value.code == 75
    run.ending()
    left_because = [e.cause for e in events(run) if isinstance(e, Left)]
    assert "AWS will terminate this spot instance at 2026-11-18" in left_because[-1]


def test_without_a_notice_no_thread_asks_for_one(run: Hosted) -> None:
    with join(run):
        assert "evenstep-notice" not in {thread.name for thread in threading.enumerate()}


def events(run: Hosted) -> list[Any]:
    return [record.event for record in read(run.service.folder.journal)[1]]


def train_until_stopped(run: Hosted, session: Session) -> None:
    train_until(lambda: run.ask("stop"), session)


def train_until(asked: Callable[[], object], session: Session) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    loader = session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
    for epoch in session.epochs(1_000_000):
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
        if epoch == 0:
            asked()


@pytest.mark.parametrize(("enabled", "given"), [(True, False), (True, True), (False, False)])
def test_a_scaler_unknown_to_the_session_is_refused(
    run: Hosted, enabled: bool, given: bool
) -> None:
    with join(run) as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        session.prepare(model, optimizer, *([scaler] if given else []))
        loader = session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
        for (x,) in loader:
            scaler.scale(model(x).mean()).backward()
            if given or not enabled:
                scaler.step(optimizer)
                scaler.update()
                continue
            message = (
                r"this GradScaler was not passed to session.prepare: .*\(model, optimizer, scaler\)"
            )
            with pytest.raises(ConfigError, match=message):
                scaler.step(optimizer)
            break
