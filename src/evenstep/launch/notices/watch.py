"""Watches for a notice in a small thread: training neither waits for it nor fails with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from evenstep.errors import ConfigError
from evenstep.launch.notices.aws import AwsNotice
from evenstep.launch.notices.azure import AzureNotice
from evenstep.launch.notices.gcp import GcpNotice
from evenstep.ports import PreemptionNotice, look_up

log = logging.getLogger("evenstep")

NOTICES: dict[str, type[Any]] = {"aws": AwsNotice, "gcp": GcpNotice, "azure": AzureNotice}
EVERY_S, MAX_EVERY_S = 5.0, 60.0  # between two questions; while they fail, up to the second
MOST_QUOTED = 200  # letters of a notice


def make_notice(text: str) -> PreemptionNotice:
    """From NAME or NAME:KEY=VALUE, as in aws:endpoint=http://127.0.0.1:1338."""
    name, _, option = text.partition(":")
    found = look_up("notices", name, NOTICES)
    key, equals, value = option.partition("=")
    if option and not equals:
        raise ConfigError("--notice", f"expected NAME:KEY=VALUE, got {text!r}")
    try:
        made: PreemptionNotice = found(**({key: value} if option else {}))
    except TypeError as e:
        raise ConfigError("--notice", f"{name} cannot be made with {option!r}: {e}") from None
    return made


class NoticeWatch:
    """Calls `on_notice` with the reason, once. From a thread of its own."""

    def __init__(
        self,
        notice: PreemptionNotice,
        on_notice: Callable[[str], None],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self._notice, self._on_notice, self._every_s = notice, on_notice, every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-notice", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more. Does not wait for an answer that is on its way."""
        self._closed.set()

    def _run(self) -> None:
        pause_s, problem = self._every_s, ""
        while not self._closed.is_set():
            try:
                why = self._notice.poll()
            except Exception as e:  # a plug may raise anything, and training goes on
                if (str(e) or repr(e)) != problem:
                    problem = str(e) or repr(e)
                    log.warning("no notice of a preemption would be heard: %s", problem)
                pause_s = min(MAX_EVERY_S, 2 * pause_s)
            else:
                if problem:
                    log.info("notices of preemptions are heard again")
                pause_s, problem = self._every_s, ""
                if why:
                    if not self._closed.is_set():
                        self._on_notice(_one_line(why))
                    return
            self._closed.wait(pause_s)


def _one_line(text: str) -> str:
    """Text as it may stand in the journal and on terminals."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:MOST_QUOTED]
