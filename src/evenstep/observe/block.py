"""A run as a block of text for a terminal: progress, throughput, each worker, the last decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_ROWS = 12
"""Workers shown one by one; of more, the slowest."""

SLOWER = 1.05
"""The slowest worker is named if it computes so many times as long as the next: else noise would
name another one with each step."""

MIN_WIDTH, MAX_WIDTH = 40, 120

EIGHTHS = " ▏▎▍▌▋▊▉█"
GREEN, YELLOW, RED, DIM, BOLD, PLAIN = (f"\x1b[{n}m" for n in (32, 33, 31, 2, 1, 0))


class Style:
    """What the terminal can show."""

    def __init__(self, *, colour: bool, unicode: bool) -> None:
        self._colour, self.unicode = colour, unicode

    def paint(self, text: str, colour: str) -> str:
        """The text in a colour, if there are any."""
        return f"{colour}{text}{PLAIN}" if self._colour and text else text

    def bar(self, part: float, width: int) -> str:
        """A bar that is filled up to a part of its width, without the rest."""
        part = min(max(part, 0.0), 1.0)
        if not self.unicode:
            return "#" * round(part * width)
        eighths = round(part * width * 8)
        return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def block(status: Mapping[str, Any], width: int, style: Style) -> list[str]:
    """The lines for a status, none longer than `width` columns."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines = [_progress(status, width, style), _throughput(status, width, style)]
    lines += _workers(status["workers"], width, style)
    if last := _last_decision(status, width):
        lines.append(style.paint(last, DIM))
    lines += [style.paint(_cut(problem, width), RED) for problem in status["problems"]]
    return lines


def one_line(status: Mapping[str, Any]) -> str:
    """The same in a line, for output that is not a terminal."""
    parts = [status["state"], *_position(status), *_speed(status)]
    slow = slowest(status["workers"])
    if slow is not None:
        parts.append(f"slowest {slow['worker']} with {slow['compute_s'] * 1000:.1f} ms")
    return ", ".join(parts)


def _progress(status: Mapping[str, Any], width: int, style: Style) -> str:
    progress = status["progress"]
    state = status["state"] + (f": {status['reason']}" if status["reason"] else "")
    position = ", ".join(_position(status))
    if not progress["total_samples"]:
        return _cut(f"{state}  {position}", width)
    part = progress["samples"] / progress["total_samples"]
    room = width - len(state) - len(position) - 4
    if room < 8:
        return _cut(f"{state}  {position}", width)
    bar = style.bar(part, room)
    rest = ("·" if style.unicode else ".") * (room - len(bar))
    return f"{state}  {style.paint(bar, GREEN)}{style.paint(rest, DIM)}  {position}"


def _position(status: Mapping[str, Any]) -> list[str]:
    progress = status["progress"]
    parts = []
    if progress["num_epochs"]:
        epoch = min(progress["epoch"] + 1, progress["num_epochs"])
        parts.append(f"epoch {epoch}/{progress['num_epochs']}")
    if progress["total_samples"]:
        parts.append(f"{progress['samples'] / progress['total_samples']:.0%}")
    elif progress["samples"]:
        parts.append(f"{progress['samples']:,} samples")
    if progress["seconds_left"]:
        parts.append(f"{duration(progress['seconds_left'])} left")
    return parts or [f"step {status['step']:,}"]


def _throughput(status: Mapping[str, Any], width: int, style: Style) -> str:
    where = f"generation {status['generation']}, step {max(status['step'], 0):,}"
    speed = ", ".join(_speed(status))
    room = width - len(speed) - len(where)
    return f"{speed}{' ' * room}{where}" if room > 1 else _cut(speed, width)


def _speed(status: Mapping[str, Any]) -> list[str]:
    parts = [f"{number(status['samples_per_s'])} samples/s"]
    if status["samples_per_s"] and status["part_of_limit"]:
        parts.append(f"{status['part_of_limit']:.0%} of the limit")
        parts.append(f"{status['speedup']:.2f}x equal shares")
    return parts


def _workers(rows: Sequence[Mapping[str, Any]], width: int, style: Style) -> list[str]:
    """A bar for each worker, compute time and then wait, on one scale for all."""
    by_time = sorted(rows, key=lambda row: -row["compute_s"])
    shown = {row["worker"] for row in by_time[:MAX_ROWS]}
    longest_s = max((row["compute_s"] + row["wait_s"] for row in rows), default=0.0)
    slow = slowest(rows)
    names = max((len(row["worker"]) for row in rows), default=0)
    shares = max((len(f"{row['share']:,}") for row in rows), default=0)
    lines = []
    for row in rows:
        if row["worker"] not in shown:
            continue
        head = f"{row['worker']:<{names}}  {row['share']:>{shares},}  "
        tail = _times(row)
        bar = ""
        if longest_s and row["rank"] is not None:
            room = max(0, width - len(head) - len(tail) - 2)
            done = style.bar(row["compute_s"] / longest_s, room)
            num_idle = min(round(row["wait_s"] / longest_s * room), room - len(done))
            idle = ("░" if style.unicode else ".") * num_idle
            colour = YELLOW if row is slow else GREEN
            gap = " " * (room - len(done) - len(idle))
            bar = f"{style.paint(done, colour)}{style.paint(idle, DIM)}{gap}  "
        lines.append(f"{head}{bar}{tail}" if bar else _cut(f"{head}{tail}", width))
    if len(rows) > len(shown):
        lines.append(f"and {len(rows) - len(shown)} faster workers")
    return lines


def _times(row: Mapping[str, Any]) -> str:
    if row["rank"] is None or not row["compute_s"]:
        return str(row["state"])
    times = f"{row['compute_s'] * 1000:7.1f} ms + {row['wait_s'] * 1000:6.1f} wait"
    return times if row["state"] == "training" else f"{times}  {row['state']}"


def slowest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The worker that the others wait for; None if none is clearly slower than the others."""
    trained = [row for row in rows if row["compute_s"] and row["rank"] is not None]
    trained.sort(key=lambda row: float(row["compute_s"]))
    if len(trained) < 2 or trained[-1]["compute_s"] < SLOWER * trained[-2]["compute_s"]:
        return None
    return trained[-1]


def _last_decision(status: Mapping[str, Any], width: int) -> str:
    if not status["decisions"]:
        return ""
    last = status["decisions"][-1]
    ago = duration(max(0.0, status["at_s"] - last["at_s"]))
    return _cut(f"{last['kind']} {ago} ago: {last['reason']}", width)


def duration(seconds: float) -> str:
    """Seconds as people read them: 7 s, 3:25 min, 2:05 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60) if seconds >= 6000 else int(seconds) // 60
    if seconds < 6000:
        return f"{minutes}:{int(seconds) % 60:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"


def number(value: float) -> str:
    """Three digits at least: 5,210, 52.1, 0.521."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}~"
