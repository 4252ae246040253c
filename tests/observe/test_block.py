"""A run as text: nothing wider than asked for, and every figure where people look for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from evenstep.observe.block import Style, block, duration, number, one_line, slowest

PLAIN = Style(colour=False, unicode=True)


def worker(name: str, rank: int | None, share: int, compute_s: float, wait_s: float) -> Any:
    return {
        "worker": name,
        "rank": rank,
        "share": share,
        "compute_s": compute_s,
        "wait_s": wait_s,
        "state": "training" if rank is not None else "starting",
    }


def status(**changed: Any) -> dict[str, Any]:
    return {
        "state": "training",
        "reason": "",
        "generation": 4,
        "step": 10_482,
        "at_s": 100.0,
        "samples_per_s": 5210.0,
        "part_of_limit": 0.97,
        "speedup": 1.84,
        "progress": {
            "samples": 1_230_000,
            "total_samples": 3_000_000,
            "epoch": 4,
            "num_epochs": 10,
            "seconds_left": 751.0,
        },
        "workers": [
            worker("w0", 0, 209, 0.0412, 0.0007),
            worker("w1", 1, 74, 0.0401, 0.0018),
            worker("w10", 2, 1485, 0.0439, 0.0),
            worker("w11", None, 0, 0.0, 0.0),
        ],
        "decisions": [
            {"at_s": 20.0, "kind": "regroup", "reason": "w10 joined"},
            {"at_s": 88.0, "kind": "plan", "reason": "w1 is slowest"},
        ],
        "problems": [],
        **changed,
    }


def visible(line: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", line)


def test_progress_throughput_workers_and_the_last_decision_are_there() -> None:
    first, second, *rows, last = block(status(), 80, PLAIN)
    assert first.startswith("training  █████")
    assert first.endswith("·  epoch 5/10, 41%, 12:31 min left")
    assert second.startswith("5,210 samples/s, 97% of the limit, 1.84x equal shares  ")
    assert second.endswith("  generation 4, step 10,482")
    assert [row.split()[:2] for row in rows] == [
        ["w0", "209"],
        ["w1", "74"],
        ["w10", "1,485"],
        ["w11", "0"],
    ]
    assert rows[0].endswith("   41.2 ms +    0.7 wait")
    assert rows[3].endswith("starting")
    assert last == "plan 12 s ago: w1 is slowest"


def test_bars_are_on_one_scale_and_show_the_wait() -> None:
    _, _, *rows, _ = block(status(), 100, PLAIN)
    computed = [sum(row.count(c) for c in "█▏▎▍▌▋▊▉") for row in rows]
    assert computed[1] <= computed[0] <= computed[2]
    assert "░" in rows[1]
    assert "░" not in rows[2]


@pytest.mark.parametrize("width", [20, 40, 57, 80, 120, 500])
@pytest.mark.parametrize("style", [PLAIN, Style(colour=True, unicode=True)])
def test_no_line_is_wider_than_the_terminal(width: int, style: Style) -> None:
    problems = ["journal.jsonl: cannot be written: No space left on device; 486 records wait"]
    lines = block(status(problems=problems), width, style)
    assert all(len(visible(line)) <= max(width, 40) for line in lines)


def test_without_unicode_and_colours_it_is_plain_ascii() -> None:
    lines = block(status(), 80, Style(colour=False, unicode=False))
    assert "\n".join(lines).isascii()
    assert "####" in lines[0]
    assert "\x1b" not in "".join(lines)


def test_a_run_that_has_not_begun_shows_its_state() -> None:
    nothing = {"samples": 0, "total_samples": 0, "epoch": 0, "num_epochs": 0, "seconds_left": 0.0}
    begun = status(
        state="starting",
        step=-1,
        generation=0,
        samples_per_s=0.0,
        part_of_limit=0.0,
        speedup=0.0,
        progress=nothing,
        workers=[],
        decisions=[],
    )
    assert block(begun, 80, PLAIN)[0].startswith("starting")
    assert one_line(begun) == "starting, step -1, 0 samples/s"


def test_a_stream_without_a_length_shows_its_samples() -> None:
    stream = {"samples": 51_200, "total_samples": 0, "epoch": 0, "num_epochs": 0, "seconds_left": 0}
    assert block(status(progress=stream), 80, PLAIN)[0] == "training  51,200 samples"


def test_of_many_workers_the_slowest_are_shown() -> None:
    many = [worker(f"w{i}", i, 10, 0.01 + 0.001 * (i % 50), 0.0) for i in range(50)]
    lines = block(status(workers=many), 80, PLAIN)
    assert sum(line.startswith("w") for line in lines) == 12
    assert any(line.startswith("w49 ") for line in lines)
    assert "and 38 faster workers" in lines


def test_one_line_says_the_same() -> None:
    assert one_line(status()) == (
        "training, epoch 5/10, 41%, 12:31 min left, 5,210 samples/s, 97% of the limit, "
        "1.84x equal shares, slowest w10 with 43.9 ms"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99, "99 s"), (100, "1:40 min"), (751, "12:31 min"), (7500, "2:05 h")],
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(5210.4, "5,210"), (52.13, "52.1"), (0.5211, "0.521")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_slowest_worker_is_named_only_if_it_is_clearly_slower() -> None:
    def rows(*milliseconds: float) -> list[Any]:
        return [worker(f"w{i}", i, 10, ms / 1000, 0.0) for i, ms in enumerate(milliseconds)]

    for alike in ((), (20.0,), (21.3, 21.3, 20.3), (20.3, 21.2, 21.3)):
        assert slowest(rows(*alike)) is None
    found = slowest(rows(21.3, 22.6, 20.3))
    assert found is not None
    assert found["worker"] == "w1"
    assert "slowest" not in one_line(status(workers=rows(21.3, 21.3, 20.3)))
