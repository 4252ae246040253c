"""Spot VMs of Azure: 30 seconds or more before an eviction there is a scheduled event."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from evenstep.launch.notices.metadata import ANSWER_S, ask_metadata, unexpected

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_NAME = re.compile(r"[\w.-]{1,80}")  # of a VM, or of an instance of a scale set
FIRST_S = 130.0  # the first answer may take two minutes: it switches the service on


@dataclass
class AzureNotice:
    """Other VMs of a set or a scale set are told of, too: only events of this one count."""

    endpoint: str = "http://169.254.169.254"
    first_s: float = FIRST_S
    _name: str = field(default="", init=False, repr=False)
    _is_on: bool = field(default=False, init=False, repr=False)

    def poll(self) -> str:
        headers = {"Metadata": "true"}
        if not self._name:
            named = ask_metadata(self.endpoint, NAME, headers)
            if named.status != 200 or not _NAME.fullmatch(named.text):
                raise unexpected(self.endpoint, NAME, named)
            self._name = named.text
        answer_s = ANSWER_S if self._is_on else self.first_s
        answer = ask_metadata(self.endpoint, EVENTS, headers, answer_s=answer_s)
        if answer.status != 200:
            raise unexpected(self.endpoint, EVENTS, answer)
        self._is_on = True
        try:
            events = [event for event in json.loads(answer.text)["Events"] if self._is_ours(event)]
        except (ValueError, TypeError, KeyError):
            raise unexpected(self.endpoint, EVENTS, answer) from None
        if not events:
            return ""
        at = str(events[0].get("NotBefore") or "now")
        return f"Azure evicts this spot VM, {self._name}: {at}"

    def _is_ours(self, event: dict[str, Any]) -> bool:
        return event["EventType"] == "Preempt" and self._name in event["Resources"]
