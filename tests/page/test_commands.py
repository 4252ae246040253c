"""Commands: who may give them, and that a real coordinator gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coordinate.hosted import Hosted, hosted
from tests.page.served import Client, served

DRAIN = {"what": "drain", "worker": "w1"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Hosted]:
    with hosted(tmp_path / "run") as there:
        yield there


@pytest.fixture
def page(run: Hosted) -> Iterator[Client]:
    """The page of a run that trains, with commands."""
    for name in ("w0", "w1"):
        run.worker(name).enter()
    with served(run.service.folder.journal, ask=run.ask, commands=True) as client:
        yield client


def target(run: Hosted) -> int:
    cluster = run.inside(lambda: run.service.state.cluster)
    assert cluster is not None
    return cluster.target


def test_the_page_scales_the_run(page: Client, run: Hosted) -> None:
    answer = page.command(what="scale", num_workers=3)
    assert (answer.status, answer.json["told"]) == (200, "asked for 3 workers")
    assert target(run) == 3


def test_what_the_coordinator_refuses_is_said_in_its_words(page: Client) -> None:
    answer = page.command(what="drain", worker="nobody")
    assert answer.status == 409
    assert "no worker nobody" in answer.json["problem"]


def test_the_page_stops_the_run(page: Client, run: Hosted) -> None:
    assert page.command(what="stop").status == 200
    assert run.ask("status")["state"] in ("stopping", "ended")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x_evenstep_token": ""}, "no valid token"),
        ({"x_evenstep_token": "0" * 32}, "no valid token"),
        ({"origin": ""}, "another site"),
        ({"origin": "null"}, "another site"),
        ({"origin": "http://evil.example"}, "another site"),
        ({"origin": "http://127.0.0.1:1"}, "another site"),
        ({"sec_fetch_site": "cross-site"}, "another site"),
        ({"sec_fetch_site": "same-site"}, "another site"),
    ],
)
def test_a_command_of_another_site_is_refused(
    page: Client, run: Hosted, change: dict[str, str], why: str
) -> None:
    body = json.dumps({"what": "scale", "num_workers": 7}).encode()
    answer = page.request("POST", "/commands", body, **{**page.proofs, **change})
    assert answer.status == 403
    assert why in answer.json["problem"]
    assert target(run) != 7


def test_a_command_without_cookie_is_refused_even_with_a_key(page: Client) -> None:
    keys = page.site.keys
    for key in (keys.read, keys.full):
        program = {**page.proofs, "cookie": "", "authorization": f"Bearer {key}"}
        assert (
            page.request("POST", "/commands", json.dumps(DRAIN).encode(), **program).status == 403
        )
    stranger = Client(page.site)
    assert stranger.command(**DRAIN).status == 401


def test_who_opened_the_page_with_the_reading_key_may_not_command(page: Client) -> None:
    keys = page.site.keys
    reader = Client(page.site, Client(page.site).get(f"/?key={keys.read}").cookie)
    session = reader.get("/session").json
    assert session["commands"] is False
    assert "token" not in session
    assert "only reads" in reader.command(**DRAIN).json["problem"]


def test_without_the_option_there_are_no_commands(run: Hosted) -> None:
    with served(run.service.folder.journal, ask=run.ask) as client:
        assert client.get("/session").json["commands"] is False
        answer = client.command(what="stop")
        assert answer.status == 403
        assert "--commands" in answer.json["problem"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff", 400),
        (b'{"what":"format"}', 400),
        (b'{"what":"scale"}', 400),
        (b'{"what":"scale","num_workers":0}', 400),
        (b'{"what":"scale","num_workers":2,"more":1}', 400),
        (b'{"what":"drain","worker":"../x"}', 400),
        (b'{"what":"drain","worker":"w1\\n"}', 400),
        (b'{"what":"stop"' + b" " * 2000 + b"}", 400),
    ],
)
def test_what_is_no_command_is_refused(page: Client, body: bytes, status: int) -> None:
    answer = page.request("POST", "/commands", body, **page.proofs)
    assert answer.status == status, answer.text
    assert answer.json["problem"]


def test_a_form_of_another_site_cannot_command(page: Client) -> None:
    as_form: dict[str, Any] = {**page.proofs, "content_type": "text/plain"}
    assert page.request("POST", "/commands", json.dumps(DRAIN).encode(), **as_form).status == 415
    assert page.get("/commands").status == 405
