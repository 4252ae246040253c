"""The journal: whole lines only, read back as they were written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from bench.testbed.disk import failing_disk, small_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep.config import BatchSettings, Choice, ScalingSettings, Settings, WorkerSettings
from evenstep.errors import InvalidInputError, JournalError
from evenstep.journal import Journal, Record, read
from evenstep.lines import LineFile
from evenstep.types import (
    AnyAction,
    AnyEvent,
    Drain,
    DrainAsked,
    Joined,
    Launch,
    LaunchFailed,
    Left,
    Lost,
    Pause,
    Plan,
    Regroup,
    SizeAsked,
    Stay,
    StepDone,
    StepReport,
    Worker,
)

PLAIN = Settings(batch=BatchSettings(size=8))

names = st.text(min_size=1, max_size=6)
counts = st.integers(0, 2**40)
seconds = st.floats(1e-9, 1e9)
gone = st.lists(names, max_size=3).map(tuple)
workers = st.builds(
    Worker,
    id=names,
    kind=names,
    cores=seconds,
    flops=st.none() | seconds,
    cap=st.none() | st.integers(1, 2**40),
    price_per_hour=seconds,
    warmup_samples_per_s=st.none() | seconds,
)
reports = st.builds(
    StepReport, names, counts, seconds, seconds, st.floats(0, 1), free_memory=st.floats(0, 1)
)


@st.composite
def steps(draw: st.DrawFn) -> StepDone:
    rows = draw(st.lists(reports, max_size=4, unique_by=lambda r: r.worker))
    forecasts = st.lists(st.none() | seconds, min_size=len(rows), max_size=len(rows)).map(tuple)
    return StepDone(
        step=draw(counts),
        generation=draw(counts),
        seconds=draw(seconds),
        reports=tuple(rows),
        forecasts=draw(st.none() | forecasts),
    )


events = st.one_of(
    st.builds(Joined, workers=st.lists(workers, max_size=3).map(tuple)),
    st.builds(Left, workers=gone, cause=names),
    st.builds(Lost, workers=gone, cause=names),
    st.builds(LaunchFailed, num_workers=counts.map(lambda n: n + 1), kind=names, cause=names),
    st.builds(SizeAsked, num_workers=counts.map(lambda n: n + 1)),
    st.builds(DrainAsked, worker=names),
    steps(),
)
actions = st.one_of(
    st.builds(Regroup, reason=names, generation=counts, roster=gone),
    st.builds(
        Plan,
        reason=names,
        generation=counts,
        from_step=counts,
        shares=st.dictionaries(names, counts, max_size=3),
        lr_factor=seconds,
    ),
    st.builds(Launch, reason=names, num_workers=counts, kind=names),
    st.builds(Drain, reason=names, worker=names),
    st.builds(Pause, reason=names),
    st.builds(Stay, reason=names),
)
entries = st.tuples(st.floats(0, 1e9), events, st.lists(actions, max_size=3).map(tuple))
Entry = tuple[float, AnyEvent, tuple[AnyAction, ...]]

reusing_the_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(path: Path, rows: list[Entry]) -> list[Record]:
    """A new journal with these rows, and the expected records."""
    path.unlink(missing_ok=True)
    with Journal.create(path, PLAIN) as journal:
        for row in rows:
            journal.append(*row)
    return [Record(at_s=at_s, event=event, actions=done) for at_s, event, done in rows]


@reusing_the_folder
@given(rows=st.lists(entries, max_size=4))
def test_records_are_read_as_they_were_written(tmp_path: Path, rows: list[Entry]) -> None:
    expected = written(tmp_path / "j", rows)
    _, records = read(tmp_path / "j")
    assert list(records) == expected
    assert not records.torn


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        Settings(batch=BatchSettings(per_worker=32, limit=1024), samples=10**15),
        Settings(
            batch=BatchSettings(size=8, min_share=1, lr_rule="none"),
            policy=Choice("fixed", {"shares": [2, 2, 2, 15], "deep": {"a": 0.1, "b": None}}),
            forecaster=Choice("ema", {"alpha": 0.1 + 0.2}),
            workers=WorkerSettings(min=2, max=60),
            scaling=ScalingSettings(heuristic=Choice("utility", {"linear": "100,10800"})),
        ),
    ],
)
def test_settings_and_about_are_read_as_they_were_written(tmp_path: Path, config: Settings) -> None:
    about = {"run": "night", "tags": ["a", 1, None], "größe": 0.1}
    Journal.create(tmp_path / "j", config, about).close()
    header, records = read(tmp_path / "j")
    assert header.settings == config
    assert header.about == about
    assert list(records) == []


@pytest.mark.parametrize("option", [float("nan"), float("inf"), {1: 2}, (1, 2), {3}, object()])
def test_settings_that_json_would_change_are_refused_and_nothing_is_left(
    tmp_path: Path, option: Any
) -> None:
    config = Settings(batch=BatchSettings(size=8), policy=Choice("fixed", {"shares": option}))
    with pytest.raises(InvalidInputError):
        Journal.create(tmp_path / "j", config)
    assert not (tmp_path / "j").exists()


def test_an_existing_journal_is_never_overwritten(tmp_path: Path) -> None:
    expected = written(tmp_path / "j", [(0.0, SizeAsked(num_workers=2), ())])
    with pytest.raises(JournalError, match="not overwritten"):
        Journal.create(tmp_path / "j", PLAIN)
    assert list(read(tmp_path / "j")[1]) == expected


THREE: list[Entry] = [
    (0.0, Joined(workers=(Worker(id="a\nb"), Worker(id="ü"))), (Pause(reason="few"),)),
    (1.5, SizeAsked(num_workers=2), (Stay(reason="so be it"), Drain(worker="a\nb", reason="1"))),
    (2.5, Lost(workers=("ü",)), (Plan(generation=1, from_step=1, shares={"ü": 8}, reason=""),)),
]


def test_a_journal_truncated_anywhere_reads_as_a_prefix_and_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    expected = written(path, THREE)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        if cut < ends[0]:
            with pytest.raises(JournalError, match="no complete header"):
                read(path)
            with pytest.raises(JournalError, match="no complete header"):
                Journal.resume(path)
            assert path.read_bytes() == whole[:cut]
            continue
        num_whole = sum(end <= cut for end in ends) - 1
        _, records = read(path)
        assert list(records) == expected[:num_whole]
        assert records.torn == (cut not in ends)
        with Journal.resume(path) as journal:
            assert path.stat().st_size == ends[num_whole]
            journal.append(*THREE[2])
        _, records = read(path)
        assert list(records) == [*expected[:num_whole], expected[2]]
        assert not records.torn


def test_a_long_truncated_line_is_removed_completely(tmp_path: Path) -> None:
    path = tmp_path / "j"
    expected = written(path, THREE)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    with Journal.resume(path):
        assert path.stat().st_size == size
    assert list(read(path)[1]) == expected


@pytest.mark.parametrize("line", [2, 3, 4])
@pytest.mark.parametrize("damage", [b"", b"\0" * 20, b"{}", b"[1]", b'{"at":"x"}'])
def test_damage_in_the_middle_is_refused_by_line_number(
    tmp_path: Path, line: int, damage: bytes
) -> None:
    path = tmp_path / "j"
    expected = written(path, THREE)
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = damage
    path.write_bytes(b"\n".join(lines))
    records = iter(read(path)[1])
    assert [next(records) for _ in range(line - 2)] == expected[: line - 2]
    with pytest.raises(JournalError, match=f"line {line}:") as e:
        next(records)
    assert e.value.line == line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"format":2,"future":true}\n', "format 2; this evenstep reads 1"),
        (b'{"at":0,"event":{"type":"SizeAsked","num_workers":1}}\n', "line 1"),
        (b"hello\n", "line 1"),
        (b'{"format":1,"settings":{"batch":{"size":0}}}\n', "line 1"),
        (b'{"format":1,"settings":{"batch":{"size":8},"bach":1}}\n', "line 1"),
        (b"", "no complete header"),
    ],
)
def test_other_files_and_formats_are_refused(tmp_path: Path, text: bytes, problem: str) -> None:
    (tmp_path / "j").write_bytes(text)
    with pytest.raises(JournalError, match=problem):
        read(tmp_path / "j")


def test_a_missing_file_or_folder_is_a_journal_error(tmp_path: Path) -> None:
    for attempt in (read, Journal.resume, lambda p: Journal.create(p, PLAIN)):
        with pytest.raises(JournalError, match="No such file"):
            attempt(tmp_path / "none" / "j")


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    first = Journal.create(tmp_path / "j", PLAIN)
    with pytest.raises(JournalError, match="another process"):
        Journal.resume(tmp_path / "j")
    first.close()
    Journal.resume(tmp_path / "j").close()


def test_a_record_that_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.create(path, PLAIN) as journal:
        before = path.read_bytes()
        with pytest.raises(InvalidInputError, match="at_s"):
            journal.append(float("nan"), SizeAsked(num_workers=1), ())
        with pytest.raises(InvalidInputError):
            journal.append(0.0, SizeAsked(num_workers=1), (object(),))  # type: ignore[arg-type]
        assert path.read_bytes() == before
    with pytest.raises(JournalError, match="is closed"):
        journal.append(0.0, SizeAsked(num_workers=1), ())


def test_records_wait_for_room_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.path / "j"
        with Journal.create(path, PLAIN) as journal:
            journal.append(*THREE[0])
            disk.fill()
            before = path.read_bytes()
            for row in THREE[1:] * 50:
                journal.append(*row)
            journal.sync()
            assert path.read_bytes().startswith(before)
            assert path.read_bytes().endswith(b"\n")  # no half-written line
            disk.free()
            journal.flush()
            expected = [Record(at_s=t, event=e, actions=a) for t, e, a in THREE + THREE[1:] * 49]
            assert list(read(path)[1]) == expected


def test_a_journal_that_stays_incomplete_says_so_at_its_end(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        journal = Journal.create(disk.path / "j", PLAIN)
        journal.append(*THREE[0])
        with pytest.raises(JournalError, match="2 records are lost"):
            journal.close()


def test_records_that_the_disk_could_not_store_are_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel tells only when it is asked to sync, and then drops them from its memory."""
    with failing_disk(tmp_path / "disk") as disk:
        path = disk.path / "j"
        with Journal.create(path, PLAIN) as journal:
            journal.append(*THREE[0])
            journal.sync()
            assert not journal.problem
            disk.fill()
            for row in THREE * 100:
                journal.append(*row)
            journal.sync()
            assert journal.problem.endswith("No space left on device; 300 records wait")
            disk.free()
            journal.flush()
            assert not journal.problem
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
            rows = [THREE[0], *THREE * 100]
            expected = [Record(at_s=t, event=e, actions=a) for t, e, a in rows]
            assert list(read(path)[1]) == expected
    assert len(caplog.records) == 2


def test_the_folder_of_a_new_journal_is_synced_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, sync = [], os.fsync

    def watch(file: int) -> None:
        sync(file)
        seen.append(Path(os.readlink(f"/proc/self/fd/{file}")))

    monkeypatch.setattr(os, "fsync", watch)
    with Journal.create(tmp_path / "j", PLAIN) as journal:
        for row in THREE * 2:
            journal.append(*row)
            journal.sync()
    assert seen == [tmp_path]


def test_steps_give_way_when_too_many_records_wait(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        lines = LineFile(disk.path / "lines", os.O_CREAT, max_waiting_bytes=100)
        for n in range(50):
            lines.append(b"%09d\n" % n, droppable=bool(n % 10))
        disk.free()
        lines.flush()
        kept = [int(line) for line in (disk.path / "lines").read_bytes().split()]
        assert kept == sorted(kept)
        assert {n for n in kept if n % 10 == 0} == {0, 10, 20, 30, 40}
        assert kept[-1] == 49
        assert lines.num_lost == 50 - len(kept)


def test_a_flipped_bit_anywhere_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    expected = written(path, THREE)
    whole = path.read_bytes()
    for at in range(len(whole)):
        line = whole[:at].count(b"\n") + 1
        for bit in (0, 5):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            found, damaged = [], 0
            try:
                for record in read(path)[1]:
                    found.append(record)
            except JournalError as e:
                damaged = e.line
            # Without the end of the last line, it reads as truncated.
            assert damaged == (line if at < len(whole) - 1 else 0)
            assert found == expected[: max(0, line - 2)]


def test_records_of_older_versions_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "j"
    expected = written(path, THREE)
    path.write_bytes(re.sub(rb',"crc":\d+}\n', b"}\n", path.read_bytes()))
    with Journal.resume(path) as journal:
        journal.append(*THREE[0])
    assert list(read(path)[1]) == [*expected, expected[0]]
