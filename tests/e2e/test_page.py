"""The page of a live run in a real Chromium: what people see, and what they may do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from bench.testbed.browser import CHROMIUM, DRIVER, Browser
from bench.testbed.cli_run import CliRun
from bench.testbed.live_run import HELD
from bench.testbed.page_process import PageProcess

from evenstep.config import Choice
from evenstep.observe.history import History
from evenstep.observe.report.page import page as report
from evenstep.simulate.run import run as simulate
from evenstep.simulate.scenario import load_scenario

SPOT = Path(__file__).parents[2] / "scenarios" / "spot.yaml"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver: run .ci/packages"
)

SLOW = [*HELD, "--per-sample", "0.002", "--slow", "w1"]

SHARES = """
return Object.fromEntries([...document.querySelectorAll("#workers tr")]
    .map((row) => [row.dataset.key, Number(row.children[1].textContent)]))
"""
SENT = """
const done = arguments[arguments.length - 1];
fetch("/commands", {method: "POST", headers: {"content-type": "application/json", ...arguments[0]},
    body: JSON.stringify({what: "drain", worker: "w0"})}).then((answer) => done(answer.status));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def test_shares_move_a_kill_appears_with_its_reason_and_commands_need_the_token(
    browser: Browser, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        options = ["--restarts", "0"]
        run = stack.enter_context(CliRun(tmp_path, workers="3", args=SLOW, options=options))
        run.until(lambda status: True)  # there is a run to show
        page = stack.enter_context(PageProcess(run.folder, "--commands"))
        browser.open(page.url)
        assert "key=" not in browser.run("return location.href")
        browser.until("return document.querySelector('.state .word').textContent === 'training'")
        # Shares move: the slow worker gets less than the others.
        browser.until(
            f"const shares = (() => {{{SHARES}}})();"
            "return shares.w1 > 0 && 2 * shares.w1 < shares.w0 && 2 * shares.w1 < shares.w2"
        )
        browser.until("return document.querySelector('#picture-shares svg [data-decision]')")
        # A kill appears, with its reason, and the numbers behind what was decided on it.
        run.signal("w2")
        browser.until("return document.querySelector('#decisions').textContent.includes('w2 lost')")
        browser.run(
            "[...document.querySelectorAll('#decisions button')]"
            ".find((button) => button.textContent.includes('w2 lost')).click()"
        )
        browser.until("return document.querySelector('#details').open")
        assert "w2 lost" in browser.text("#details-title")
        assert "w0" in browser.text("#details-body .numbers")
        browser.run("document.querySelector('#details').close()")
        # A command without the page's token is refused, with it it is not.
        assert browser.run_async(SENT, {}) == 403
        assert browser.run_async(SENT, {"x-evenstep-token": "0" * 32}) == 403
        assert "w0" in run.pids()
        browser.run("document.querySelector('#workers tr[data-key=w0] button').click()")
        browser.run("document.querySelector('#confirm-yes').click()")
        run.until(lambda status: all(w["worker"] != "w0" or w["rank"] is None
                                     for w in status["workers"]))  # fmt: skip
        browser.until("return document.querySelector('#decisions').textContent.includes('w0 left')")
        refused = [line for line in browser.console_problems() if "/commands" not in line]
        assert not refused, "the page keeps to its own strict policy"
        # The end of the run is said, and what is known stays.
        run.finish()
        browser.until("return document.querySelector('.state .word').textContent === 'finished'")
        assert browser.run("return document.querySelectorAll('#figures svg.es').length") >= 3
        assert browser.run("return document.querySelector('#stop').hidden")


def test_a_journal_is_looked_through_by_keys_and_clicks_and_fits_a_phone(
    browser: Browser, tmp_path: Path
) -> None:
    journal = tmp_path / "spot.jsonl"
    simulate(load_scenario(SPOT, []), Choice("auto"), journal=journal)
    drawn = "return document.querySelector('#picture-throughput svg')?.dataset.end"
    with PageProcess(journal) as page:
        browser.open(page.url)
        end_s = float(browser.until(drawn))
        browser.press("+", "ArrowLeft")
        browser.until(f"{drawn} < {end_s} && arguments[0]", True)
        browser.press("0")
        browser.until(f"{drawn} == {end_s}")
        browser.run(
            "const mark = document.querySelector('#picture-throughput [data-decision]');"
            "for (const type of ['pointerdown', 'pointerup']) mark.dispatchEvent("
            "new PointerEvent(type, {bubbles: true, pointerId: 1, pointerType: 'mouse'}))"
        )
        browser.until("return document.querySelector('#details').open")
        browser.press("Escape")
        browser.until("return !document.querySelector('#details').open")
        for width in (380, 600, 900):
            browser.look(width=width, height=800, dark=True)
            browser.until(
                "return document.querySelector('#picture-shares svg')"
                "?.getBoundingClientRect().right <= innerWidth"
            )
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), width
        assert not browser.console_problems()


def test_a_report_opens_from_disk_with_the_network_off(browser: Browser, tmp_path: Path) -> None:
    histories = []
    for policy in ("auto", "uniform"):
        journal = tmp_path / f"{policy}.jsonl"
        simulate(load_scenario(SPOT, ["steps=100"]), Choice(policy), journal=journal)
        histories.append(History.read(journal))
    path = tmp_path / "report.html"
    path.write_text(report(histories), encoding="utf-8")
    with browser.offline():
        for dark in (False, True):
            browser.open(path.as_uri(), dark=dark)
            drawn = browser.run("return document.querySelectorAll('svg.es').length")
            assert drawn >= 2 * len(histories) * 6
            assert browser.requests() == [path.as_uri()]
            assert not browser.console_problems()
        browser.look(width=380, height=800, dark=False)
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
