"""Everybody who may look at a run: a browser on its page, a scraper of its metrics, `evenstep top`.

The browser is an HTTP client that asks for what the page's script asks for, at the same pace: what
a real one draws costs the machine that it runs on.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from bench.jobs import BIN, BOUND_S, end_process

URL = re.compile(r"page: (http\S+)")
PICTURES_S, SCRAPE_S = 2.0, 5.0  # as page.js asks, and as examples/grafana scrapes
TERMINAL = (24, 100)  # rows, columns


def watch(run: Path, log: Path, cleanup: ExitStack) -> None:
    """Look at a run, started with --page, until `cleanup`. Returns once its figures arrive."""
    viewer = Viewer(_page_url(log))
    cleanup.callback(viewer.close)
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    env = {**os.environ, "LINES": str(TERMINAL[0]), "COLUMNS": str(TERMINAL[1])}
    command = [str(BIN / "evenstep"), "top", str(run)]
    top = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    cleanup.callback(os.close, ours)
    cleanup.callback(end_process, top)
    viewer.drains = ours
    viewer.start()


def _page_url(log: Path) -> str:
    deadline_s = time.monotonic() + BOUND_S
    while not (found := URL.search(log.read_text())):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no page: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    return found[1]


class Viewer:
    """A browser and a scraper, in threads of this process."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._base, key = f"{parts.scheme}://{parts.netloc}", parts.query.partition("=")[2]
        self._headers = {"authorization": f"Bearer {key}"}
        self._closed = threading.Event()
        self.drains = -1  # the terminal that `top` writes to
        self.num_events = self.num_pictures = self.num_scrapes = 0

    def start(self) -> None:
        """Look at it from now on."""
        for look in (self._follow, self._draw, self._scrape):
            threading.Thread(target=look, daemon=True).start()

    def close(self) -> None:
        """Look no more. Fails if there was nothing to see: the measurement would mean nothing."""
        self._closed.set()
        seen = self.num_events, self.num_pictures, self.num_scrapes
        if not all(seen):
            raise SystemExit("viewers saw {} events, {} pictures, {} scrapes".format(*seen))

    def _open(self, path: str) -> bytes:
        with urlopen(Request(self._base + path, headers=self._headers), timeout=BOUND_S) as answer:
            return bytes(answer.read())

    def _follow(self) -> None:
        request = Request(f"{self._base}/events", headers=self._headers)
        with urlopen(request, timeout=BOUND_S) as answer:
            for line in answer:
                self.num_events += line.startswith(b"data:")
                if self._closed.is_set():
                    return

    def _draw(self) -> None:
        names = json.loads(self._open("/session"))["pictures"]
        while not self._closed.wait(PICTURES_S):
            for name in names:
                self._open(f"/pictures/{name}?width=800")
                self.num_pictures += 1
            try:
                os.read(self.drains, 1 << 16)
            except (BlockingIOError, OSError):
                continue

    def _scrape(self) -> None:
        while not self._closed.wait(SCRAPE_S):
            self.num_scrapes += b"evenstep_up 1" in self._open("/metrics")
