"""Process groups: NCCL behaviour on a fake backend, and aborting real Gloo groups."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from bench.testbed.source_tree import PYTHONPATH
from torch._C._distributed_c10d import HashStore

from evenstep.errors import EvenstepError
from evenstep.train.comm.backend import abort_gloo, ends_on_error, surviving_errors
from evenstep.train.comm.cards import _log_once, card_of, on_cards, why_on_host
from evenstep.train.comm.group import (
    Group,
    GroupGoneError,
    SupersededError,
    WorkerLostError,
)
from evenstep.train.comm.shared_store import RankFailedError
from evenstep.train.comm.transfer import interruptible
from tests.train.ranks import control_of, run_ranks

CUDA = torch.device("cuda", 0)


class FakeWork:
    """An NCCL all-reduce that completes after `polls` polls, or never if None.

    `wait` raises `error`. As in WorkNCCL, it does not raise `failure`.
    """

    def __init__(
        self, polls: int | None, error: str = "", failure: Exception | None = None
    ) -> None:
        self._polls, self._error, self._failure = polls, error, failure
        self.ordered = False  # the stream waits for it

    def is_completed(self) -> bool:
        if self._polls is None:
            return False
        self._polls -= 1
        return self._polls < 0

    def exception(self) -> Exception | None:
        return self._failure

    def wait(self, timeout: Any = None) -> None:
        assert timeout is None, "NCCL would abort the all-reduce"
        if self._error:
            raise RuntimeError(self._error)
        self.ordered = True


class FakeNccl:
    """Records whether it was aborted, and whether that interrupted an all-reduce."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.work: Any = None
        self.interrupted = False

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self.work

    def abort(self) -> None:
        self.interrupted = self.work is not None and not self.work.is_completed()
        self.aborted.set()


def group(*, sees_through: bool, check: Any = lambda _: None) -> tuple[Group, FakeNccl]:
    made = Group(HashStore(), 1, 0, 1, timeout_s=1.0, device=CUDA, check=check, last_words_s=0.0)
    made.sees_through, backend = sees_through, FakeNccl()
    made._backend = backend
    return made, backend


def test_on_a_gpu_wait_blocks_the_host_until_the_sum_is_complete() -> None:
    made, _ = group(sees_through=True)
    work = FakeWork(polls=3)
    made.wait(work)  # type: ignore[arg-type]
    assert work.ordered
    assert work.is_completed()


def test_a_fixed_roster_only_orders_the_streams() -> None:
    made, _ = group(sees_through=False)
    work = FakeWork(polls=None)
    made.wait(work)  # type: ignore[arg-type]
    assert work.ordered


def test_a_sum_that_never_completes_is_interrupted_and_aborted() -> None:
    waits_s: list[float] = []

    def check(waited_s: float) -> None:
        waits_s.append(waited_s)
        if len(waits_s) == 3:
            raise SupersededError("a newer generation")

    made, backend = group(sees_through=True, check=check)
    work = FakeWork(polls=None)
    with pytest.raises(SupersededError):
        made.wait(work)  # type: ignore[arg-type]
    assert waits_s == sorted(waits_s)
    assert not work.ordered  # or the stream would block forever
    assert made.is_closed
    assert backend.aborted.wait(10.0)


@pytest.mark.parametrize("sees_through", [False, True])
def test_a_failed_sum_is_a_lost_worker(sees_through: bool) -> None:
    made, _ = group(sees_through=sees_through)
    with pytest.raises(WorkerLostError, match="NCCL error: remote process exited"):
        made.wait(FakeWork(0, "NCCL error: remote process exited"))  # type: ignore[arg-type]


def test_a_sum_that_completes_with_an_error_is_a_lost_worker() -> None:
    made, _ = group(sees_through=True)
    work = FakeWork(polls=0, failure=RuntimeError("NCCL error: remote process exited"))
    with pytest.raises(WorkerLostError, match="NCCL error: remote process exited"):
        made.wait(work)  # type: ignore[arg-type]
    assert not work.ordered  # or the stream would use a failed sum


def test_closing_a_fixed_group_waits_for_its_last_sum() -> None:
    made, backend = group(sees_through=False)
    backend.work = FakeWork(polls=3)
    made.sum_async(torch.zeros(1))
    made.close(0.0)
    assert backend.aborted.wait(10.0)
    assert not backend.interrupted


def test_closing_an_elastic_group_interrupts_pending_sums() -> None:
    made, backend = group(sees_through=True)
    backend.work = FakeWork(polls=None)
    made.sum_async(torch.zeros(1))
    made.close(0.0)
    assert backend.aborted.wait(10.0)
    assert backend.interrupted


def test_why_gradients_go_through_host_memory() -> None:
    assert why_on_host([7, -9, 8], [1, 1, 1]) == ""
    assert "not all workers have a GPU" in why_on_host([7, 0, 8], [1, 1, 1])
    assert "ranks 0, 2 share GPUs" in why_on_host([7, 9, 7], [1, 1, 1])
    assert "EVENSTEP_NCCL=1" in why_on_host([7, 9, 8], [1, 0, 1])


def test_a_rank_whose_peer_fails_shows_the_peers_traceback_and_nothing_before_it() -> None:
    def body(session: Any) -> None:
        if session.rank == 1:
            raise ZeroDivisionError("a bug in the user's loss")
        session.sum(1.0)

    with pytest.raises(RankFailedError, match="a bug in the user's loss") as caught:
        run_ranks(2, body)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.startswith("Traceback")
    assert "Operation timed out" not in shown
    assert "During handling" not in shown


def test_an_interrupted_rendezvous_shows_its_cause_and_nothing_before_it() -> None:
    def check(_: float) -> None:
        raise RankFailedError(1, "ZeroDivisionError")

    never = threading.Event()
    with pytest.raises(RankFailedError) as caught:
        interruptible(lambda: never.wait(60.0), check)
    never.set()
    assert caught.value.__context__ is None


@pytest.mark.parametrize("sees_through", [False, True])
def test_a_lost_worker_hides_the_error_of_the_backend(sees_through: bool) -> None:
    made, _ = group(sees_through=sees_through)
    with pytest.raises(WorkerLostError) as caught:
        made.wait(FakeWork(0, "NCCL error: remote process exited"))  # type: ignore[arg-type]
    assert caught.value.__context__ is None


BIG = 2**62  # GPU ids that differ in the last bit only


@pytest.mark.parametrize(("cards", "can"), [((BIG, BIG + 1), True), ((BIG, BIG), False)])
def test_nccl_needs_a_gpu_of_its_own_for_every_rank(cards: tuple[int, int], can: bool) -> None:
    def body(session: Any) -> bool:
        return on_cards(control_of(session), cards[session.rank], elastic=False)

    assert run_ranks(2, body) == [can, can]


WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def elastic(session: Any) -> bool:
    return on_cards(control_of(session), session.rank + 1, elastic=True)


@pytest.fixture
def unset_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVENSTEP_NCCL", WATCHDOG):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # set before, so that a value set by the test is undone


@pytest.mark.usefixtures("unset_environment")
def test_an_elastic_run_reduces_in_host_memory_and_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="evenstep")
    for _ in range(2):  # generations
        assert run_ranks(2, elastic) == [False, False]
    assert WATCHDOG not in os.environ
    logged = [r.message for r in caplog.records if "reduced in host memory" in r.message]
    assert len(logged) == 1
    assert "EVENSTEP_NCCL=1" in logged[0]


@pytest.mark.usefixtures("unset_environment")
def test_an_elastic_run_uses_nccl_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_NCCL", "1")
    assert run_ranks(2, elastic) == [True, True]


@pytest.mark.usefixtures("unset_environment")
def test_the_watchdog_is_off_only_while_an_elastic_group_is_created() -> None:
    with surviving_errors(True):
        assert not ends_on_error()
    assert ends_on_error()
    assert WATCHDOG not in os.environ
    with surviving_errors(False):
        assert ends_on_error()


def test_workers_on_cpus_log_nothing_about_gpus(caplog: pytest.LogCaptureFixture) -> None:
    _log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="evenstep")
    assert run_ranks(2, lambda s: on_cards(control_of(s), 0, elastic=True)) == [False, False]
    assert "host memory" not in caplog.text


def test_the_users_own_watchdog_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WATCHDOG, "1")
    with surviving_errors(True):
        assert os.environ[WATCHDOG] == "1"
    assert os.environ[WATCHDOG] == "1"


def test_a_cpu_has_no_gpu_id() -> None:
    assert card_of(torch.device("cpu")) == 0


def ring(world: int) -> list[Group]:
    """All ranks of a Gloo group, in this process."""
    store = HashStore()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda r: Group(store, 1, r, world, timeout_s=3600.0), range(world)))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 2, 1, 0, 4]], ids=str)
def test_closing_a_group_aborts_blocked_sums(order: list[int]) -> None:
    """In a ring of five, the last rank never starts its sum.

    In ascending order no rank has a broken connection when it closes; in descending order each
    rank's next neighbour is already gone.
    """
    ranks = ring(5)
    for rank in ranks[:-1]:
        rank.sum_async(torch.ones(1000))
    for i in order:
        ranks[i].close(wait_s=3600.0)
        assert ranks[i].is_gone


def test_an_error_of_the_call_is_no_lost_worker() -> None:
    ranks = ring(2)
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(rank.sum, torch.ones(3, dtype=torch.int16)) for rank in ranks]
        for summing in sums:
            with pytest.raises(EvenstepError, match="no connection is broken: Invalid") as caught:
                summing.result()
            assert not isinstance(caught.value, GroupGoneError)
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("call", ["send", "recv"])
def test_a_transfer_over_a_connection_that_is_broken_already_is_a_lost_worker(call: str) -> None:
    ranks = ring(2)
    ranks[1].sum_async(torch.ones(3))
    ranks[1].close(wait_s=3600.0)  # aborts it
    with pytest.raises(WorkerLostError, match="rank 0 lost another worker"):
        ranks[0].sum(torch.ones(3))
    with pytest.raises(WorkerLostError, match="rank 0 lost another worker"):
        getattr(ranks[0], call)(torch.ones(3), 1, 7)
    ranks[0].close()


class Receive:
    def __init__(self, error: str) -> None:
        self._error = error

    def wait(self, timeout: Any) -> None:
        raise RuntimeError(self._error)


class ClosingBackend:
    """A Gloo group of four in which rank 1 closes its connection while this one aborts."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Receive:
        self.asked.append(rank)
        if rank == 0:
            raise RuntimeError("Connection closed by peer")
        return Receive("Connection reset by peer" if rank == 1 else "Timed out waiting 1ms")


def test_an_abort_goes_on_if_a_connection_breaks_meanwhile() -> None:
    """Only a timeout closes all connections; one that breaks leaves the others open."""
    backend = ClosingBackend()
    abort_gloo(backend, rank=4, world=5)
    assert backend.asked == [0, 1, 2]


def test_a_process_with_a_blocked_sum_exits_cleanly() -> None:
    code = """
import torch
from evenstep.train.comm.transfer import await_closed
from tests.train.comm.test_group import ring

ranks = ring(5)
for rank in ranks[:-1]:
    rank.sum_async(torch.ones(1000))
for rank in ranks[:-1]:
    rank.close(0.0)
await_closed(3600.0)
"""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0


def test_a_broken_connection_is_named_without_advice_for_users_of_gloo() -> None:
    ranks = ring(3)
    with ThreadPoolExecutor(1) as pool:
        summing = pool.submit(ranks[0].sum, torch.ones(1000))
        abort_gloo(ranks[1]._backend, rank=1, world=3)
        with pytest.raises(
            WorkerLostError, match=r"^rank 0 lost another worker in generation 1: "
        ) as e:
            summing.result()
    assert "onnection" in str(e.value)
    assert "pair.cc" not in str(e.value)
    assert "typically" not in str(e.value)
    for rank in ranks:
        rank.close(0.0)


def test_a_sum_in_a_closed_group_is_an_error() -> None:
    def body(session: Any) -> None:
        control_of(session).close()
        with pytest.raises(GroupGoneError, match="has closed its group of 2 workers"):
            control_of(session).sum(torch.ones(1))

    run_ranks(2, body)
