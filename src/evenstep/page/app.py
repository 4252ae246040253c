"""What the page serves: itself, the run's news, pictures, decisions, metrics and commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.observe.pictures import stylesheet
from evenstep.observe.sinks.prometheus import CONTENT_TYPE
from evenstep.page.access import Keys, problem_of_command
from evenstep.page.commands import MAX_BYTES, forward, read_command
from evenstep.page.feed import GROWN_S, STATUS_S, Feed, TooManyViewersError
from evenstep.page.watched import TimeSpan, Watched

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

Serve = Callable[[Request], Any]


class Page:
    """The routes of one run's page."""

    def __init__(self, run: Watched, keys: Keys, *, commands: bool) -> None:
        self._run, self._keys, self._commands = run, keys, commands and run.ask is not None
        self._static = _static_files()
        self._drawing = asyncio.Lock()  # one picture at a time: threads are for the status too
        self.feed = Feed({"status": (run.status, STATUS_S), "grown": (run.follow, GROWN_S)})
        get: list[tuple[str, Serve]] = [
            ("/", self._page),
            ("/static/{name}", self._file),
            ("/session", self._session),
            ("/events", self._events),
            ("/pictures/{name}", self._picture),
            ("/decisions/{number:int}", self._decision),
            ("/metrics", self._metrics),
        ]
        routes = [Route(path, serve) for path, serve in get]
        routes.append(Route("/commands", self._command, methods=["POST"]))
        self.app = Starlette(routes=routes)

    async def _page(self, request: Request) -> Response:
        return self._static["page.html"]

    async def _file(self, request: Request) -> Response:
        found = self._static.get(request.path_params["name"])
        return found or PlainTextResponse("there is no such file\n", status_code=404)

    async def _session(self, request: Request) -> Response:
        """What this browser may do; a command needs the token."""
        allowed = self._commands and request.scope["role"].value == "full"
        facts = {"run": self._run.name, "commands": allowed, "pictures": self._run.pictures}
        return _json({**facts, "token": self._keys.csrf} if allowed else facts)

    async def _events(self, request: Request) -> Response:
        return EventStream(self.feed)

    async def _picture(self, request: Request) -> Response:
        name, window = request.path_params["name"], _window(request)
        if name not in self._run.pictures:
            known = ", ".join(self._run.pictures)
            return PlainTextResponse(f"no picture {name}; known: {known}\n", status_code=404)
        width = int(min(max(_number(request, "width", 800.0), 200.0), 4000.0))
        async with self._drawing:
            return _json(await asyncio.to_thread(self._run.picture, name, window, width))

    async def _decision(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._run.decision, request.path_params["number"])
        if found is None:
            return PlainTextResponse("there is no such decision\n", status_code=404)
        return _json(found)

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._run.metrics)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    async def _command(self, request: Request) -> Response:
        if not self._commands or self._run.ask is None:
            why = "commands are off: start the page with `evenstep page RUN --commands`"
            return _json({"problem": why}, 403)
        if why := problem_of_command(request.headers, request.scope["role"], self._keys):
            return _json({"problem": why}, 403)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _json({"problem": "a command is JSON"}, 415)
        try:
            command = read_command(await _body(request))
            told = await asyncio.to_thread(forward, command, self._run.ask)
        except InvalidInputError as e:
            return _json({"problem": str(e)}, 400)
        except (EvenstepError, OSError) as e:  # the coordinator refuses, or does not answer
            return _json({"problem": str(e)}, 409)
        return _json({"told": told})


class EventStream(Response):
    """News to one browser, until it hangs up or the server stops."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._feed.enter()
        except TooManyViewersError:
            text = f"{self._feed.num_viewers} browsers watch this run already\n"
            await PlainTextResponse(text, status_code=503)(scope, receive, send)
            return
        sending = asyncio.create_task(self._send_events(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feed.leave()
            for task in (sending, gone):
                task.cancel()
            await asyncio.wait([sending, gone])

    async def _send_events(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self._feed.events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BYTES:
                raise InvalidInputError("command", f"has more than {MAX_BYTES} bytes")
    except ClientDisconnect:
        raise InvalidInputError("command", "broke off") from None
    return body


def _window(request: Request) -> TimeSpan:
    return TimeSpan(_number(request, "begin", float("-inf")), _number(request, "end", float("inf")))


def _number(request: Request, name: str, default: float) -> float:
    try:
        value = float(request.query_params.get(name, default))
    except ValueError:
        return default
    return value if value == value else default  # NaN


def _json(content: Any, status: int = 200) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status_code=status, media_type="application/json")


def _static_files() -> dict[str, Response]:
    found = {}
    for file in (files("evenstep.page") / "static").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = Response(file.read_bytes(), media_type=kind)
    found["pictures.css"] = Response(stylesheet(), media_type=KINDS["css"])
    return found
