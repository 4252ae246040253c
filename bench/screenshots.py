"""The screenshots in docs/pictures/: the page of a real run of three workers on emulated devices,
one of them slowed down, another killed.

python -m bench.screenshots [FOLDER]

Needs Debian's chromium and chromium-driver (`.ci/packages`). Takes two minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.tables import DOCS
from bench.testbed.browser import Browser
from bench.testbed.cli_run import CliRun
from bench.testbed.page_process import PageProcess

PICTURES = DOCS / "pictures"
SCRIPT = Path(__file__).parent / "scripts" / "emulated_devices.py"
SLOWED_AT, KILLED_AT, AFTER = 200, 400, 150  # steps
ARGS = ["--slow", "w1", "--slow-from", str(SLOWED_AT)]

DRAWN = """
return document.querySelectorAll("#workers tr").length === 3
    && document.querySelectorAll("#figures svg.es").length >= 2
"""
CLICK_PLAN = """
document.querySelector('#decisions li[data-kind=plan] button').click();
"""
LARGE, PHONE = (1280, 860), (390, 844)


def main(folder: Path = PICTURES) -> None:
    """Train, kill a worker, and take the pictures."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, train(Path(name)) as run, Browser() as browser:
        first = run.until_training(3)["generation"]
        run.until_step(KILLED_AT)
        run.signal("w2")
        step = run.until_training(3, after=first + 1)["step"]
        with PageProcess(run.folder) as page:
            run.until_step(step + AFTER)
            take(browser, page.url, folder)


def train(folder: Path) -> CliRun:
    """Three workers, with a price."""
    return CliRun(
        folder,
        workers="3",
        script=SCRIPT,
        args=ARGS,
        options=["--price", "0.4"],
        run_folder=folder / "uneven-cards",
    )


def take(browser: Browser, url: str, folder: Path) -> None:
    """Save the first screen in light, dark and on a phone, and a decision."""
    for name, (width, height), dark in (
        ("page-light", LARGE, False),
        ("page-dark", LARGE, True),
        ("page-phone", PHONE, False),
    ):
        browser.open(url, width=width, height=height, dark=dark)
        browser.until(DRAWN)
        browser.screenshot(folder / f"{name}.png")
    browser.open(url, width=LARGE[0], height=LARGE[1])
    browser.until(DRAWN)
    browser.run(CLICK_PLAN)
    browser.until("return document.querySelector('#details').open")
    browser.screenshot(folder / "page-decision.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
