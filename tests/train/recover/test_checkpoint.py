"""Checkpoints on a real disk: kills, full disks and damaged files included."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.testbed.disk import failing_disk
from torch import nn

import evenstep
from evenstep.errors import ConfigError
from evenstep.train.recover.checkpoint import CheckpointError, Checkpoints, load_checkpoint
from evenstep.train.recover.state import TrainingState

DEADLINE_S = 600.0


class Everything:
    """An object whose state has values of all supported types."""

    def __init__(self) -> None:
        self.held: Any = {
            "counter": Counter({3: 2}),
            "ordered": OrderedDict(b=1, a=torch.arange(3)),
            "set": {"x"},
            "nested": [(1, 2.5), [None, True, b"\x00\xff", 2**100]],
            "kinds": (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")),
            "odd": [float("inf"), torch.zeros(0, 2), torch.tensor(3.5), torch.ones(6)[::5]],
            0: torch.ones(3, dtype=torch.bfloat16),
            "turned": torch.arange(6.0).view(2, 3).t(),
        }

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


def worker(value: float = 0.0, width: int = 8) -> TrainingState:
    net = nn.Linear(width, width)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, width)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(value)
            optimizer.state[param]["exp_avg"].fill_(value)
    return TrainingState(
        {"net": net}, {"optimizer": optimizer}, {"step": int(value), "generation": 3}
    )


def value(state: TrainingState) -> float:
    """The one value in all of a worker's tensors; fails if they are a mixture."""
    net = state.models["net"]
    optimizer: Any = state.stateful["optimizer"]
    found = {float(x) for p in net.parameters() for x in p.detach().flatten()}
    found |= {float(x) for p in net.parameters() for x in optimizer.state[p]["exp_avg"].flatten()}
    assert len(found) == 1
    assert state.plain["step"] == found.copy().pop()
    return found.pop()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(folder: Path, *steps: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, worker(step))
        checkpoints.close()
    return checkpoints


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "evenstep")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "evenstep"]


def test_a_worker_continues_from_what_was_saved(tmp_path: Path) -> None:
    found = save(tmp_path / "new", 7).newest()
    assert found is not None
    assert (found.path.name, found.step) == ("step-00000007.pt", 7)
    other = worker(1)
    params = [(p, p.data_ptr()) for p in other.models["net"].parameters()]
    other.apply(found.tree)
    assert value(other) == 7
    assert other.plain == {"step": 7, "generation": 3}
    assert params == [(p, p.data_ptr()) for p in other.models["net"].parameters()]


def test_values_of_all_types_survive_and_torch_alone_can_read_them(tmp_path: Path) -> None:
    one, other = Everything(), Everything()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, TrainingState({}, {"all": one}, {}))
    checkpoints.close()
    found = checkpoints.newest()
    assert found is not None
    other.held = None
    TrainingState({}, {"all": other}, {}).apply(found.tree)
    assert str(other.held) == str(one.held)
    assert isinstance(other.held["counter"], Counter)
    assert other.held["turned"].stride() == one.held["turned"].stride()
    plain = torch.load(found.path, weights_only=True)
    assert (plain["step"], plain["evenstep"]) == (1, evenstep.__version__)
    assert str(plain["state"]["things"]["all"]) == str(one.held)


def test_a_snapshot_does_not_follow_later_changes(tmp_path: Path) -> None:
    state, checkpoints = worker(1), Checkpoints(tmp_path, keep=9)
    for step in range(1, 5):
        for tensor in state.flatten()[1]:
            tensor.fill_(step)
        state.plain = {"step": step}
        checkpoints.save(step, state)
        for tensor in state.flatten()[1]:
            tensor.fill_(-1)
        checkpoints.close()
    for step in range(1, 5):
        state.apply(load_checkpoint(tmp_path / f"step-{step:08}.pt").tree)
        assert value(state) == step


def test_the_next_writer_knows_the_age_of_the_newest_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.age_s() == math.inf
    for step, age_s in ((10, 5.0), (20, 300.0)):
        path = tmp_path / f"step-{step:08}.pt"
        path.touch()
        os.utime(path, times=(path.stat().st_mtime - age_s,) * 2)
    assert checkpoints.age_s() == pytest.approx(300.0, abs=60.0)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    found = save(tmp_path, 1, 5, 20, 99_999_999, 100_000_000, keep=2).newest()
    assert found is not None
    assert found.step == 100_000_000
    assert names(tmp_path) == ["notes.txt", "step-100000000.pt", "step-99999999.pt"]


def test_a_loaded_state_does_not_depend_on_the_file(tmp_path: Path) -> None:
    checkpoints, other = save(tmp_path, 4), worker(1)
    found = checkpoints.newest()
    assert found is not None
    other.apply(found.tree)
    path = found.path
    del found
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert value(other) == 4


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, sync = [], os.fsync

    def watch(file: int) -> None:
        sync(file)
        seen.append((Path(os.readlink(f"/proc/self/fd/{file}")).name, names(tmp_path)))

    monkeypatch.setattr(os, "fsync", watch)
    save(tmp_path, 1)
    part, whole = f"step-00000001.{os.getpid()}.part", "step-00000001.pt"
    assert seen == [(part, [part]), (tmp_path.name, [whole])]


def test_a_file_that_is_not_stored_as_written_replaces_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    sync = os.fsync

    def lose_a_bit(file: int) -> None:
        sync(file)
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.suffix == ".part":
            flip_a_parameter(path)

    checkpoints = save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lose_a_bit)
        checkpoints.save(2, worker(2))
        checkpoints.close()
    assert names(tmp_path) == ["step-00000001.pt"]
    (message,) = warnings()
    assert "was not stored as written" in message
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003.pt"]


# Writing in the background.


class SlowDisk:
    """Blocks every write until the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.proceed = threading.Semaphore(0), threading.Semaphore(0)
        self.written: list[int] = []
        write = torch.save

        def slow(content: dict[str, Any], file: Any) -> None:
            self.begun.release()
            assert self.proceed.acquire(timeout=DEADLINE_S)
            self.written.append(content["step"])
            write(content, file)

        monkeypatch.setattr(torch, "save", slow)


def test_a_pending_snapshot_is_replaced_by_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, checkpoints = SlowDisk(monkeypatch), Checkpoints(tmp_path)
    checkpoints.save(1, worker(1))
    assert disk.begun.acquire(timeout=DEADLINE_S)
    for step in (2, 3, 4):
        checkpoints.save(step, worker(step))
    assert names(tmp_path) == [f"step-00000001.{os.getpid()}.part"]
    assert checkpoints.newest() is None
    disk.proceed.release(2)
    checkpoints.close()
    assert disk.written == [1, 4]
    state = worker()
    for step in (1, 4):
        state.apply(load_checkpoint(tmp_path / f"step-{step:08}.pt").tree)
        assert value(state) == step


def test_a_folder_that_cannot_be_written_is_logged_once(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").write_text("")
    checkpoints = save(tmp_path / "file" / "folder", 1, 2, 3)
    assert checkpoints.newest() is None
    (message,) = warnings()
    assert message.startswith("checkpoint of step 1 not written: NotADirectoryError")


FILLS = """
import logging, resource, signal, sys
from pathlib import Path
from tests.train.recover.test_checkpoint import names, worker
from evenstep.train.recover.checkpoint import Checkpoints

logging.basicConfig(format="%(message)s", stream=sys.stdout)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder)
def save(step, max_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))
    checkpoints.save(step, worker(step, width=200))
    checkpoints.close()
    print(names(folder))
save(1, 10**9)
save(2, 10**5)
save(3, 10**5)
save(4, 10**9)
save(5, 10**5)
"""


def run(script: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_full_disk_is_logged_once_and_training_goes_on(tmp_path: Path) -> None:
    output, _ = run(FILLS, str(tmp_path)).communicate(timeout=DEADLINE_S)
    one, four = "step-00000001.pt", "step-00000004.pt"
    first, failed, second, third, back, fourth, again, fifth = output.splitlines()
    assert first == second == third == str([one])
    assert fourth == fifth == str([one, four])
    assert failed.startswith("checkpoint of step 2 not written: ")
    assert "File too large" in failed
    assert back == "checkpoints are written again, that of step 4"
    assert again.startswith("checkpoint of step 5 not written: ")


def test_a_read_only_disk_is_logged_once(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    with failing_disk(tmp_path / "disk") as disk:
        save(disk.path / "checkpoints", 1)
        disk.make_read_only()
        checkpoints = save(disk.path / "checkpoints", 2, 3)
        assert warnings() == ["checkpoint of step 2 not written: OSError: Read-only file system"]
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.step == 1


# Damage.


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_parameter(path: Path) -> None:
    flip(path, torch.full((4,), 2.0).numpy().tobytes())


def flip_a_plain_value(path: Path) -> None:
    flip(path, b"generationq")


def flip(path: Path, found: bytes) -> None:
    """Flip a bit shortly after some bytes of the file."""
    content = bytearray(path.read_bytes())
    at = content.index(found) + len(found)
    content[at + 1] ^= 1
    path.write_bytes(content)


def replace(path: Path) -> None:
    torch.save({"some": "thing"}, path)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def bring_code(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    torch.save(content | {"more": Evil(path.parent / "evil")}, path)


@pytest.mark.parametrize(
    "damage",
    [truncate, empty, flip_a_parameter, flip_a_plain_value, replace, bring_code, Path.unlink],
)
def test_a_damaged_checkpoint_is_logged_and_the_one_before_it_loaded(
    tmp_path: Path, damage: Callable[[Path], None], warnings: Callable[[], list[str]]
) -> None:
    checkpoints = save(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002.pt")
    found = checkpoints.newest()
    assert found is not None
    state = worker()
    state.apply(found.tree)
    assert value(state) == 1
    assert [("step-00000002.pt" in message) for message in warnings()] == [True] * (
        damage is not Path.unlink
    )
    assert max(tmp_path.glob("*.pt")) == found.path  # nobody takes the damaged one for the newest


def test_a_run_that_resumed_before_damaged_checkpoints_keeps_its_new_ones(tmp_path: Path) -> None:
    save(tmp_path, 8, 9)
    for name in names(tmp_path):
        truncate(tmp_path / name)
    checkpoints = save(tmp_path, 1, 2, 3, keep=2)
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 3
    save(tmp_path, 9, 10, keep=2)
    aside = ["step-00000008.pt.damaged", "step-00000009.pt.damaged"]
    assert names(tmp_path) == sorted([*aside, "step-00000009.pt", "step-00000010.pt"])


def test_an_unknown_format_is_refused_and_not_skipped(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    content = torch.load(tmp_path / "step-00000001.pt", weights_only=True)
    torch.save(content | {"format": 2}, tmp_path / "step-00000002.pt")
    with pytest.raises(ConfigError, match=r"step-00000002.pt: has format 2; .* reads format 1"):
        checkpoints.newest()


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000003.pt: cannot be read"):
        load_checkpoint(tmp_path / "step-00000003.pt")


def test_a_different_model_is_refused_by_name(tmp_path: Path) -> None:
    found = save(tmp_path, 1).newest()
    assert found is not None
    other = worker(5, width=9)
    with pytest.raises(ConfigError, match=r"net.weight: is \(9, 9\) float32 here, \(8, 8\)"):
        other.apply(found.tree)
    assert value(other) == 5
    assert not other.torn


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch's own imports
def test_a_model_may_be_compiled_or_not(tmp_path: Path) -> None:
    found = save(tmp_path, 1).newest()
    assert found is not None
    net: Any = torch.compile(nn.Linear(8, 8))
    TrainingState({"net": net}, {"optimizer": torch.optim.Adam(net.parameters())}, {}).apply(
        found.tree
    )
    assert all(param.eq(1).all() for param in net.parameters())


def test_a_different_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    found = save(tmp_path, 1).newest()
    assert found is not None
    net = nn.Linear(8, 8)
    groups = [{"params": [p]} for p in net.parameters()]
    other = TrainingState({"net": net}, {"optimizer": torch.optim.Adam(groups)}, {})
    with pytest.raises(ConfigError, match="optimizer: cannot load the run's state"):
        other.apply(found.tree)


# kill -9.

SAVES = """
import sys
from itertools import count
from pathlib import Path
from tests.train.recover.test_checkpoint import worker
from evenstep.train.recover.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]))
for step in count(1):
    checkpoints.save(step, worker(step, width=1000))
    checkpoints.close()
"""


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = run(SAVES, str(tmp_path))
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.long
def test_kill_9_while_writing_leaves_the_older_ones_whole(
    tmp_path: Path, saving: subprocess.Popen[str]
) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while True:
        found = names(tmp_path)
        # Stop it first, to be sure that it is writing.
        if len(found) == 3 and found[-1].endswith(".part"):
            saving.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, saving.pid, os.WSTOPPED)
            found = names(tmp_path)
            if found[-1].endswith(".part") and len(found) == 3:
                break
            saving.send_signal(signal.SIGCONT)
        assert saving.poll() is None
        assert time.monotonic() < until_s
    saving.kill()
    saving.wait(DEADLINE_S)
    assert names(tmp_path) == found

    checkpoints = Checkpoints(tmp_path)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.path.name == found[1]
    state = worker(0, width=1000)
    state.apply(newest.tree)
    assert value(state) == newest.step
    assert (
        names(tmp_path) == found
    )  # reading leaves a file alone that another process may be writing
    checkpoints.save(newest.step + 1, worker(newest.step + 1))
    checkpoints.close()
    assert names(tmp_path) == [*found[:2], f"step-{newest.step + 1:08}.pt"]


def test_a_process_writes_its_last_checkpoint_before_it_exits(tmp_path: Path) -> None:
    script = SAVES.replace("count(1)", "[1]").replace("    checkpoints.close()\n", "")
    output, _ = run(script, str(tmp_path)).communicate(timeout=DEADLINE_S)
    assert output == ""
    assert names(tmp_path) == ["step-00000001.pt"]


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must keep at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def with_value(value: float) -> TrainingState:
    """A worker whose first parameter has such a value."""
    state = worker(1.0)
    with torch.no_grad():
        next(state.models["net"].parameters()).view(-1)[3] = value
    return state


def test_a_state_with_nan_does_not_push_out_those_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, keep=2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (3, 4, 5):
        checkpoints.save(step, with_value(math.nan))
        checkpoints.close()
    kept = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert kept == [f"step-{step:08}.pt" for step in (1, 2, 4, 5)]
    assert caplog.text.count("has values that are not a number") == 1
    assert "(newest: step-00000002.pt)" in caplog.text
    assert "remove the newer ones, and resume" in caplog.text


def test_infinite_values_are_as_good_as_others(tmp_path: Path) -> None:
    """Masks have them."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(step, with_value(math.inf))
        checkpoints.close()
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-00000002.pt"]
