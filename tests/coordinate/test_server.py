"""The coordinator's ear over real sockets: who is refused, at no cost to anybody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest

from evenstep.coordinate import server
from evenstep.coordinate.client import NoAnswerError, ask
from evenstep.coordinate.events import Heard
from evenstep.errors import InvalidInputError
from evenstep.messages import (
    COORDINATOR,
    PROTOCOL,
    Alive,
    Answer,
    Ask,
    Generation,
    Greeting,
    Hello,
    Lease,
    Refused,
    Stepped,
    Welcome,
    proof,
    proves,
    to_client,
)
from tests.coordinate.fake import WAIT_S, FakeWorker, Line, eventually
from tests.coordinate.hosted import (
    Hosted,
    hosted,
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Hosted]:
    with hosted(tmp_path / "run") as there:
        yield there


def still_answers(worker: FakeWorker) -> bool:
    worker.beat()
    return True


def dial(run: Hosted) -> Line:
    return Line(run.name, run.port)


def refusal(line: Line) -> str:
    return line.hear(Refused).why


def test_a_worker_is_greeted_welcomed_and_answered(run: Hosted) -> None:
    with run.worker() as worker:
        assert worker.id == "w0"
        assert worker.welcome.lease_s == 3600
        assert worker.enter().roster == ("w0",)
        assert still_answers(worker)


def test_a_wrong_token_is_refused(run: Hosted) -> None:
    with run.worker() as worker, dial(run) as line:
        line.say(Hello(proof=proof("0" * 64, line.greeting.nonce), nonce="n"))
        refused = line.hear(Refused)
        assert "token" in refused.why
        assert refused.proof == ""  # or a stranger could have it made for somebody else's nonce
        with pytest.raises(EOFError):
            line.poll()
        assert run.service.server.refused == {"wrong token": 1}
        assert still_answers(worker)


def test_a_proof_is_good_for_one_connection_only(run: Hosted) -> None:
    with dial(run) as first, dial(run) as second:
        overheard = proof(run.token, first.greeting.nonce)
        second.say(Hello(proof=overheard))
        assert "token" in refusal(second)


def test_the_coordinator_proves_that_it_knows_the_token(run: Hosted) -> None:
    with dial(run) as line:
        line.say(Hello(proof=proof(run.token, line.greeting.nonce), nonce="n"))
        assert line.hear(Welcome).proof == proof(run.token, "n", COORDINATOR)
    with dial(run) as line:
        proved = proof(run.token, line.greeting.nonce)
        line.say(Hello(proof=proved, nonce="n", worker="w9", generation=9))
        assert line.hear(Refused).proof == proof(run.token, "n", COORDINATOR)


def test_what_a_client_can_be_made_to_prove_is_no_coordinators_proof() -> None:
    for greeted in ("n", "coordinator n", "coordinatorn"):
        assert not proves(proof("token", greeted), "token", "n", COORDINATOR)


def test_another_protocol_is_refused_with_both_numbers(run: Hosted) -> None:
    with dial(run) as line:
        line.say(Hello(protocol=7, proof=proof(run.token, line.greeting.nonce)))
        assert refusal(line) == f"this run speaks protocol {PROTOCOL}, you speak 7"
        assert run.service.server.refused == {"wrong protocol": 1}


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
        b"[" * 60_000 + b"\n",
        b'{"type":"Ready"}\n',
        b'{"type":"Hello","proof":"x","extra":1}\n',
        b"\n",
    ],
    ids=["http", "tls", "nested", "ready first", "unknown field", "empty"],
)
def test_garbage_is_refused_and_counted(run: Hosted, said: bytes) -> None:
    with run.worker() as worker, dial(run) as line:
        line.say_bytes(said)
        refusal(line)
        with pytest.raises(EOFError):
            line.poll()
        assert run.service.server.refused == {"bad first line": 1}
        assert still_answers(worker)


def test_a_stranger_cannot_fill_the_memory(run: Hosted) -> None:
    with run.worker() as worker, dial(run) as line:
        with pytest.raises((ConnectionError, TimeoutError)):
            line.say_bytes(b"x" * (64 * 2**20))
        eventually(lambda: run.service.server.refused["line too long"] == 1)
        assert still_answers(worker)


def test_a_stranger_who_says_nothing_is_let_go(
    run: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PROOF_S", 0.1)
    with dial(run) as line:
        assert "in time" in refusal(line)
        assert run.service.server.refused == {"no proof in time": 1}


def test_hundreds_of_half_open_connections_keep_nobody_out(run: Hosted) -> None:
    with run.worker() as worker:
        idle = [socket.create_connection((run.name, run.port), WAIT_S) for _ in range(500)]
        try:
            eventually(lambda: run.service.server.refused["too many at once"] >= 300)
            assert still_answers(worker)
            with run.worker() as other:
                assert other.id == "w1"
                assert still_answers(other)
            assert run.ask("status")["refused"]["too many at once"] >= 300
        finally:
            for connection in idle:
                connection.close()


def test_a_worker_that_says_nonsense_is_not_dropped_for_one_line(run: Hosted) -> None:
    with run.worker() as worker:
        worker.enter()
        worker.say_bytes(b'{"type":"Began","generation":"one","step":0}\n')
        worker.say_bytes(
            b'{"type":"Stepped","generation":1,"step":0,"seconds":-1.0,"reports":[["w0",64,0.1]]}\n'
        )
        worker.say(Hello(proof=""))
        assert still_answers(worker)
        assert run.service.server.refused == {"bad message": 3}
        assert run.ask("status")["state"] == "training"


def test_a_worker_that_says_only_nonsense_is_dropped(run: Hosted) -> None:
    with run.worker() as worker, run.worker() as other:
        worker.say_bytes(b"nonsense\n" * server.MAX_MISTAKES)
        with pytest.raises(EOFError):
            worker.hear(Refused)
        assert other.hear(Generation, lambda g: g.roster == ("w1",))
        assert still_answers(other)


@pytest.mark.long
def test_a_worker_that_does_not_read_is_dropped_and_holds_nobody_up(
    run: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "UNREAD_BYTES", 2**16)
    monkeypatch.setattr(server, "BURST", inf)  # it also floods
    with run.worker() as deaf, run.worker() as other:
        deaf.deaf.set()
        beat = b'{"type":"Alive","generation":1,"step":0,"waiting":false}\n'
        with pytest.raises((ConnectionError, TimeoutError)):
            deaf.say_bytes(beat * 2**20)
        eventually(lambda: run.service.server.refused["does not read"] > 0)
        assert other.hear(Generation, lambda g: g.roster == ("w1",))
        assert still_answers(other)


def test_an_operator_is_answered_once(run: Hosted) -> None:
    with dial(run) as line:
        line.say(Ask(proof=proof(run.token, line.greeting.nonce), what="status"))
        assert line.hear(Answer).told["state"] == "starting"
        with pytest.raises(EOFError):
            line.poll()


def test_an_operator_with_the_wrong_token_is_told(run: Hosted) -> None:
    with pytest.raises(NoAnswerError, match="token"):
        ask(run.name, run.port, "0" * 64, Ask(proof="", what="status"))


@pytest.mark.parametrize("proved", ["", proof("another token", "n", COORDINATOR)])
def test_an_operator_does_not_believe_who_has_no_proof(proved: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def pretend() -> None:
            with listener.accept()[0] as there:
                there.sendall(to_client.encode(Greeting(nonce="n")))
                there.recv(2**16)
                told = Answer(told={"state": "training"}, proof=proved)
                there.sendall(to_client.encode(told))

        pretending = pool.submit(pretend)
        host, port = listener.getsockname()
        with pytest.raises(NoAnswerError, match="does not know the run's token"):
            ask(host, port, "0" * 64, Ask(proof="", what="status"))
        pretending.result(WAIT_S)


def test_an_operator_who_asks_for_nonsense_is_told(run: Hosted) -> None:
    with pytest.raises(NoAnswerError, match="known: status, scale, drain, stop"):
        run.ask("dance")


def test_nobody_there_is_told(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as there:
        pass
    with pytest.raises(NoAnswerError, match="has the run ended"):
        there.ask("status")


def test_what_a_worker_says_wrongly_changes_nothing(run: Hosted) -> None:
    with run.worker() as worker:
        worker.enter()
        before = run.ask("status")
        del before["at_s"]
        untrue = Stepped(generation=1, step=0, seconds=0.0, reports=())
        with pytest.raises(InvalidInputError):
            run.inside(lambda: run.service.handle(Heard(worker="w0", message=untrue)))
        assert before.items() <= run.ask("status").items()


def test_a_worker_that_floods_is_read_slowly_and_harms_nobody(
    run: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MESSAGES_PER_S", 1e-3)
    monkeypatch.setattr(server, "BURST", 5.0)
    monkeypatch.setattr(server, "HANG_UP_S", 0.1)
    with run.worker() as flood, run.worker() as other:
        for _ in range(50):
            flood.say(Alive(generation=0, step=0, waiting=False))
        eventually(lambda: f"{flood.id} sends over" in caplog.text)
        assert still_answers(other)
        assert sum(isinstance(m, Lease) for m in flood.waiting()) < 10
