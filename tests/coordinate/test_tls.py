"""TLS on the control connections: whom clients accept, and what is seen on the way."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.coordinate import server
from evenstep.coordinate.client import NoAnswerError, UnreachableError, ask, connect
from evenstep.coordinate.run_folder import TLS, RunFolder
from evenstep.coordinate.tls import (
    TlsSocket,
    make_certificate,
    pem_fingerprint,
    server_context,
    shortened,
)
from evenstep.messages import Alive, Ask
from tests.coordinate.fake import WAIT_S, eventually
from tests.coordinate.hosted import Hosted, hosted
from tests.coordinate.proxy import RecordingProxy

STATUS = Ask(proof="", what="status")
OTHER = "sha256:" + "0f" * 32


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Hosted]:
    with hosted(tmp_path / "run", tls=True) as there:
        yield there


def test_on_the_way_nobody_sees_the_token_or_a_message(run: Hosted) -> None:
    words = [b"nonce", b"proof", b"status"]
    with hosted(run.service.folder.path.with_name("plain")) as plain:
        for there, expected in ((plain, words), (run, [])):
            with RecordingProxy(there.port) as proxy:
                told = ask("127.0.0.1", proxy.port, there.token, STATUS, there.fingerprint)
                assert told["state"] == "starting"
            seen = proxy.sent + proxy.answered
            assert [word for word in words if word in seen] == expected
            assert there.token.encode() not in seen


def test_another_certificate_is_refused_before_anything_is_sent(run: Hosted) -> None:
    with pytest.raises(NoAnswerError) as refused:
        ask(run.name, run.port, run.token, STATUS, OTHER)
    for words in (shortened(run.fingerprint), shortened(OTHER), "copy the run's file `token`"):
        assert words in str(refused.value)
    assert run.fingerprint not in str(refused.value)
    eventually(lambda: run.ask("status")["refused"] == {"hung up before a word": 1})


def test_a_client_with_a_fingerprint_sends_nothing_in_plain_text(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run, RecordingProxy(run.port) as proxy:
        with pytest.raises(NoAnswerError, match=r"does not speak TLS .* file `token` again"):
            ask("127.0.0.1", proxy.port, run.token, STATUS, OTHER)
        assert b"proof" not in proxy.sent
        assert b"status" not in proxy.sent


def test_a_client_without_the_fingerprint_is_told_why_it_gets_no_answer(
    run: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PROOF_S", 0.2)
    with pytest.raises(NoAnswerError, match=r"does the run use TLS\? Then copy its file `token`"):
        ask(run.name, run.port, run.token, STATUS)
    monkeypatch.undo()
    assert run.ask("status")["refused"] == {"no proof in time": 1}


def test_strangers_that_do_not_begin_tls_keep_nobody_out(
    run: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 5)
    monkeypatch.setattr(server, "PROOF_S", WAIT_S)
    strangers = [socket.create_connection((run.name, run.port), WAIT_S) for _ in range(20)]
    eventually(lambda: run.ask("status")["refused"]["too many at once"] >= 15)
    for stranger in strangers:
        stranger.close()


def test_a_coordinator_that_resets_a_handshake_has_hung_up() -> None:
    """So a worker's first connection to a busy one is tried again."""
    listener = socket.create_server(("127.0.0.1", 0))

    def reset() -> None:
        there, _ = listener.accept()
        there.recv(1)  # the rest of the hello is unread: the kernel resets the connection
        there.close()

    thread = threading.Thread(target=reset, daemon=True)
    thread.start()
    with pytest.raises(UnreachableError):
        connect("127.0.0.1", listener.getsockname()[1], WAIT_S, OTHER)
    thread.join(WAIT_S)
    listener.close()


def test_what_is_not_tls_is_counted(run: Hosted) -> None:
    with socket.create_connection((run.name, run.port), WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 1000)
        while stranger.recv(2**16):
            pass
    assert run.ask("status")["refused"] == {"bad TLS handshake": 1}


def test_a_resumed_run_has_the_certificate_that_its_workers_know(tmp_path: Path) -> None:
    with hosted(tmp_path / "run", tls=True) as run:
        kept, port, worker = (tmp_path / "run" / TLS).read_bytes(), run.port, run.worker()
    with hosted(tmp_path / "run", port=port) as again:
        assert (tmp_path / "run" / TLS).read_bytes() == kept
        assert again.fingerprint == run.fingerprint == pem_fingerprint(tmp_path, kept)
        worker.dial_again()
        worker.beat()


def test_certificate_and_key_of_a_run_are_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run" / TLS).touch(mode=0o644)
    pem = make_certificate()
    RunFolder.make(tmp_path / "run", pem_fingerprint(tmp_path, pem), pem).close()
    assert stat.S_IMODE((tmp_path / "run" / TLS).stat().st_mode) == 0o600


def test_the_first_certificate_of_a_file_counts(tmp_path: Path) -> None:
    first, second = make_certificate(), make_certificate()
    assert pem_fingerprint(tmp_path, first) != pem_fingerprint(tmp_path, second)
    assert pem_fingerprint(tmp_path, first + second) == pem_fingerprint(tmp_path, first)
    (tmp_path / "both.pem").write_bytes(first + second)
    context = server_context(tmp_path / "both.pem")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as there:
            there.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    with connect("127.0.0.1", port, WAIT_S, pem_fingerprint(tmp_path, first)):
        pass
    thread.join(WAIT_S)
    listener.close()


def test_one_thread_reads_while_another_one_writes(run: Hosted) -> None:
    """As a worker does; answers are longer than one TLS record."""
    with run.worker() as worker:
        assert isinstance(worker._socket, TlsSocket)
        for step in range(500):
            worker.say(Alive(generation=0, step=step, waiting=False))
        worker.beat()
        worker.say_bytes(b'{"type":"Leaving","why":"%s"}\n' % (b"x" * 2**18))  # refused: too long
        worker.beat()
        assert run.ask("status")["refused"] == {"bad message": 1}
