"""Terms: of several coordinators over one folder, the last one has the run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import SkipTest

import msgspec
import pytest
import torch
from bench.testbed.disk import small_disk
from msgspec.structs import replace

from evenstep.coordinate.events import Terms
from evenstep.coordinate.run_folder import RunFolder
from evenstep.coordinate.service import Service
from evenstep.coordinate.term import Claim, Term, TermOverError, read_term
from evenstep.errors import ConfigError
from evenstep.journal import read
from evenstep.messages import Generation, Goodbye, Lease
from evenstep.processes import ProcessIdentity
from evenstep.types import Lost
from tests.coordinate.hosted import Hosted, hosted


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Hosted]:
    with hosted(tmp_path / "run") as there:
        yield there


def elsewhere(**changes: Any) -> ProcessIdentity:
    """A process that this host cannot see."""
    mine = ProcessIdentity.of(os.getpid())
    return replace(mine, host="elsewhere", boot="another", **changes)


def test_each_coordinator_has_a_term_of_its_own(tmp_path: Path) -> None:
    first, second = Claim(tmp_path, 10.0), Claim(tmp_path, 5.0)
    assert (first.number, second.number) == (1, 2)
    assert (second.lease_before_s, read_term(tmp_path).lease_s) == (10.0, 10.0)
    second.check()
    with pytest.raises(TermOverError, match=f"process {os.getpid()} on .* has term 2.* had 1"):
        first.check()
    with pytest.raises(TermOverError):
        first.move_fence(9)
    assert read_term(tmp_path).fence == (0, 0)


def test_a_run_on_a_full_disk_is_taken_over_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        stack = ExitStack()
        disk = stack.enter_context(small_disk(tmp_path / "disk"))
    except SkipTest as e:
        pytest.skip(str(e))
    with stack, ThreadPoolExecutor(1) as pool:
        first = Claim(disk.path, 10.0)
        disk.fill()
        taking = pool.submit(Claim, disk.path, 5.0)
        while "no room to claim the run (No space left on device)" not in caplog.text:
            assert not taking.done()
        first.check()  # nobody has taken it yet
        disk.free()
        second = taking.result()
        assert (second.number, second.lease_before_s) == (2, 10.0)
        with pytest.raises(TermOverError):
            first.check()


def test_a_new_run_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Claim, "_write", full)
        with pytest.raises(ConfigError, match="cannot be claimed: No space left on device"):
            Claim(tmp_path, 1.0)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_an_older_coordinator_writes_late_is_written_over(tmp_path: Path) -> None:
    first = Claim(tmp_path, 1.0)
    late = read_term(tmp_path)
    second = Claim(tmp_path, 1.0)
    second.move_fence(4)
    (tmp_path / "term").write_bytes(msgspec.json.encode(late))
    second.check()
    assert read_term(tmp_path).fence == (2, 4)
    with pytest.raises(TermOverError):
        first.check()


def test_of_two_claims_to_one_term_one_holds(tmp_path: Path) -> None:
    first = Claim(tmp_path, 1.0)
    other = replace(read_term(tmp_path), coordinator=elsewhere())
    (tmp_path / "term").write_bytes(msgspec.json.encode(other))
    with pytest.raises(TermOverError, match="elsewhere"):
        first.check()


DAMAGED = [b"", b"\0" * 90, b'{"number":']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_term_is_set_aside_and_the_next_is_above_all_known(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "term").write_bytes(content)
    claim = Claim(tmp_path, 1.0, lambda: Term(number=4, lease_s=60.0, fence=(4, 9)))
    assert (claim.number, claim.lease_before_s) == (5, 60.0)
    mine = read_term(tmp_path)
    assert (mine.lease_s, mine.fence) == (60.0, (4, 9))
    assert (tmp_path / "term.damaged-1").read_bytes() == content
    assert "term: it is damaged" in caplog.text
    assert "term.damaged-1. The run goes on with term 5" in caplog.text
    (tmp_path / "term").write_bytes(content)
    claim.check()  # whoever holds the term repairs it
    assert read_term(tmp_path) == mine


def test_a_run_whose_term_is_damaged_is_resumed(tmp_path: Path) -> None:
    """Workers of before may train on until the longest lease is over that is known of."""
    terms = Terms(run=str(tmp_path / "run"), lease_s=1000.0)
    with hosted(tmp_path / "run", terms) as run:
        run.worker().enter()
    for _ in range(2):
        with hosted(tmp_path / "run", terms):
            pass
    (tmp_path / "run" / "term").write_bytes(b"")
    with hosted(tmp_path / "run", Terms(run=terms.run, lease_s=1.0)) as again:
        assert again.service.state.terms.term == 4
        until_s = again.service.state.phase.until_s  # type: ignore[union-attr]
        assert until_s - again.service.now_s > 900
    assert read_term(tmp_path / "run").number == 4


def test_a_checkpoint_knows_of_a_term(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        run.worker().enter()
    with (tmp_path / "run" / "checkpoints" / "step-00000012.pt").open("wb") as file:
        torch.save({"step": 12, "term": 7, "generation": 3, "state": {}}, file)
    (tmp_path / "run" / "term").write_bytes(b"")
    (tmp_path / "run" / "membership.jsonl").unlink()
    with hosted(tmp_path / "run") as again:
        assert again.service.state.terms.term == 8
        assert read_term(tmp_path / "run").fence >= (7, 3)


def test_what_is_written_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure may leave an empty file."""
    claim, did = Claim(tmp_path, 1.0), list[str]()
    sync, rename = os.fsync, Path.rename

    def note_sync(file: int) -> None:
        did.append("sync")
        sync(file)

    def note_rename(path: Path, target: Path) -> Path:
        did.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    claim.move_fence(3)
    assert did == ["sync", "rename"]


def test_a_coordinator_that_was_taken_over_ends_without_a_word_in_the_journal(
    run: Hosted, tmp_path: Path
) -> None:
    worker = run.worker()
    worker.enter()
    worker.beat()
    written = {p: p.read_bytes() for p in (tmp_path / "run").glob("*.jsonl")}
    Claim(tmp_path / "run", 1.0)
    assert "another coordinator has taken the run over" in run.ending().why
    assert not run.ending().ok
    assert "another coordinator" in worker.hear(Goodbye).why
    assert {p: p.read_bytes() for p in (tmp_path / "run").glob("*.jsonl")} == written


def test_no_lease_is_renewed_while_the_folder_cannot_be_read(run: Hosted, tmp_path: Path) -> None:
    worker = run.worker()
    worker.enter()
    worker.beat()
    (tmp_path / "run").rename(tmp_path / "away")  # where another host may take it over
    while not run.service._claim_problem:
        worker.waiting(0.05)
    worker.waiting()
    worker.say(worker.alive())
    assert not [m for m in worker.waiting(1.0) if isinstance(m, Lease)]
    (tmp_path / "away").rename(tmp_path / "run")
    while run.service._claim_problem:
        worker.waiting(0.05)
    worker.beat()


def test_the_fence_moves_with_every_generation(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        assert run.worker().enter().number == 1
        assert read_term(tmp_path / "run").fence == (1, 1)
    with hosted(tmp_path / "run") as again:
        assert read_term(tmp_path / "run").fence == (1, 1)  # workers of before may write
        assert again.worker("w0", generation=1).welcome.term == 2
        new = again.worker()
        told = new.hear(Generation)
        assert read_term(tmp_path / "run").fence == (2, told.number)


def test_a_worker_that_this_host_cannot_see_is_waited_for_until_the_lease_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lease is that of the coordinator before, whatever the new one is told."""
    with hosted(tmp_path / "run", Terms(run=str(tmp_path / "run"), lease_s=1000.0)) as run:
        run.worker().enter()
    logs = tmp_path / "run" / "logs"
    (logs / "w0.log").touch()
    caplog.set_level("INFO")
    for pid_file, away in ((elsewhere(pid=1), ["w0"]), (None, ["w0"])):
        (logs / "w0.pid").write_bytes(msgspec.json.encode(pid_file) if pid_file else b"17 12.5")
        with hosted(tmp_path / "run", Terms(run=str(tmp_path / "run"), lease_s=1.0)) as again:
            assert sorted(again.service.state.away) == away
            assert again.ask("status")["state"] == "waiting for workers to come back"
            until_s = again.service.state.phase.until_s  # type: ignore[union-attr]
            assert until_s - again.service.now_s > 900
    assert "waiting up to 1001 s for w0 to reconnect" in caplog.text
    assert "`evenstep drain RUN WORKER` gives it up" in caplog.text
    ended = replace(ProcessIdentity.of(os.getpid()), ticks=1)
    (logs / "w0.pid").write_bytes(msgspec.json.encode(ended))
    with hosted(tmp_path / "run") as again:
        assert again.service.state.away == set()
    events = [r.event for r in read(tmp_path / "run" / "journal.jsonl")[1]]
    assert [e.cause for e in events if isinstance(e, Lost)] == ["it ended with the coordinator"]


def test_a_run_that_never_began_leaves_no_term(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run")
    Service(folder, Terms(), {}).coordinator.close()
    folder.discard()
    assert not (tmp_path / "run").exists()
