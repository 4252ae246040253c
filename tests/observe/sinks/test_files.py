"""Sinks that write files, read back by those who read them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evenstep.observe.sinks.json_lines import JsonLines
from evenstep.observe.sinks.tensorboard import TensorBoard
from evenstep.testing import SinkContract


class TestJsonLines(SinkContract):
    make = JsonLines


class TestTensorBoard(SinkContract):
    make = TensorBoard


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(folder: Path, tag: str) -> list[tuple[float, int, float]]:
    """What TensorBoard shows: when, at which step, which value."""
    board = EventAccumulator(str(folder))
    board.Reload()
    return [(e.wall_time, e.step, e.value) for e in board.Scalars(tag)]


def test_each_write_is_a_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    sink = JsonLines(str(path))
    sink.write(1e9, 3, {"samples_per_s": 52.5, "share/w0": 7})
    assert lines(path) == [{"unix_s": 1e9, "samples_per_s": 52.5, "share/w0": 7, "step": 3}]


def test_a_resumed_run_appends_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    path.write_text('{"unix_s":1.0,"step":1}\n{"unix_s":2.0,"st')  # its process was killed
    JsonLines(str(path)).write(3.0, 2, {})
    assert path.read_text() == '{"unix_s":1.0,"step":1}\n{"unix_s":3.0,"step":2}\n'


def test_a_file_that_holds_something_else_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch")
    JsonLines(str(path)).close()
    assert path.read_text() == "import torch"


def test_a_line_that_a_full_disk_cut_in_two_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, write = [8], os.write

    def write_on_full_disk(file: int, line: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num = write(file, line[: room[0]])
        room[0] -= num
        return num

    path = tmp_path / "figures.jsonl"
    sink = JsonLines(str(path))
    monkeypatch.setattr(os, "write", write_on_full_disk)
    for step in (1, 2, 3):
        with pytest.raises(OSError, match="No space left"):
            sink.write(1e9, step, {})
    room[0] = 1000
    sink.write(1e9, 4, {})
    assert [line["step"] for line in lines(path)] == [1, 4]


def test_tensorboard_shows_each_figure_by_step_and_time(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path))
    for step in (2, 5):
        sink.write(1e9 + step, step, {"samples_per_s": 50.5 + step, "compute_s/w0": 0.25})
    sink.close()
    assert scalars(tmp_path, "samples_per_s") == [(1e9 + 2, 2, 52.5), (1e9 + 5, 5, 55.5)]
    assert scalars(tmp_path, "compute_s/w0") == [(1e9 + 2, 2, 0.25), (1e9 + 5, 5, 0.25)]


def test_figures_are_there_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path))
    sink.write(1e9, 2, {"speedup": 1.5})
    assert scalars(tmp_path, "speedup") == [(1e9, 2, 1.5)]
    sink.close()


def test_steps_that_a_resumed_run_repeats_replace_those_before(tmp_path: Path) -> None:
    for run, steps in enumerate(([0, 10, 20, 30], [15, 25])):
        sink = TensorBoard(str(tmp_path))
        for step in steps:
            sink.write(1e9 + run, step, {"speedup": run})
        sink.close()
    shown = [(step, value) for _, step, value in scalars(tmp_path, "speedup")]
    assert shown == [(0, 0), (10, 0), (15, 1), (25, 1)]


def test_no_sink_imports_torch_or_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from evenstep.observe.sinks import open_sinks\n"
        "sinks = open_sinks(sys.argv[1:], '--sink')\n"
        "for sink in sinks.values(): sink.write(1e9, 1, {'speedup': 1.5}); sink.close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    sinks = [f"{name}:{tmp_path / name}" for name in ("jsonlines", "tensorboard", "prometheus")]
    subprocess.run([sys.executable, "-c", code, *sinks], check=True, timeout=600)
