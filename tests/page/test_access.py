"""Who is let in, and what every answer carries."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from evenstep.page.access import KEY_FILE, Keys, is_own_host, write_key
from tests.page.served import Client

EVERYTHING = [
    "/",
    "/static/page.js",
    "/session",
    "/events",
    "/pictures/shares",
    "/decisions/0",
    "/metrics",
    "/nowhere",
]


@pytest.mark.parametrize("path", EVERYTHING)
def test_nothing_is_served_without_the_key(page: Client, path: str) -> None:
    stranger = Client(page.site)
    assert stranger.get(path).status == 401
    assert stranger.get(path, cookie="evenstep-1=x").status == 401
    assert stranger.get(path, authorization="Bearer 0123").status == 401
    assert stranger.get(path, authorization="Bearer \xe9").status == 401


def test_the_key_of_the_url_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(
    page: Client,
) -> None:
    stranger = Client(page.site)
    answer = stranger.get(f"/?key={page.site.keys.full}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert page.site.keys.full not in answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict"):
        assert part in answer.headers["set-cookie"]
    assert Client(page.site, answer.cookie).get("/").status == 200


def test_a_wrong_key_opens_nothing(page: Client) -> None:
    answer = Client(page.site).get("/?key=0123456789abcdef0123456789abcdef")
    assert answer.status == 401
    assert "set-cookie" not in answer.headers


def test_programs_read_with_a_bearer_key(page: Client) -> None:
    program = Client(page.site)
    for key in (page.site.keys.read, page.site.keys.full):
        assert program.get("/session", authorization=f"Bearer {key}").status == 200


@pytest.mark.parametrize("path", [*EVERYTHING[:3], "/nowhere", "/commands"])
def test_every_answer_has_a_strict_policy(page: Client, path: str) -> None:
    for client in (page, Client(page.site)):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


def test_a_name_that_a_stranger_points_here_is_refused(page: Client) -> None:
    assert page.get("/session", host=f"evil.example:{page.site.port}").status == 421
    assert page.get("/session", host=f"localhost:{page.site.port}").status == 200


@pytest.mark.parametrize(
    ("header", "own"),
    [
        ("127.0.0.1:80", True),
        ("[::1]:80", True),
        ("10.1.2.3", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("box:80", True),
        ("box.evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil@127.0.0.1.example", False),
        ("", False),
        ("[", False),
    ],
)
def test_host_headers_name_this_server_or_nobody(header: str, own: bool) -> None:
    assert is_own_host(header, {"box"}) is own


def test_all_secrets_of_a_page_differ_from_each_other_and_from_another_pages() -> None:
    secrets = set()
    for keys in (Keys("0" * 32), Keys("1" * 32)):
        roles = {keys.role_of_key(keys.full), keys.role_of_key(keys.read)}
        secrets |= {keys.full, keys.read, keys.csrf, *(keys.cookie(r) for r in roles if r)}
    assert len(secrets) == 10


def test_the_key_for_programs_is_its_owners_alone_and_replaces_an_older_one(
    tmp_path: Path,
) -> None:
    (tmp_path / KEY_FILE).write_text("old")
    (tmp_path / KEY_FILE).chmod(0o666)
    path = write_key(tmp_path, "new")
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [KEY_FILE]
