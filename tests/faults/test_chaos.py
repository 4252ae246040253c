"""A part of `python -m bench.chaos`: random faults, and the result of one process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bench.chaos import faults as fl
from bench.chaos.__main__ import main
from bench.chaos.driver import CRASH, play
from bench.chaos.inject import Injector, damage
from bench.chaos.report import load_faults, save_faults, summary
from bench.testbed.ledger import Line, lost_and_repeated, read_ledger

KINDS = {**fl.ANYWHERE, **fl.ONE_HOST, **fl.SMALL_DISK, **fl.HOSTS}


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    """`main` handles it, and so would processes that later tests fork."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_run_through_thirty_faults_ends_where_one_process_ends() -> None:
    assert main(["--faults", "30", "--seed", "1", "--no-namespaces"]) == 0


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_runs_through_three_hundred_faults_end_where_one_process_ends(seed: int) -> None:
    assert main(["--faults", "300", "--seed", str(seed), "--hogs", "2"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_can_be_injected(kind: str) -> None:
    assert hasattr(Injector, fl.method_of(kind))


def test_a_list_of_faults_can_be_replayed(tmp_path: Path) -> None:
    drawn = fl.draw_faults(np.random.default_rng(1), 100, KINDS, long_stops=True)
    save_faults(tmp_path / "faults.jsonl", drawn)
    assert load_faults(tmp_path / "faults.jsonl") == drawn


def test_a_failure_of_the_driver_is_reported_with_the_rest(tmp_path: Path) -> None:
    outcome = play([], tmp_path, disk=False, hosts=False, until_s=0.0)  # the folder exists
    assert "FileExistsError" in outcome.problem
    assert "in 1 runs: 0 samples lost" in summary([outcome])
    assert "1 failures of the driver" in summary([outcome])


@pytest.mark.parametrize(
    ("line", "is_crash"),
    [
        ("[w3] ValueError: no", True),
        ("torch.cuda.OutOfMemoryError: no", True),
        ("AssertionError", True),
        ("12:00:00 evenstep: w3 was ended by SIGSEGV", True),
        ("12:00:00 evenstep: w3 was ended by SIGKILL", False),
        ("[w3] step 4 is void: rank 1 lost another worker: Read error", False),
    ],
)
def test_crashes_are_found_in_a_log(line: str, is_crash: bool) -> None:
    assert bool(CRASH.search(f"before\n{line}\nafter\n")) is is_crash


@pytest.mark.parametrize("torn", [False, True])
def test_a_damaged_file_is_another_one(tmp_path: Path, torn: bool) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b"0123456789")
    fault = fl.Fault(kind="damage a file", file="journal.jsonl", where=0.5, torn=torn)
    assert damage(tmp_path, fault)
    assert (tmp_path / "journal.jsonl").read_bytes() == (b"01234" if torn else b"01234\x156789")


def test_the_only_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000007.pt").write_bytes(b"0123456789")
    assert not damage(tmp_path, fl.Fault(kind="damage a file", file="checkpoint", where=0.5))


def test_samples_that_a_run_has_lost_or_repeated_are_counted(tmp_path: Path) -> None:
    """Step 1 was void in generation 1, and trained in generation 2 without sample 0.4."""

    def ledger(name: str, *lines: Line) -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return path

    run = ledger(
        "run",
        *(Line(0, 1, 0.0, [0.1]), Line(0, 1, 0.0, [0.2]), Line(0, 1, 0.1)),
        *(Line(1, 1, 0.2, [0.3]), Line(1, 1, 0.2, [0.4])),
        *(Line(1, 2, 0.3, [0.3, 0.3]), Line(1, 2, 0.4)),
    )
    alone = ledger(
        "alone",
        *(Line(0, 0, 0.0, [0.1, 0.2]), Line(0, 0, 0.1)),
        *(Line(1, 0, 0.2, [0.3, 0.4]), Line(1, 0, 0.3)),
    )
    assert lost_and_repeated(read_ledger(run, 2), read_ledger(alone, 2)) == (1, 1)
