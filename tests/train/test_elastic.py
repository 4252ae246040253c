"""A worker's own process in an elastic run, before its first step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from evenstep.errors import ConfigError
from evenstep.launch.environment import Coordinator
from evenstep.train.elastic import ElasticSession
from tests.coordinate.hosted import Hosted, hosted

WAIT_S = 20.0
threaded = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # and forks


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Hosted]:
    with hosted(tmp_path / "run") as there:
        yield there


def join(run: Hosted) -> closing[ElasticSession]:
    return closing(ElasticSession(Coordinator(host=run.name, port=run.port, token=run.token), {}))


def go_on(up: Any) -> None:
    up.set()
    while True:
        time.sleep(0.01)


def asked_to_end() -> int | None:
    """The exit code of a forked process that is sent SIGTERM; None: it goes on."""
    fork = multiprocessing.get_context("fork")
    up = fork.Event()
    process = fork.Process(target=go_on, args=(up,))
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
def test_a_process_that_a_worker_forks_ends_when_it_is_asked_to(run: Hosted) -> None:
    with join(run):
        assert asked_to_end() == -signal.SIGTERM


@threaded
def test_a_forked_process_ends_as_the_script_has_it(run: Hosted) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    try:
        with join(run):
            assert asked_to_end() == 7
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
def test_a_scheduler_that_the_run_was_not_given_is_refused(
    run: Hosted, make: Make, how: str
) -> None:
    with join(run) as session:
        model = torch.nn.Linear(2, 1)
        optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        schedule = make(optimizer)
        session.prepare(model, optimizer, other, *([schedule] if how == "prepare" else []))
        if how == "register":
            session.register("schedule", schedule)
        session.loader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch=4)
        if how == "not":
            told = r"that of SGD is not known to the run: .* session.prepare\(model, optimizer, sch"
            with pytest.raises(ConfigError, match=told):
                session.enter()
        else:
            session.enter()
            assert session.generation == 1


def test_a_heartbeat_tells_steps_from_what_the_script_does_between_them(run: Hosted) -> None:
    with join(run) as session:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        loader = session.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch=4)
        told = []
        for (x,) in loader:
            told.append(session._member.control._progress().apart)
            model(x).mean().backward()
            told.append(session._member.control._progress().apart)
            optimizer.step()
        told.append(session._member.control._progress().apart)
    assert told == [False, True, False, True, True]
