"""In front of everything that the page serves: who is let in, and the headers of every answer."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evenstep.page.access import HEADERS, Keys, Role, cookie_name, is_own_host, role_of

LOCKED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>evenstep</title>
<h1>This page needs its key</h1>
<p>Open the URL that <code>evenstep page</code> printed, with <code>?key=</code> at its end. If you
came here by that URL, <a href="/">go on</a>.</p></html>"""


class Guard:
    """Lets requests in that have a key or a session's cookie; `scope["role"]` is what they may."""

    def __init__(self, app: ASGIApp, *, keys: Keys, port: int, names: Collection[str]) -> None:
        self._app, self._keys, self._port, self._names = app, keys, port, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there is nothing else here
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """What a request gets instead of the page; None if it is let in."""
        headers = Headers(scope=scope)
        if not is_own_host(headers.get("host", ""), self._names):
            text = "this server does not go by that name; start the page with --host NAME\n"
            return PlainTextResponse(text, status_code=421)
        if scope["path"] == "/" and scope["method"] == "GET":
            keys = parse_qs(scope["query_string"].decode("ascii", "replace")).get("key")
            if keys:
                return self._session(self._keys.role_of_key(keys[0]))
        role = role_of(headers, self._keys, self._port)
        if role is None:
            return _locked(headers)
        scope["role"] = role
        return None

    def _session(self, role: Role | None) -> Response:
        """Exchange a key for a cookie, and get it out of the address bar and the history."""
        if role is None:
            return HTMLResponse(LOCKED, status_code=401)
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(
            cookie_name(self._port), self._keys.cookie(role), httponly=True, samesite="strict"
        )
        return response


def _locked(headers: Headers) -> Response:
    if "text/html" in headers.get("accept", ""):
        return HTMLResponse(LOCKED, status_code=401)
    text = "this page needs its key: a cookie, or Authorization: Bearer KEY\n"
    return PlainTextResponse(text, status_code=401, headers={"www-authenticate": "Bearer"})
