"""Live news: what changed, at once for all, and nothing for nobody."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evenstep.journal import Record
from evenstep.observe.history import History
from evenstep.page import feed
from evenstep.page.watched import Watched
from evenstep.types import Joined, Left, StepDone, StepReport, Worker
from tests.observe.runs import write_journal
from tests.page.conftest import NUM_STEPS
from tests.page.served import Client, served

STARTED = [
    Record(at_s=0.0, event=Joined(workers=(Worker(id="w0"),))),
    Record(
        at_s=1.0,
        event=StepDone(step=0, generation=1, seconds=1.0, reports=(StepReport("w0", 4, 1.0),)),
    ),
]


def until_news(client: Client, topic: str, holds: Any) -> Any:
    """The first news of a topic that satisfies a condition."""
    with client.events() as events:
        for name, content in events:
            if name == topic and holds(content):
                return content
    raise AssertionError("the feed ended")


def test_a_browser_is_told_the_status_and_how_far_the_journal_goes(page: Client) -> None:
    status = until_news(page, "status", lambda s: s["state"] == "recorded")
    assert {w["worker"] for w in status["workers"]} >= {"on-demand-0", "on-demand-1"}
    assert status["newest"][-1]["reason"]
    grown = until_news(page, "grown", lambda g: g["num_steps"])
    assert grown["num_steps"] == NUM_STEPS
    assert grown["begin_s"] < grown["end_s"]


def test_plans_one_after_the_other_do_not_hide_what_was_before(recorded: Path) -> None:
    run = Watched(recorded, name="run", ask=None)
    run.follow()
    newest = run.status()["newest"]
    assert [d["index"] for d in newest] == sorted(d["index"] for d in newest)
    for one, next_one in pairwise(newest):
        assert (one["kind"], next_one["kind"]) != ("plan", "plan")
        assert next_one["index"] == one["index"] + 1 + next_one["num_before"]
    assert any(d["num_before"] for d in newest)


def test_a_journal_that_grows_is_followed(recorded: Path, tmp_path: Path) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    journal = tmp_path / "growing.jsonl"
    journal.write_bytes(b"".join(lines[:50]))
    with served(journal) as client, client.events() as events:
        news = iter(events)
        first = next(c for name, c in news if name == "grown" and c["num_steps"])
        with journal.open("ab") as file:
            file.write(b"".join(lines[50:]))
        last = next(c for name, c in news if name == "grown" and c["num_steps"] == NUM_STEPS)
        assert last["end_s"] > first["end_s"]


def test_a_journal_that_somebody_writes_is_of_a_run_that_trains(
    recorded: Path, tmp_path: Path
) -> None:
    now_s, lines = [0.0], recorded.read_bytes().splitlines(keepends=True)
    journal = tmp_path / "growing.jsonl"
    journal.write_bytes(b"".join(lines[:50]))
    run = Watched(journal, name="run", ask=None, clock=lambda: now_s[0])
    run.follow()
    assert run.status()["state"] != "training"
    with journal.open("ab") as file:
        file.write(b"".join(lines[50:60]))
    run.follow()
    assert run.status()["state"] == "training"
    now_s[0] = 3600.0
    run.follow()
    assert run.status()["state"] != "training"


def test_what_was_written_while_nobody_watched_is_no_sign_of_life(
    recorded: Path, tmp_path: Path
) -> None:
    now_s, lines = [0.0], recorded.read_bytes().splitlines(keepends=True)
    journal = tmp_path / "killed.jsonl"
    journal.write_bytes(b"".join(lines[:50]))

    def ask(what: str) -> dict[str, Any]:
        raise ConnectionRefusedError("nobody there")

    run = Watched(
        journal, name="run", ask=ask, clock=lambda: now_s[0], unix_clock=lambda: 1e9 + now_s[0]
    )
    run.follow()
    for written_s, seen_s, state in ((2.0, 60.0, "no coordinator"), (115.0, 120.0, "training")):
        with journal.open("ab") as file:
            file.write(b"".join(lines[50:60]))
        lines[50:60] = []
        os.utime(journal, (1e9 + written_s,) * 2)
        now_s[0] = seen_s
        run.follow()
        status = run.status()
        assert (status["state"], status["is_live"]) == (state, state == "training")
        assert not status["takes_commands"]


def test_a_run_that_has_not_begun_is_shown_when_it_does(recorded: Path, tmp_path: Path) -> None:
    journal = tmp_path / "later.jsonl"
    with served(journal) as client, client.events() as events:
        news = iter(events)
        assert next(c for name, c in news if name == "status")["state"] == "starting"
        assert client.get("/pictures/shares").json == {"svg": "", "readout": []}
        shutil.copy(recorded, journal)
        assert next(c for name, c in news if name == "grown" and c["num_steps"])


def test_a_run_that_vanishes_is_said_to_and_what_is_known_stays(journal: Path) -> None:
    with served(journal) as client, client.events() as events:
        news = iter(events)
        assert next(c for name, c in news if name == "grown" and c["num_steps"])
        os.unlink(journal)
        gone = next(c for name, c in news if name == "grown" and c["problem"])
        assert "is gone" in gone["problem"]
        assert gone["num_steps"] == NUM_STEPS
        assert client.get("/pictures/shares").json["svg"].startswith("<svg")


def test_the_run_is_looked_at_only_while_somebody_watches(journal: Path) -> None:
    asked = []

    def ask(what: str) -> dict[str, Any]:
        asked.append(what)
        raise ConnectionRefusedError("nobody there")

    with served(journal, ask=ask) as client:
        assert client.get("/session").status == 200
        assert not asked
        with client.events() as events:
            next(iter(events))
        assert set(asked) == {"status"}


def test_a_look_that_takes_long_is_waited_for_by_all_who_come_meanwhile() -> None:
    lock, may_end = threading.Lock(), threading.Event()
    num_running, num_together = 0, []

    def look() -> dict[str, Any]:
        nonlocal num_running
        with lock:
            num_running += 1
            num_together.append(num_running)
        may_end.wait()
        with lock:
            num_running -= 1
        return {"state": "training"}

    async def reload(times: int) -> bytes:
        news = feed.Feed({"status": (look, 0.0)})
        for _ in range(times):
            news.enter()
            await asyncio.sleep(0)  # it begins to look
            await asyncio.sleep(0)
            news.leave()
        news.enter()
        may_end.set()
        async with aclosing(news.events()) as events:
            found = [event async for event in until_first(events, b"event: status")]
        news.leave()
        return found[-1]

    assert b"training" in asyncio.run(reload(5))
    assert max(num_together) == 1


async def until_first(events: AsyncIterator[bytes], start: bytes) -> AsyncIterator[bytes]:
    async for event in events:
        yield event
        if event.startswith(start):
            return


def test_there_is_room_for_a_bounded_number_of_browsers(
    page: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)
    with page.events() as events:
        next(iter(events))
        refused = page.get("/events")
        assert refused.status == 503
        assert "1 browsers watch" in refused.text
    until_news(page, "status", bool)  # the one who left made room


def test_a_coordinator_that_falls_silent_is_waited_for_and_then_given_up(recorded: Path) -> None:
    now_s, answers = [0.0], [True]
    told = {"state": "training", "problems": [], "workers": [], "settings": {"x": 1}}

    def ask(what: str) -> dict[str, Any]:
        if not answers[0]:
            raise ConnectionRefusedError("nobody there")
        return dict(told)

    run = Watched(recorded, name="run", ask=ask, clock=lambda: now_s[0])
    run.follow()
    assert run.status()["is_live"]
    assert "settings" not in run.status()
    answers[0] = False
    silent = run.status()
    assert (silent["state"], silent["problems"]) == ("no answer", ["nobody there"])
    assert not silent["takes_commands"]
    now_s[0] = 31.0
    given_up = run.status()
    assert given_up["state"] == "no coordinator"
    assert "workers may train on for up to the lease" in given_up["reason"]
    answers[0] = True
    assert run.status()["state"] == "training"


@pytest.mark.parametrize(
    ("cause", "state", "reason"),
    [
        ("trained to the end", "finished", "trained to the end"),
        ("stopped: SIGINT", "stopped", "SIGINT"),
    ],
)
def test_a_run_whose_journal_has_its_end_is_over_at_once(
    cause: str, state: str, reason: str, tmp_path: Path
) -> None:
    left = Record(at_s=9.0, event=Left(workers=("w0",), cause=cause))
    journal, answers = write_journal(tmp_path / "run.jsonl", [*STARTED, left]), [True]
    *begun, end = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(begun))
    told = {"state": "training", "reason": "", "problems": [], "workers": []}

    def ask(what: str) -> dict[str, Any]:
        if not answers[0]:
            raise ConnectionRefusedError("nobody there")
        return dict(told)

    run = Watched(journal, name="run", ask=ask, clock=lambda: 0.0)
    run.follow()
    assert run.status()["state"] == "training"
    answers[0] = False
    assert run.status()["state"] == "no answer"
    with journal.open("ab") as file:
        file.write(end)
    status = run.status()
    assert (status["state"], status["reason"], status["is_live"]) == (state, reason, False)


def test_while_a_long_journal_is_read_for_the_first_time_its_bytes_are_counted(
    recorded: Path,
) -> None:
    run, seen = Watched(recorded, name="run", ask=None), []
    follow = History.follow

    def followed(history: History) -> int:
        seen.append(run.status()["reading"])
        num = follow(history)
        seen.append(run.status()["reading"])
        return num

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "follow", followed)
        run.follow()
    size = recorded.stat().st_size
    assert seen == [(0, 0), (size, size)]
    assert run.status()["reading"] is None


def test_one_problem_is_told_once_and_a_run_that_trains_has_steps(journal: Path) -> None:
    told = {"state": "training", "step": 500, "reason": "", "problems": [], "workers": []}
    seen = Watched(journal, name="run", ask=lambda what: dict(told))
    seen.follow()
    os.unlink(journal)
    seen.follow()
    [problem] = seen.status()["problems"]
    assert "is gone" in problem
    late = Watched(journal, name="run", ask=lambda what: dict(told))
    late.status()
    assert "cannot be read" in late.follow()["problem"]


def test_the_page_has_room_for_names_as_the_report_does(page: Client) -> None:
    until_news(page, "grown", lambda g: g["num_steps"])
    svg = page.get("/pictures/roster").json["svg"]
    for worker in ("on-demand-0", "on-demand-1"):
        assert f">{worker}</text>" in svg
