"""A real browser without a window: Debian's Chromium, driven through its own driver."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)

BOUND_S = 300.0
"""For a condition in a page; a test as a whole has a bound of its own."""


class Browser:
    """One browser; on exit it is gone, with all that it kept."""

    def __init__(self) -> None:
        if CHROMIUM is None or DRIVER is None:
            raise FileNotFoundError("chromium and chromedriver are not installed: run .ci/packages")
        self._profile = tempfile.TemporaryDirectory(prefix="evenstep-browser-")
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_script_timeout(BOUND_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page in a window of this size; what was said and asked for before is forgotten."""
        self.look(width=width, height=height, dark=dark)
        self.driver.get("about:blank")  # the last page may complain that its server is gone
        self.console_problems()
        self.requests()
        self.driver.get(url)

    def look(self, *, width: int, height: int, dark: bool) -> None:
        """Change the size of the window and the colour scheme that is preferred."""
        phone = width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def text(self, css: str) -> str:
        """The text of an element, as script sees it; empty if there is none."""
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        return str(self.driver.execute_script(script, css))

    def press(self, *keys: str) -> None:
        """Press keys, by their names in JavaScript."""
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
                code = {"windowsVirtualKeyCode": 27} if key == "Escape" else {}
                event = {"type": kind, "key": key, **text, **code}
                self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", event)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def run_async(self, script: str, *arguments: Any) -> Any:
        """Run a script whose last argument is what to call with its result."""
        return self.driver.execute_async_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until a script returns something true, and return that."""
        wait = WebDriverWait(self.driver, BOUND_S, poll_frequency=0.05)
        return wait.until(lambda d: d.execute_script(script, *arguments), f"never: {script}")

    def console_problems(self) -> list[str]:
        """Warnings and errors in the console since it was last asked."""
        log = self.driver.execute("getLog", {"type": "browser"})["value"]
        return [str(line["message"]) for line in log if line["level"] in ("WARNING", "SEVERE")]

    @contextmanager
    def offline(self) -> Iterator[None]:
        """Meanwhile, no network: every request but those for files on disk fails."""
        without = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions", {"offline": True, **without}
        )
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Network.disable", {})

    def requests(self) -> list[str]:
        """What pages asked for since this was last called."""
        log = self.driver.execute("getLog", {"type": "performance"})["value"]
        messages = [json.loads(line["message"])["message"] for line in log]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [str(params["request"]["url"]) for params in sent]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen, or the whole page, as PNG."""
        asked: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            asked["clip"] = {**size, "scale": 1}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"]
        path.write_bytes(base64.b64decode(data))
