"""Sinks that are slow, hang or raise: nobody waits for them, and the log tells of them once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from evenstep import ports
from evenstep.errors import ConfigError
from evenstep.observe.feed import MAX_WAITING, SinkFeed
from evenstep.observe.sinks import SINKS, open_sinks
from tests.observe.a_status import status

WAIT_S = 600.0


class Recorder:
    """A sink that keeps what it gets; `before` is called first, and may block or raise."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        self._before = before
        self.steps: list[int] = []
        self.is_closed = False
        self._changed = threading.Condition()

    def write(self, unix_s: float, step: int, figures: Mapping[str, float]) -> None:
        self._before(step)
        with self._changed:
            self.steps.append(step)
            self._changed.notify_all()

    def close(self) -> None:
        self.is_closed = True

    def await_step(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.steps, WAIT_S)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_every_sink_gets_every_offer_and_is_closed() -> None:
    one, other = Recorder(), Recorder()
    feed = SinkFeed({"one": one, "other": other})
    for step in range(5):
        feed.offer(status(step))
    feed.close(WAIT_S)
    assert one.steps == other.steps == [0, 1, 2, 3, 4]
    assert one.is_closed
    assert other.is_closed
    assert feed.problems == []


def test_nothing_is_written_before_the_first_step() -> None:
    sink = Recorder()
    feed = SinkFeed({"one": sink})
    feed.offer(status(-1))
    feed.close(WAIT_S)
    assert sink.steps == []


def test_a_sink_that_hangs_for_ever_keeps_nobody_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free, begun = threading.Event(), threading.Event()

    def hang(step: int) -> None:
        begun.set()
        assert free.wait(WAIT_S)

    hanging, other = Recorder(hang), Recorder()
    feed = SinkFeed({"hanging": hanging, "other": other})
    feed.offer(status(0))
    assert begun.wait(WAIT_S)
    for step in range(1, 101):
        feed.offer(status(step))
        other.await_step(step)
    num_lost = 100 - MAX_WAITING
    says = f"sink hanging does not keep up: {MAX_WAITING} writes wait for it"
    assert feed.problems == [f"{says}; {num_lost} of 101 writes are lost"]
    feed.close(0.0)
    assert [line for line in told(caplog) if "sink hanging" in line] == [
        f"{says}; the run goes on, and the next figures are tried again",
        f"sink hanging has not finished: it is left behind, and {MAX_WAITING} writes still wait; "
        f"{num_lost} of 101 writes are lost",
    ]
    free.set()
    feed.close(WAIT_S)
    assert hanging.steps == [0, *range(101 - MAX_WAITING, 101)]  # the newest were kept
    assert other.steps == list(range(101))


@pytest.mark.parametrize("error", [OSError("no route to host"), SystemExit(1)])
def test_a_sink_that_always_raises_is_named_once_and_tried_again(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def fail(step: int) -> None:
        tried.append(step)
        raise error

    feed = SinkFeed({"broken": Recorder(fail)})
    for step in range(5):
        feed.offer(status(step))
    feed.close(WAIT_S)
    assert tried == [0, 1, 2, 3, 4]
    says = f"sink broken failed: {type(error).__name__}: {error}"
    assert told(caplog) == [
        f"{says}; the run goes on, and the next figures are tried again",
        "sink broken: 5 of 5 writes are lost",
    ]
    assert feed.problems == [f"{says}; 5 of 5 writes are lost"]


def test_a_sink_that_fails_at_its_tenth_write_loses_that_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(step: int) -> None:
        if step == 9:
            raise ConnectionError("reset")

    sink = Recorder(fail)
    feed = SinkFeed({"flaky": sink})
    for step in range(10):
        feed.offer(status(step))
        if step < 9:
            sink.await_step(step)
    feed.offer(status(10))
    sink.await_step(10)
    feed.close(WAIT_S)
    assert sink.steps == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert len(told(caplog)) == 1
    assert feed.problems == []  # it works again


def test_an_error_on_closing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(Recorder):
        def close(self) -> None:
            raise OSError("no space")

    feed = SinkFeed({"full": Unclosable()})
    feed.close(WAIT_S)
    assert told(caplog) == ["sink full could not be closed: OSError: no space"]


def test_sinks_are_opened_by_name_or_made_by_a_function(tmp_path: Path) -> None:
    own = Recorder()
    text = f"jsonlines:{tmp_path / 'a:b.jsonl'}"
    opened = open_sinks([text, lambda: own], "sinks")
    assert list(opened) == [text, "Recorder"]
    assert opened["Recorder"] is own
    assert (tmp_path / "a:b.jsonl").exists()
    assert list(open_sinks(text, "sinks")) == [text]
    for sink in opened.values():
        sink.close()


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        (["jsonline:x"], "--sink: unknown name 'jsonline'; did you mean jsonlines?"),
        (["zzz:x"], "--sink: unknown name 'zzz'; known: jsonlines, prometheus, tensorboard"),
        (["jsonlines"], "--sink: jsonlines needs a file"),
        (["tensorboard:"], "--sink: tensorboard needs a folder"),
        (["prometheus:"], "--sink: prometheus needs a file"),
        (["jsonlines:/no/such/folder/x"], "cannot be opened: .*No such file or directory"),
        (["prometheus:/no/such/folder/x"], "cannot be opened: .*No such file or directory"),
        ([Recorder()], "--sink: expected NAME:TARGET or a function that makes a sink, got <"),
        (["jsonlines:x", "jsonlines:x"], "jsonlines:x is given twice"),
    ],
)
def test_what_cannot_be_opened_is_refused_at_once(
    chosen: list[Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem.replace("?", r"\?")):
        open_sinks(chosen, "--sink")


def test_sinks_that_were_opened_are_closed_if_another_cannot_be() -> None:
    sink = Recorder()
    with pytest.raises(ConfigError, match="did you mean jsonlines"):
        open_sinks([lambda: sink, "jsonline:x"], "--sink")
    assert sink.is_closed


def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ConfigError, match=r'pip install "evenstep\[tensorboard\]"'):
        open_sinks(f"tensorboard:{tmp_path}", "--sink")


def test_a_sink_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    value = f"{__name__}:Named"
    point = EntryPoint(name="named", value=value, group="evenstep.sinks")
    monkeypatch.setattr(
        ports, "entry_points", lambda group: EntryPoints([point]).select(group=group)
    )
    (sink,) = open_sinks("named:some:target", "--sink").values()
    assert isinstance(sink, Named)
    assert sink.target == "some:target"
    with pytest.raises(ConfigError, match=f"known: {', '.join(sorted([*SINKS, 'named']))}"):
        open_sinks("zzz", "--sink")


class Named(Recorder):
    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
