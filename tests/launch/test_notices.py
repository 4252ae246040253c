"""Preemption notices: what clouds say, what their servers may do wrong, and who asks them."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from evenstep.errors import ConfigError
from evenstep.launch.notices.aws import AwsNotice
from evenstep.launch.notices.azure import AzureNotice
from evenstep.launch.notices.gcp import GcpNotice
from evenstep.launch.notices.metadata import MOST_BYTES, ask_metadata
from evenstep.launch.notices.watch import NOTICES, NoticeWatch, make_notice
from evenstep.ports import PreemptionNotice
from evenstep.testing import PreemptionNoticeContract
from tests.launch.metadata_servers import AwsServer, AzureServer, GcpServer, MetadataServer

BOUND_S = 600.0
CLOUDS: list[tuple[type[Any], type[MetadataServer]]] = [
    (AwsNotice, AwsServer),
    (GcpNotice, GcpServer),
    (AzureNotice, AzureServer),
]


class CloudContract(PreemptionNoticeContract):
    """The contract, against a cloud's server on loopback."""

    server: type[MetadataServer]

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        with self.server() as self.quiet, self.server(goes=True) as self.last:
            yield

    def notice(self, endpoint: str) -> PreemptionNotice:
        raise NotImplementedError

    def staying(self) -> PreemptionNotice:
        return self.notice(self.quiet.endpoint)

    def going(self) -> PreemptionNotice:
        return self.notice(self.last.endpoint)


class TestAws(CloudContract):
    server = AwsServer

    def notice(self, endpoint: str) -> PreemptionNotice:
        return AwsNotice(endpoint)


class TestGcp(CloudContract):
    server = GcpServer

    def notice(self, endpoint: str) -> PreemptionNotice:
        return GcpNotice(endpoint, change_s=0)


class TestAzure(CloudContract):
    server = AzureServer

    def notice(self, endpoint: str) -> PreemptionNotice:
        return AzureNotice(endpoint)


def test_each_cloud_says_what_happens_and_when() -> None:
    said = []
    for notice, server in CLOUDS:
        with server(goes=True) as cloud:
            said.append(notice(cloud.endpoint).poll())
    assert said == [
        "AWS will terminate this spot instance at 2026-11-18T20:00:00Z",
        "Google Cloud preempts this VM in 30 s",
        "Azure evicts this spot VM, trainer_7: Wed, 18 Nov 2026 20:00:00 GMT",
    ]


def test_aws_is_asked_with_a_token_that_is_renewed_when_it_is_over() -> None:
    with AwsServer() as cloud:
        notice = AwsNotice(cloud.endpoint)
        assert [notice.poll(), notice.poll()] == ["", ""]
        put, get = "PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"
        assert cloud.asked == [put, get, get]
        cloud.forget()
        cloud.goes.set()
        assert "terminate" in notice.poll()
        assert cloud.asked[3:] == [get, put, get]


def test_google_cloud_answers_as_soon_as_there_is_news() -> None:
    with GcpServer() as cloud:
        notice = GcpNotice(cloud.endpoint, change_s=600)
        assert notice.poll() == ""
        told: queue.SimpleQueue[str] = queue.SimpleQueue()
        watch = NoticeWatch(notice, told.put)
        while len(cloud.asked) < 2:
            cloud.closed.wait(0.01)
        assert "wait_for_change=true&timeout_sec=600&last_etag=a1" in cloud.asked[1]
        cloud.goes.set()
        assert told.get(timeout=BOUND_S) == "Google Cloud preempts this VM in 30 s"
        watch.close()


def test_on_azure_neither_events_of_other_machines_nor_of_other_kinds_count() -> None:
    with AzureServer(goes=True, about="trainer_8") as cloud:
        notice = AzureNotice(cloud.endpoint)
        assert notice.poll() == ""
        cloud.about, cloud.kind = "trainer_7", "Reboot"
        assert notice.poll() == ""
        cloud.kind = "Preempt"
        assert notice.poll()


WRONG = ("garbage", "garbage in it", "another document", "an error", "without end")


@pytest.mark.parametrize(("notice", "server"), CLOUDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_an_error_and_no_notice(
    notice: type[Any], server: type[MetadataServer], wrong: str
) -> None:
    with server(goes=True, wrong=wrong) as cloud, pytest.raises(OSError, match=r"^http://127\."):
        notice(cloud.endpoint).poll()


SLOW = ("silence", "one byte at a time", "one byte of its text at a time")


@pytest.mark.parametrize("wrong", SLOW)
def test_no_server_holds_a_question_up_for_longer_than_its_deadline(wrong: str) -> None:
    with MetadataServer(wrong=wrong) as cloud, pytest.raises(TimeoutError):
        ask_metadata(cloud.endpoint, "/", {}, answer_s=0.3)


def test_an_answer_without_end_is_cut_off() -> None:
    with MetadataServer(wrong="without end") as cloud:
        assert len(ask_metadata(cloud.endpoint, "/", {}).text) == MOST_BYTES


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with AwsServer() as cloud, AwsServer(goes=True) as proxy:
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        assert AwsNotice(cloud.endpoint).poll() == ""
        assert proxy.asked == []


@dataclass
class Scripted:
    """Says or raises one thing after the other."""

    said: list[str | Exception]
    num_polls: int = field(default=0, init=False)

    def poll(self) -> str:
        self.num_polls += 1
        told = self.said.pop(0) if self.said else ""
        if isinstance(told, Exception):
            raise told
        return told


def heard(*said: str | Exception) -> str:
    """What a watch reports of what a notice says."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = NoticeWatch(Scripted(list(said)), told.put, every_s=0.001)
    reason = told.get(timeout=BOUND_S)
    watch.close()
    return reason


def test_a_watch_reports_the_reason_of_the_first_notice() -> None:
    assert heard("", "", "the machine goes", "again") == "the machine goes"


def test_whatever_a_plug_raises_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="evenstep"):
        assert heard(OSError("no answer"), OSError("no answer"), ZeroDivisionError(), "", "go")
    said = [m.partition(":")[2].strip() for m in caplog.messages if "would be heard" in m]
    assert said == ["no answer", "ZeroDivisionError()"]  # once each
    assert "notices of preemptions are heard again" in caplog.messages


def test_a_reason_is_made_fit_for_terminals_and_the_journal() -> None:
    assert heard("gone\n\x1b[2J" + "x" * 1000) == "gone  [2J" + "x" * 191


def test_a_notice_is_found_by_name_and_told_where_to_ask() -> None:
    assert make_notice("gcp") == GcpNotice()
    assert make_notice("aws:endpoint=http://127.0.0.1:1") == AwsNotice("http://127.0.0.1:1")
    assert list(NOTICES) == ["aws", "gcp", "azure"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("awz", "unknown name 'awz'; did you mean aws?"),
        ("aws:http", "expected NAME:KEY=VALUE, got 'aws:http'"),
        ("aws:port=3", "aws cannot be made with 'port=3'"),
    ],
)
def test_a_wrong_name_or_option_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make_notice(text)


@pytest.mark.parametrize("endpoint", ["https://127.0.0.1", "127.0.0.1", "http://"])
def test_what_is_no_address_of_a_metadata_server_is_an_error(endpoint: str) -> None:
    with pytest.raises(OSError, match="is not the address of a metadata server"):
        AwsNotice(endpoint).poll()
