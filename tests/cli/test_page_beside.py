"""The page of `run --page`: whatever becomes of its process, the run goes on and ends."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from evenstep.cli import page_beside as beside

RUN = Path("a-run")

URL = "http://127.0.0.1:1/?key=0"


def start_instead(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    """The page's process runs this program."""

    def wrapped(_: Sequence[str]) -> list[str]:
        return list(command)

    monkeypatch.setattr(beside, "die_with_parent", wrapped)


async def train_until(is_over: str, caplog: pytest.LogCaptureFixture) -> None:
    """A run with a page, which ends once its log has a text."""
    async with beside.page_beside(RUN):
        while is_over not in caplog.text:
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenstep")


def test_a_page_that_cannot_be_started_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_instead(monkeypatch, "/there/is/no/such/program")
    asyncio.run(train_until("there is no page", caplog))
    assert "`evenstep page a-run` opens one" in caplog.text
    assert "the page ended with the run" not in caplog.text


def test_a_page_that_ends_early_is_told_once_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = f"print('{URL}', flush=True); import sys; sys.exit('12:00:00 evenstep: one\\ntwo')"
    start_instead(monkeypatch, sys.executable, "-c", script)
    asyncio.run(train_until("no page any more", caplog))
    assert [r.getMessage() for r in caplog.records] == [
        f"page: {URL}",
        "page: one",
        "page: two",
        "there is no page any more (exit code 1): two; `evenstep page a-run` opens it again",
    ]


def test_a_page_that_talks_without_end_and_does_not_go_is_killed_as_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beside, "END_S", 0.2)
    script = f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("{URL}", flush=True)
while True:
    os.write(2, b"x" * 300_000)
    os.write(2, b"\\nstill here\\n")
"""
    start_instead(monkeypatch, sys.executable, "-c", script)
    asyncio.run(train_until("page: still here", caplog))
    assert "the page ended with the run" in caplog.text
