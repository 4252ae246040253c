"""A message is one line, and a bad one is refused with a typed error."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import InvalidInputError
from evenstep.types import AnyEvent, Left, SizeAsked
from evenstep.wire import Codec

EVENTS: Codec[AnyEvent] = Codec(AnyEvent, max_bytes=200)


@given(st.lists(st.text(max_size=5), max_size=3), st.text(max_size=10))
def test_a_message_is_one_line_and_round_trips(workers: list[str], cause: str) -> None:
    message = Left(workers=tuple(workers), cause=cause)
    line = EVENTS.encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert EVENTS.decode(line) == message


def test_a_long_line_is_refused_in_both_directions() -> None:
    message = Left(workers=("w" * 300,))
    with pytest.raises(InvalidInputError, match="more than the limit of 200"):
        EVENTS.encode(message)
    with pytest.raises(InvalidInputError, match="more than the limit of 200"):
        EVENTS.decode(msgspec.json.encode(message))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}",
        b"null",
        b'{"type":"Nobody"}',
        b'{"type":"SizeAsked","num_workers":"3"}',
        b'{"type":"SizeAsked","num_workers":3,"more":1}',
        b'{"type":"SizeAsked","num_workers":3}{"type":"SizeAsked","num_workers":3}',
        b'{"type":"SizeAsked","num_work',
        b'{"type":"Left","workers":["\xff\xfe"]}',
        b'{"type":"StepDone","step":0,"generation":1,"seconds":-1,"reports":[]}',
        b'{"type":"StepDone","step":0,"generation":1,"seconds":1,"reports":[["a",1,0.0]]}',
    ],
)
def test_a_bad_line_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidInputError):
        EVENTS.decode(line)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0123typeSizeAsked', max_size=60))
def test_no_line_raises_anything_but_the_typed_error(line: bytes | str) -> None:
    with contextlib.suppress(InvalidInputError):
        EVENTS.decode(line if isinstance(line, bytes) else line.encode())


def test_deep_nesting_is_refused() -> None:
    anything: Codec[object] = Codec(object)
    with pytest.raises(InvalidInputError):
        anything.decode(b"[" * 100_000 + b"]" * 100_000)


def test_values_that_json_cannot_represent_are_refused() -> None:
    anything: Codec[object] = Codec(object)
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        anything.encode({"a": object()})


def test_a_line_decodes_with_or_without_its_newline() -> None:
    line = EVENTS.encode(SizeAsked(num_workers=3))
    assert EVENTS.decode(line) == EVENTS.decode(line.rstrip(b"\n")) == SizeAsked(num_workers=3)
