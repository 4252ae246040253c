"""A resume goes on with whatever is left of a run folder, and says what was given up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from evenstep.coordinate.events import Terms
from evenstep.coordinate.salvage import checkpoint_position
from evenstep.errors import JournalFormatError
from evenstep.journal import read
from evenstep.messages import Generation, Hello, Refused, proof
from evenstep.processes import ProcessIdentity
from evenstep.types import Regroup
from tests.coordinate.fake import FakeWorker, Line
from tests.coordinate.hosted import Hosted, hosted
from tests.coordinate.replayed import replayed


def train(run: Hosted) -> list[FakeWorker]:
    """Two workers that train in generation 2, with some steps."""
    first = run.worker()
    first.enter()
    second = run.worker()
    second.generation = second.hear(Generation)
    first.enter(2)
    for step in range(1, 4):
        first.step(step)
    return [first, second]


def recorded_generations(path: Path) -> list[int]:
    records = read(path)[1]
    return [a.generation for r in records for a in r.actions if isinstance(a, Regroup)]


def asides(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.damaged-*"))


def flip(path: Path, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(b'"at":', b'"au":')
    path.write_bytes(b"".join(lines))


def test_workers_are_taken_over_with_the_records_before_a_bad_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    with hosted(tmp_path / "run") as run:
        workers = train(run)
    whole = path.read_bytes()
    flip(path, 3)  # generation 2
    damaged = path.read_bytes()
    with hosted(tmp_path / "run", port=run.port) as again:
        told = again.worker(workers[0].id, generation=2).hear(Generation)
        assert told.roster == ("w0",)
        assert told.number > 2  # which has been used
    assert asides(tmp_path / "run") == ["journal.jsonl.damaged-1", "membership.jsonl.damaged-1"]
    assert (tmp_path / "run" / "journal.jsonl.damaged-1").read_bytes() == damaged
    kept = b"".join(whole.splitlines(keepends=True)[:2])
    assert path.read_bytes().startswith(kept)
    assert "journal.jsonl, line 3: " in caplog.text
    num_lines = whole.count(b"\n") - 2
    assert f"{num_lines} lines from there on ({len(whole) - len(kept)} bytes) are given up" in (
        caplog.text
    )
    assert "goes on from generation 1 and step -1; newest checkpoint: none" in caplog.text


def test_workers_of_a_generation_whose_record_is_cut_off_form_another(tmp_path: Path) -> None:
    """Nothing is damaged, but the journal knows of generation 1 only, and a checkpoint of 2."""
    path = tmp_path / "run" / "journal.jsonl"
    with hosted(tmp_path / "run") as run:
        workers = train(run)
    with (tmp_path / "run" / "checkpoints" / "step-00000012.pt").open("wb") as file:
        torch.save({"step": 12, "generation": 2, "state": {"a": torch.ones(3)}}, file)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with hosted(tmp_path / "run", port=run.port) as again:
        told = again.worker(workers[0].id, generation=2).hear(Generation)
        assert (told.roster, told.planned) == (("w0",), False)
        assert told.number > 2


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def bad_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"size":64', b'"size":65', 1))


@pytest.mark.parametrize("damage", [empty, half_header, bad_header, Path.unlink])
def test_without_a_usable_journal_a_run_goes_on_from_checkpoints(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    with hosted(tmp_path / "run") as run:
        train(run)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000012.pt"
    with checkpoint.open("wb") as file:
        torch.save({"step": 12, "generation": 7, "state": {"a": torch.ones(3)}}, file)
    damage(path)
    with hosted(tmp_path / "run") as again:
        worker = again.worker()
        assert worker.welcome.resume.endswith("step-00000012.pt")
        assert worker.hear(Generation).number > 7
    assert recorded_generations(path)[0] > 7
    assert "goes on from checkpoints alone" in caplog.text
    assert "newest checkpoint: step-00000012.pt" in caplog.text


def test_a_damaged_membership_record_is_set_aside_and_the_rest_replays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "membership.jsonl"
    with hosted(tmp_path / "run") as run:
        workers = train(run)
    flip(path, 4)
    damaged = path.read_bytes()
    with hosted(tmp_path / "run", port=run.port) as again:
        for worker in workers:
            again.worker(worker.id, generation=2)
        assert again.ask("status")["state"] == "training"
    assert (tmp_path / "run" / "membership.jsonl.damaged-1").read_bytes() == damaged
    assert "membership.jsonl, line 4: " in caplog.text
    assert "the damaged file is membership.jsonl.damaged-1" in caplog.text
    assert replayed(tmp_path / "run")


def test_a_journal_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    with hosted(tmp_path / "run"):
        pass
    path.write_bytes(b'{"format":2,"future":true}\n')
    with pytest.raises(JournalFormatError, match="format 2"), hosted(tmp_path / "run"):
        pass
    assert path.read_bytes() == b'{"format":2,"future":true}\n'


def test_the_number_of_a_generation_that_was_not_recorded_is_not_used_again(tmp_path: Path) -> None:
    """As after a full disk: the newest records were in the memory of a killed coordinator."""
    terms = Terms(lease_s=1.0)  # for both: a takeover waits for the longest lease granted
    with hosted(tmp_path / "run", terms) as run:
        train(run)
    with hosted(tmp_path / "run", terms) as again:
        with Line(again.name, again.port) as line:
            proved = proof(again.token, line.greeting.nonce)
            line.say(Hello(proof=proved, worker="w0", generation=5))
            assert "join as a new worker" in line.hear(Refused).why
        assert again.worker().hear(Generation).number > 5


def test_steps_without_a_coordinator_are_counted_from_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with hosted(tmp_path / "run") as run:
        train(run)
    plain = {"step": 54, "order": {"before": 2000, "cursor": 1456}}
    with (tmp_path / "run" / "checkpoints" / "step-00000054.pt").open("wb") as file:
        torch.save({"step": 54, "generation": 2, "state": {"plain": plain}}, file)
    with hosted(tmp_path / "run") as again:  # its workers may come back and tell of them
        before = again.service.totals
    for worker in ("w0", "w1"):
        (tmp_path / "run" / "logs" / f"{worker}.log").touch()
        ended = replace(ProcessIdentity.of(os.getpid()), ticks=1)
        (tmp_path / "run" / "logs" / f"{worker}.pid").write_bytes(msgspec.json.encode(ended))
    assert "without" not in caplog.text
    with hosted(tmp_path / "run") as again:
        totals = again.service.totals
    assert (totals.num_steps - before.num_steps, totals.samples) == (50, 54 * 64)
    assert totals.samples_per_s == before.samples_per_s
    assert "50 steps were trained while no coordinator was there" in caplog.text


@pytest.mark.parametrize("content", [b"", b"PK nonsense"])
def test_an_unreadable_checkpoint_has_no_generation(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-00000001.pt").write_bytes(content)
    assert checkpoint_position(tmp_path / "step-00000001.pt") == (0, 0)
