"""What workers write is shown under their names, and what is over is let go."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from evenstep.launch.echo import Echo

BOUND_S = 20.0


class Screen(io.StringIO):
    """Tells when a line is on it."""

    def __init__(self) -> None:
        super().__init__()
        self._there = threading.Condition()

    def write(self, text: str) -> int:
        with self._there:
            self._there.notify_all()
            return super().write(text)

    def shows(self, line: str) -> bool:
        with self._there:
            return self._there.wait_for(lambda: line in self.getvalue(), BOUND_S)


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def echo(screen: Screen) -> Iterator[Echo]:
    made = Echo(screen)
    yield made
    made.close()


def open_files(folder: Path) -> set[str]:
    """The files of a folder that this process holds open."""
    held = set()
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            held.add(os.readlink(entry.path))
    return {Path(name).name for name in held if name.startswith(str(folder))}


def test_lines_are_shown_under_the_name_of_who_wrote_them(
    echo: Echo, screen: Screen, tmp_path: Path
) -> None:
    with (tmp_path / "w0.log").open("w", buffering=1) as log:
        log.write("before\n")
        echo.follow("w0", tmp_path / "w0.log")
        log.write("epoch 1\nepo")
        assert screen.shows("[w0] epoch 1\n")
        log.write("ch 2\n")
        assert screen.shows("[w0] epoch 2\n")
    assert "before" not in screen.getvalue()


def test_what_is_over_is_shown_to_its_end_and_let_go(
    echo: Echo, screen: Screen, tmp_path: Path
) -> None:
    other = tmp_path / "other.log"
    other.touch()
    echo.follow("other", other)
    for n in range(5):
        path = tmp_path / f"w{n}.log"
        path.touch()
        echo.follow(f"w{n}", path)
        path.write_text("the last line, without an end")
        echo.unfollow(f"w{n}")
        assert screen.shows(f"[w{n}] the last line, without an end\n")
    other.write_text("still here\n")
    assert screen.shows("[other] still here\n")  # by now the others were let go
    assert open_files(tmp_path) == {"other.log"}
    echo.close()
    assert open_files(tmp_path) == set()


def test_nothing_is_opened_for_nobody(tmp_path: Path) -> None:
    """Whoever looked on is gone: `evenstep run ... | head`."""

    class Gone(Screen):
        def write(self, text: str) -> int:
            super().write(text)
            raise BrokenPipeError

    screen, path = Gone(), tmp_path / "w0.log"
    path.touch()
    echo = Echo(screen)
    echo.follow("w0", path)
    path.write_text("a line\n")
    assert screen.shows("a line")
    echo.close()
    echo.follow("w1", path)
    assert open_files(tmp_path) == set()
