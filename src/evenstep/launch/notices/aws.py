"""Spot instances of AWS: two minutes before an interruption, the metadata says so."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from evenstep.launch.notices.metadata import MetadataAnswer, ask_metadata, unexpected

TOKEN, ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
TOKEN_S = 21600  # how long a token is good for, the most there is


@dataclass
class AwsNotice:
    """Asks IMDSv2. In a container its answers arrive only if the hop limit is 2 or more."""

    endpoint: str = "http://169.254.169.254"
    _token: str = field(default="", init=False, repr=False)

    def poll(self) -> str:
        answer = self._ask()
        if answer.status == 401:  # the token is over
            self._token = ""
            answer = self._ask()
        if answer.status == 404:  # no interruption is planned
            return ""
        if answer.status != 200:
            raise unexpected(self.endpoint, ACTION, answer)
        try:
            told = json.loads(answer.text)
            action, at = str(told["action"]), str(told["time"])
        except (ValueError, TypeError, KeyError):
            raise unexpected(self.endpoint, ACTION, answer) from None
        return f"AWS will {action} this spot instance at {at}"

    def _ask(self) -> MetadataAnswer:
        if not self._token:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            given = ask_metadata(self.endpoint, TOKEN, header, method="PUT")
            if given.status != 200 or not given.text.isascii() or not given.text.isprintable():
                raise unexpected(self.endpoint, TOKEN, given)
            self._token = given.text
        return ask_metadata(self.endpoint, ACTION, {"X-aws-ec2-metadata-token": self._token})
