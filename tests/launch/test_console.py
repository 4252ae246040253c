"""Workers' output is printed under their names, and finished logs are closed."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from evenstep.launch.console import BAR_S, ConsoleOutput

BOUND_S = 600.0


class Screen(io.StringIO):
    """An output that can be waited on for a line."""

    def __init__(self) -> None:
        super().__init__()
        self._written_to = threading.Condition()

    def write(self, text: str) -> int:
        with self._written_to:
            self._written_to.notify_all()
            return super().write(text)

    def shows(self, line: str) -> bool:
        with self._written_to:
            return self._written_to.wait_for(lambda: line in self.getvalue(), BOUND_S)


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def console(screen: Screen) -> Iterator[ConsoleOutput]:
    made = ConsoleOutput(screen)
    yield made
    made.close()


def open_files(folder: Path) -> set[str]:
    """The files of a folder that this process holds open."""
    held = set()
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            held.add(os.readlink(entry.path))
    return {Path(name).name for name in held if name.startswith(str(folder))}


def test_lines_are_printed_under_the_name_of_their_worker(
    console: ConsoleOutput, screen: Screen, tmp_path: Path
) -> None:
    with (tmp_path / "w0.log").open("w", buffering=1) as log:
        log.write("before\n")
        console.follow("w0", tmp_path / "w0.log")
        log.write("epoch 1\nepo")
        assert screen.shows("[w0] epoch 1\n")
        log.write("ch 2\n")
        assert screen.shows("[w0] epoch 2\n")
    assert "before" not in screen.getvalue()


def test_a_finished_log_is_printed_to_its_end_and_closed(
    console: ConsoleOutput, screen: Screen, tmp_path: Path
) -> None:
    other = tmp_path / "other.log"
    other.touch()
    console.follow("other", other)
    for n in range(5):
        path = tmp_path / f"w{n}.log"
        path.touch()
        console.follow(f"w{n}", path)
        path.write_text("the last line, without an end")
        console.unfollow(f"w{n}")
        assert screen.shows(f"[w{n}] the last line, without an end\n")
    other.write_text("still here\n")
    assert screen.shows("[other] still here\n")  # the others are closed by now
    assert open_files(tmp_path) == {"other.log"}
    console.close()
    assert open_files(tmp_path) == set()


def test_no_log_is_opened_when_the_reader_is_gone(tmp_path: Path) -> None:
    """As in `evenstep run ... | head`."""

    class Gone(Screen):
        def write(self, text: str) -> int:
            super().write(text)
            raise BrokenPipeError

    screen, path = Gone(), tmp_path / "w0.log"
    path.touch()
    console = ConsoleOutput(screen)
    console.follow("w0", path)
    path.write_text("a line\n")
    assert screen.shows("a line")
    console.close()
    console.follow("w1", path)
    assert open_files(tmp_path) == set()


class Terminal:
    """A real pseudo-terminal and its contents."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.out = os.fdopen(slave, "w")
        self._written = ""

    def close(self) -> None:
        self.out.close()
        os.close(self._master)

    def rows(self) -> list[str]:
        """The rows on the screen, up to the last one that was written to."""
        rows, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[\??\d*[a-zA-Z]|[^\x1b]", self._written):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                rows += [""] * (row == len(rows))
            elif part.endswith("A") and part.startswith("\x1b"):
                row -= int(part[2:-1])
            elif part == "\x1b[J":
                rows[row:] = [rows[row][:column]]
            elif part == "\x1b[K":
                rows[row] = rows[row][:column]
            elif not part.startswith("\x1b"):
                rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
                column += 1
        return rows

    def shows(self, *rows: str) -> bool:
        while self.rows() != list(rows):
            if not select.select([self._master], [], [], BOUND_S)[0]:
                return False
            self._written += os.read(self._master, 4096).decode()
        return True


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_on_a_terminal_a_progress_bar_moves_in_place_below_complete_lines(
    terminal: Terminal, tmp_path: Path
) -> None:
    paths = [tmp_path / "w0.log", tmp_path / "w1.log"]
    console = ConsoleOutput(terminal.out)
    with paths[0].open("w", buffering=1) as one, paths[1].open("w", buffering=1) as other:
        for path in paths:
            console.follow(path.stem, path)
        one.write("\r 10%|#         | 1/10 ")
        assert terminal.shows("[w0]  10%|#         | 1/10")
        one.write("\r 20%|##        | 2/10 ")
        assert terminal.shows("[w0]  20%|##        | 2/10")
        other.write("loss 0.5\n")
        assert terminal.shows("[w1] loss 0.5", "[w0]  20%|##        | 2/10")
        other.write("\r  1/3 ")  # the bar that changed last
        assert terminal.shows("[w1] loss 0.5", "[w1]   1/3")
        other.write("\r  3/3 \n")
        assert terminal.shows("[w1] loss 0.5", "[w1]   3/3 ", "[w0]  20%|##        | 2/10")
    console.close()
    assert terminal.shows("[w1] loss 0.5", "[w1]   3/3 ", "[w0]  20%|##        | 2/10 ", "")


def test_lines_and_bars_are_above_the_rows_that_show_the_run(
    terminal: Terminal, tmp_path: Path
) -> None:
    console, path = ConsoleOutput(terminal.out), tmp_path / "w0.log"
    with path.open("w", buffering=1) as log:
        console.follow("w0", path)
        console.show_below(["training 10%", "w0  209"])
        assert terminal.shows("training 10%", "w0  209")
        log.write("loss 0.5\n")
        assert terminal.shows("[w0] loss 0.5", "training 10%", "w0  209")
        log.write("\r 1/10 ")  # tqdm
        assert terminal.shows("[w0] loss 0.5", "[w0]  1/10", "training 10%", "w0  209")
        assert console.say("12:00:00 evenstep: w1 is lost")
        console.show_below(["training 20%"])
        said = "12:00:00 evenstep: w1 is lost"
        assert terminal.shows("[w0] loss 0.5", said, "[w0]  1/10", "training 20%")
    console.close()
    assert terminal.shows("[w0] loss 0.5", said, "[w0]  1/10 ", "")
    assert not console.say("too late")


def test_nested_progress_bars_share_one_line(terminal: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "w0.log"
    with path.open("w", buffering=1) as log:
        console = ConsoleOutput(terminal.out)
        console.follow("w0", path)
        log.write("\repochs 0/3\n\rbatches 1/9\x1b[A")
        assert terminal.shows("[w0] batches 1/9")
        log.write("\n\rbatches 2/9\x1b[A")
        assert terminal.shows("[w0] batches 2/9")
        log.write("\repochs 1/3")
        assert terminal.shows("[w0] epochs 1/3")
    console.close()


def test_a_workers_log_line_is_split_from_its_progress_bar(
    terminal: Terminal, tmp_path: Path
) -> None:
    path = tmp_path / "w0.log"
    with path.open("w", buffering=1) as log:
        console = ConsoleOutput(terminal.out)
        console.follow("w0", path)
        log.write("\r 9/10")
        assert terminal.shows("[w0]  9/10")
        log.write("12:00:00 evenstep: w0 is rank 0 of 2\n\r10/10")
        assert terminal.shows("[w0] 12:00:00 evenstep: w0 is rank 0 of 2", "[w0] 10/10")
    console.close()


def test_without_a_terminal_a_progress_bar_is_a_line_every_ten_seconds(
    screen: Screen, tmp_path: Path
) -> None:
    times = [0.0]
    console = ConsoleOutput(screen, clock=lambda: times[-1])
    bar, other = tmp_path / "w0.log", tmp_path / "w1.log"
    with bar.open("w", buffering=1) as log, other.open("w", buffering=1) as lines:
        console.follow("w0", bar)
        console.follow("w1", other)
        log.write("\r10%")
        assert screen.shows("[w0] 10%\n")
        log.write("\r20%\r30%")
        lines.write("loss 0.5\n")
        assert screen.shows("[w1] loss 0.5\n")  # by a poll that has seen the bar, too
        times.append(BAR_S)
        assert screen.shows("[w0] 30%\n")
        log.write("\r100%\n")
        assert screen.shows("[w0] 100%\n")
    console.close()
    assert screen.getvalue() == "[w0] 10%\n[w1] loss 0.5\n[w0] 30%\n[w0] 100%\n"
