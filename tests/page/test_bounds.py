"""Clients that are slow, many or wrong cost the page nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from evenstep.errors import ConfigError
from evenstep.page import server
from evenstep.page.server import listen
from tests.page.served import WAIT_S, Client, served


def connect(client: Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", client.site.port), WAIT_S)


def is_hung_up(there: socket.socket) -> bool:
    """Waits for the end of a connection; whatever was sent before is read."""
    try:
        while there.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.fixture
def impatient(journal: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(server, "REQUEST_S", 0.05)
    monkeypatch.setattr(server, "STALLED_S", 0.05)
    with served(journal) as client:
        yield client


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTT",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ",
        b"POST /commands HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_come_to_its_end_is_hung_up_on(
    impatient: Client, said: bytes
) -> None:
    with connect(impatient) as there:
        there.sendall(said)
        assert is_hung_up(there)


def test_a_second_request_on_a_connection_has_a_deadline_too(impatient: Client) -> None:
    with connect(impatient) as there:
        request = f"GET /session HTTP/1.1\r\nhost: 127.0.0.1\r\ncookie: {impatient.cookie}\r\n\r\n"
        there.sendall(request.encode())
        assert there.recv(1)
        there.sendall(b"GET /sess")
        assert is_hung_up(there)


def test_a_browser_that_reads_nothing_is_hung_up_on(impatient: Client) -> None:
    head = f"host: 127.0.0.1\r\ncookie: {impatient.cookie}\r\n\r\n"
    with connect(impatient) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with suppress(ConnectionResetError, BrokenPipeError):
            while True:  # until no buffer has room, and the server gives up
                there.sendall(f"GET /static/page.css HTTP/1.1\r\n{head}".encode())
        assert is_hung_up(there)


def test_news_outlast_the_deadline_of_a_request(impatient: Client) -> None:
    with impatient.events() as events:
        assert {name for name, _ in (next(events), next(events))} <= {"status", "grown"}


@pytest.mark.parametrize(
    "said",
    [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 100_000, b"\0" * 99],
)
def test_what_is_no_request_is_refused(page: Client, said: bytes) -> None:
    with connect(page) as there:
        there.sendall(said)
        assert is_hung_up(there)
    assert page.get("/session").status == 200


def test_connections_beyond_the_most_are_closed_at_once_and_the_page_lives_on(
    page: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 5)
    with page.events() as events, ExitStack() as strangers:
        next(events)
        many = [strangers.enter_context(closing(connect(page))) for _ in range(20)]
        for one in many[4:]:
            assert is_hung_up(one)
        assert next(events)
    assert page.get("/session").status == 200


@pytest.mark.parametrize(
    "query",
    ["width=x", "width=1e9", "width=-5", "width=nan", "width=inf", "begin=nan&end=x",
     "begin=9&end=1", "begin=-inf&end=inf", "begin=1e300&end=1e301", "width=99999999999999999999"],
)  # fmt: skip
def test_any_window_gets_a_picture_of_bounded_size(page: Client, query: str) -> None:
    with page.events() as events:
        next(c for name, c in events if name == "grown" and c["num_steps"])
    answer = page.get(f"/pictures/shares?{query}")
    assert answer.status == 200, answer.text
    assert len(answer.body) < 2_000_000


def test_what_is_not_there_is_not_found(page: Client) -> None:
    assert "known: " in page.get("/pictures/nothing").text
    for path in ("/pictures/nothing", "/static/..%2fapp.py", "/static/nothing", "/decisions/99999"):
        assert page.get(path).status == 404, path
    assert page.get("/decisions/x").status == 404
    assert page.request("DELETE", "/session").status == 405


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with listen("127.0.0.1", 0) as there:
        port = there.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}.*0 picks a free"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen at no-such-host"):
        listen("no-such-host.example", 0)
