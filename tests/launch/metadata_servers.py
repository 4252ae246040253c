"""Metadata servers on loopback that behave as those of AWS, Google Cloud and Azure do."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

VM = "trainer_7"  # the name of this machine


class MetadataServer:
    """Serves until the context ends. `goes` says from when on the machine is taken away.

    `wrong` replaces every answer: garbage, an error, a silence, or one byte at a time.
    """

    def __init__(self, goes: bool = False, wrong: str = "") -> None:
        self.goes, self.wrong = threading.Event(), wrong
        if goes:
            self.goes.set()
        self.asked: list[str] = []
        self.closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers."""
        raise NotImplementedError

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        told = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                told.asked.append(f"{self.command} {self.path}")
                if told.wrong and self._do_wrong(told.wrong):
                    return
                status, text, more = told.answer(self.command, self.path, self.headers)
                self._send(status, text.encode(), more)

            do_PUT = do_GET  # noqa: N815

            def _send(self, status: int, content: bytes, more: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **more}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def _do_wrong(self, wrong: str) -> bool:
                self.close_connection = True
                match wrong:
                    case "garbage":
                        self.wfile.write(b"\x00\xff no HTTP\r\n\r\n")
                    case "garbage in it":
                        self._send(200, b"\x00\xff\x1b[2J{]", {})
                    case "another document":
                        self._send(200, b'{"Events": [{"EventType": 3}], "action": []}', {})
                    case "an error":
                        self._send(503, b"try later", {})
                    case "silence":
                        told.closed.wait()
                    case "one byte at a time" | "one byte of its text at a time":
                        in_text = b"Connection: close\r\n\r\n" if "text" in wrong else b"X: "
                        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + in_text)
                        while not told.closed.wait(0.02):
                            try:
                                self.wfile.write(b"x")
                            except OSError:
                                return True
                    case "without end":
                        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                        try:
                            while not told.closed.is_set():
                                self.wfile.write(b"x" * 4096)
                        except OSError:
                            return True
                return True

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


class AwsServer(MetadataServer):
    """IMDSv2: nothing without a token, which `forget` makes invalid."""

    def __init__(self, goes: bool = False, wrong: str = "") -> None:
        self.num_tokens = 0
        super().__init__(goes, wrong)

    def forget(self) -> None:
        self.num_tokens += 1

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        if (method, path) == ("PUT", "/latest/api/token"):
            if not 1 <= int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600:
                return 400, "", {}
            return 200, f"token-{self.num_tokens}", {}
        if headers["X-aws-ec2-metadata-token"] != f"token-{self.num_tokens}":
            return 401, "", {}
        if path != "/latest/meta-data/spot/instance-action" or not self.goes.is_set():
            return 404, "<?xml version=...>", {}
        return 200, json.dumps({"action": "terminate", "time": "2026-11-18T20:00:00Z"}), {}


class GcpServer(MetadataServer):
    """Holds an answer back until there is news, if asked to."""

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        where = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        if headers["Metadata-Flavor"] != "Google":
            return 403, "missing header", {}
        if where.path != "/computeMetadata/v1/instance/preempted":
            return 404, "", {}
        if query.get("wait_for_change") == "true" and query["last_etag"] == self._etag:
            if self.goes.is_set():  # no more news
                self.closed.wait(float(query["timeout_sec"]))
            else:
                self.goes.wait(float(query["timeout_sec"]))
        return 200, "TRUE" if self.goes.is_set() else "FALSE", {"ETag": self._etag}

    @property
    def _etag(self) -> str:
        return "b2" if self.goes.is_set() else "a1"


class AzureServer(MetadataServer):
    """Tells of the events of other machines, too."""

    def __init__(self, goes: bool = False, wrong: str = "", about: str = VM) -> None:
        self.about, self.kind = about, "Preempt"
        super().__init__(goes, wrong)

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        where = urlsplit(path)
        query = parse_qs(where.query)
        if headers["Metadata"] != "true" or "api-version" not in query:
            return 400, "Bad request", {}
        if where.path == "/metadata/instance/compute/name":
            return 200, VM, {}
        if where.path != "/metadata/scheduledevents":
            return 404, "", {}
        event = {
            "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
            "EventType": self.kind,
            "ResourceType": "VirtualMachine",
            "Resources": [self.about],
            "EventStatus": "Scheduled",
            "NotBefore": "Wed, 18 Nov 2026 20:00:00 GMT",
        }
        told = {"DocumentIncarnation": 1, "Events": [event] if self.goes.is_set() else []}
        return 200, json.dumps(told), {}
