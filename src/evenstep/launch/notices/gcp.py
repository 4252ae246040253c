"""Spot VMs of Google Cloud: 30 seconds before one is stopped, the metadata says so."""

from __future__ import annotations

from dataclasses import dataclass, field

from evenstep.launch.notices.metadata import ANSWER_S, ask_metadata, unexpected

PREEMPTED = "/computeMetadata/v1/instance/preempted"
CHANGE_S = 20  # how long the server may hold an answer back until there is news


@dataclass
class GcpNotice:
    """Waits for a change, as 30 seconds are short."""

    endpoint: str = "http://metadata.google.internal"
    change_s: int = CHANGE_S
    _etag: str = field(default="", init=False, repr=False)

    def poll(self) -> str:
        path, answer_s = PREEMPTED, ANSWER_S
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={self.change_s}&last_etag={self._etag}"
            answer_s += self.change_s
        self._etag = ""
        answer = ask_metadata(self.endpoint, path, {"Metadata-Flavor": "Google"}, answer_s=answer_s)
        told = answer.text.strip().upper()
        if answer.status != 200 or told not in ("TRUE", "FALSE"):
            raise unexpected(self.endpoint, PREEMPTED, answer)
        if answer.etag.isalnum():  # else it is not put into a path
            self._etag = answer.etag
        return "Google Cloud preempts this VM in 30 s" if told == "TRUE" else ""
