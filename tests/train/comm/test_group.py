"""Groups on cards: what can be known of them where there is none."""

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
from torch._C._distributed_c10d import HashStore

from evenstep.train.comm.backend import ends_on_error, surviving_errors
from evenstep.train.comm.cards import _log_once, card_of, on_cards, why_on_host
from evenstep.train.comm.group import (
    Group,
    GroupGoneError,
    SupersededError,
    WorkerLostError,
)
from evenstep.train.comm.shared_store import RankFailedError
from evenstep.train.comm.transfer import interruptible
from tests.source_tree import PYTHONPATH
from tests.train.ranks import control_of, run_ranks

CUDA = torch.device("cuda", 0)


class Sum:
    """A sum of NCCL's: there after some looks at it, or never.

    `error` is raised by a wait for it; `failure` is not, as in WorkNCCL.
    """

    def __init__(
        self, looks: int | None, error: str = "", failure: Exception | None = None
    ) -> None:
        self._looks, self._error, self._failure = looks, error, failure
        self.ordered = False  # the stream waits for it

    def is_completed(self) -> bool:
        if self._looks is None:
            return False
        self._looks -= 1
        return self._looks < 0

    def exception(self) -> Exception | None:
        return self._failure

    def wait(self, timeout: Any = None) -> None:
        assert timeout is None, "NCCL would break off the sum"
        if self._error:
            raise RuntimeError(self._error)
        self.ordered = True


class Nccl:
    """Keeps in mind when it was ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.work: Any = None
        self.cut_short = False

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self.work

    def abort(self) -> None:
        self.cut_short = self.work is not None and not self.work.is_completed()
        self.ended.set()


def group(*, sees_through: bool, check: Any = lambda _: None) -> tuple[Group, Nccl]:
    made = Group(HashStore(), 1, 0, 1, timeout_s=1.0, device=CUDA, check=check, last_words_s=0.0)
    made.sees_through, backend = sees_through, Nccl()
    made._backend = backend
    return made, backend


def test_a_sum_on_a_card_is_there_when_the_wait_for_it_ends() -> None:
    made, _ = group(sees_through=True)
    work = Sum(looks=3)
    made.wait(work)  # type: ignore[arg-type]
    assert work.ordered
    assert work.is_completed()


def test_a_fixed_roster_only_orders_the_streams() -> None:
    made, _ = group(sees_through=False)
    work = Sum(looks=None)
    made.wait(work)  # type: ignore[arg-type]
    assert work.ordered


def test_a_sum_that_will_never_come_is_given_up_and_the_card_freed() -> None:
    asked: list[float] = []

    def check(waited_s: float) -> None:
        asked.append(waited_s)
        if len(asked) == 3:
            raise SupersededError("a newer generation")

    made, backend = group(sees_through=True, check=check)
    work = Sum(looks=None)
    with pytest.raises(SupersededError):
        made.wait(work)  # type: ignore[arg-type]
    assert asked == sorted(asked)
    assert not work.ordered  # or the card would wait for it for ever
    assert made.is_closed
    assert backend.ended.wait(10.0)


@pytest.mark.parametrize("sees_through", [False, True])
def test_a_sum_that_failed_is_a_lost_peer(sees_through: bool) -> None:
    made, _ = group(sees_through=sees_through)
    with pytest.raises(WorkerLostError, match="NCCL error: remote process exited"):
        made.wait(Sum(0, "NCCL error: remote process exited"))  # type: ignore[arg-type]


def test_a_sum_that_is_completed_by_an_error_is_a_lost_peer() -> None:
    made, _ = group(sees_through=True)
    work = Sum(looks=0, failure=RuntimeError("NCCL error: remote process exited"))
    with pytest.raises(WorkerLostError, match="NCCL error: remote process exited"):
        made.wait(work)  # type: ignore[arg-type]
    assert not work.ordered  # or the card would go on with a failed sum


def test_closing_lets_the_last_sum_of_a_fixed_roster_end() -> None:
    made, backend = group(sees_through=False)
    backend.work = Sum(looks=3)
    made.sum_async(torch.zeros(1))
    made.close(0.0)
    assert backend.ended.wait(10.0)
    assert not backend.cut_short


def test_closing_an_elastic_group_ends_what_hangs_in_it() -> None:
    made, backend = group(sees_through=True)
    backend.work = Sum(looks=None)
    made.sum_async(torch.zeros(1))
    made.close(0.0)
    assert backend.ended.wait(10.0)
    assert backend.cut_short


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


def test_a_meeting_that_is_given_up_shows_why_and_nothing_before_it() -> None:
    def check(_: float) -> None:
        raise RankFailedError(1, "ZeroDivisionError")

    never = threading.Event()
    with pytest.raises(RankFailedError) as caught:
        interruptible(lambda: never.wait(60.0), check)
    never.set()
    assert caught.value.__context__ is None


@pytest.mark.parametrize("sees_through", [False, True])
def test_a_lost_peer_is_all_that_is_shown_of_a_failed_sum(sees_through: bool) -> None:
    made, _ = group(sees_through=sees_through)
    with pytest.raises(WorkerLostError) as caught:
        made.wait(Sum(0, "NCCL error: remote process exited"))  # type: ignore[arg-type]
    assert caught.value.__context__ is None


BIG = 2**62  # cards whose numbers differ in the last place only


@pytest.mark.parametrize(("cards", "can"), [((BIG, BIG + 1), True), ((BIG, BIG), False)])
def test_ranks_tell_their_cards_apart(cards: tuple[int, int], can: bool) -> None:
    def body(session: Any) -> bool:
        return on_cards(control_of(session), cards[session.rank], elastic=False)

    assert run_ranks(2, body) == [can, can]


WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def elastic(session: Any) -> bool:
    return on_cards(control_of(session), session.rank + 1, elastic=True)


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVENSTEP_NCCL", WATCHDOG):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # so that a test may set it, and leave nothing behind


@pytest.mark.usefixtures("untold")
def test_an_elastic_run_goes_through_host_memory_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="evenstep")
    for _ in range(2):  # generations
        assert run_ranks(2, elastic) == [False, False]
    assert WATCHDOG not in os.environ
    told = [r.message for r in caplog.records if "reduced in host memory" in r.message]
    assert len(told) == 1
    assert "EVENSTEP_NCCL=1" in told[0]


@pytest.mark.usefixtures("untold")
def test_an_elastic_run_uses_nccl_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_NCCL", "1")
    assert run_ranks(2, elastic) == [True, True]


@pytest.mark.usefixtures("untold")
def test_the_watchdog_is_off_while_an_elastic_group_is_made_and_for_nobody_else() -> None:
    with surviving_errors(True):
        assert not ends_on_error()
    assert ends_on_error()
    assert WATCHDOG not in os.environ
    with surviving_errors(False):
        assert ends_on_error()


def test_workers_on_processors_hear_nothing_of_cards(caplog: pytest.LogCaptureFixture) -> None:
    _log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="evenstep")
    assert run_ranks(2, lambda s: on_cards(control_of(s), 0, elastic=True)) == [False, False]
    assert "host memory" not in caplog.text


def test_the_users_own_setting_of_the_watchdog_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WATCHDOG, "1")
    with surviving_errors(True):
        assert os.environ[WATCHDOG] == "1"
    assert os.environ[WATCHDOG] == "1"


def test_a_processor_is_no_card() -> None:
    assert card_of(torch.device("cpu")) == 0


def ring(world: int) -> list[Group]:
    """All ranks of a group, in this process."""
    store = HashStore()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda r: Group(store, 1, r, world, timeout_s=3600.0), range(world)))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 2, 1, 0, 4]], ids=str)
def test_closing_a_group_aborts_what_is_blocked_in_it(order: list[int]) -> None:
    """In a ring of five whose last rank never starts its sum. Upwards nobody's connections are
    broken; downwards, each rank's next neighbour is gone already."""
    ranks = ring(5)
    for rank in ranks[:-1]:
        rank.sum_async(torch.ones(1000))
    for i in order:
        ranks[i].close(wait_s=3600.0)
        assert ranks[i].is_gone


def test_a_process_that_leaves_while_a_sum_is_blocked_ends_in_order() -> None:
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


def test_a_closed_group_sums_nothing_instead_of_giving_back_the_ranks_own_value() -> None:
    def body(session: Any) -> None:
        control_of(session).close()
        with pytest.raises(GroupGoneError, match="has closed its group of 2 workers"):
            control_of(session).sum(torch.ones(1))

    run_ranks(2, body)
