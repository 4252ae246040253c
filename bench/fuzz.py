"""Damaged and hostile input for every port and every file format.

    python -m bench.fuzz                       # a million inputs, and strangers at a run's ports
    python -m bench.fuzz --inputs 20000 --seed 7 --no-ports

Each input is a valid one, mutated: bits flipped, bytes cut, repeated, inserted or exchanged with
another input's, numbers and words replaced. A decoder may refuse it with its own error or return a
valid value; anything else is a crash. What carries a proof or a checksum must be refused.
"""

from __future__ import annotations

import argparse
import os
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h11
import numpy as np
import torch

from bench.samples import samples
from bench.strangers import at_the_ports_of_a_run
from evenstep import messages as msg
from evenstep.config import Settings
from evenstep.coordinate.events import AnyEffect, AnyInput
from evenstep.coordinate.record import MembershipRecorder, read_record
from evenstep.coordinate.run_folder import RunFolder, read_addresses
from evenstep.coordinate.state import RunState
from evenstep.coordinate.term import TERM, Claim, read_term
from evenstep.coordinate.tls import make_certificate, server_context
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.journal import Journal, read
from evenstep.launch.local import write_pid_file
from evenstep.page.access import Keys
from evenstep.page.guard import Guard
from evenstep.page.server import MAX_HEAD_BYTES
from evenstep.simulate.scenario import load_scenario
from evenstep.strict import build
from evenstep.train.recover.checkpoint import Checkpoints, load_checkpoint
from evenstep.train.recover.flatten import flatten, tensor_paths, unflatten
from evenstep.train.recover.state import TrainingState
from evenstep.types import AnyAction, AnyEvent

ROOT = Path(__file__).parents[1]
TOKEN, NONCE = "51cf" * 16, "00" * 16
NUMBERS = (b"0", b"-1", b"1e999", b"NaN", b"-0.0", b"9" * 400, b"1.5", b"null", b'""', b"true")
IN_MEMORY = "/dev/shm"
MAX_SHOWN = 5  # crashes


@dataclass(slots=True)
class Target:
    """One decoder: valid inputs, and what it does with others.

    `decode` returns whether the input was accepted though it must not be.
    """

    name: str
    seeds: list[bytes]
    decode: Callable[[bytes], bool]
    weight: float = 1.0  # of all inputs
    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)

    def try_one(self, data: bytes) -> None:
        """Decode an input, and count what came of it."""
        try:
            outcome = "accepted" if self.decode(data) else "valid"
        except EvenstepError:
            outcome = "refused"
        except Exception as e:
            outcome = "crashes"
            self.crashes.append(f"{self.name}: {type(e).__name__}: {e} on {data[:200]!r}")
        self.outcomes[outcome] += 1


def mutate(seeds: Sequence[bytes], rng: np.random.Generator) -> bytes:
    """One of the seeds with up to four mutations."""
    data = bytearray(seeds[int(rng.integers(len(seeds)))])
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(len(data) + 1))
        end = min(len(data), at + int(rng.integers(1, 17)))
        match int(rng.integers(7)):
            case 0 if data:
                data[at % len(data)] ^= 1 << int(rng.integers(8))
            case 1:
                del data[at:end]
            case 2:
                del data[at:]
            case 3:
                data[at:at] = data[at:end] * int(rng.integers(1, 50))
            case 4:
                data[at:at] = rng.bytes(int(rng.integers(1, 17)))
            case 5:
                other = seeds[int(rng.integers(len(seeds)))]
                data[at:end] = other[at : at + int(rng.integers(1, 200))]
            case 6:
                data[at:end] = NUMBERS[int(rng.integers(len(NUMBERS)))]
    return bytes(data)


def targets(folder: Path) -> list[Target]:
    """All decoders of what comes from outside, with valid inputs for each."""
    settings = build(Settings, {"batch": {"size": 8}})
    proved = msg.proof("another", NONCE)
    firsts = samples(msg.Hello | msg.Ask, proof=proved, protocol=msg.PROTOCOL)
    firsts += [msg.Ask(proof="", what=what) for what in ("status", "scale", "drain", "stop")]
    strangers = [msg.from_stranger.encode(first) for first in firsts]
    workers = [msg.from_client.encode(m) for m in samples(msg.FromClient)]
    coordinators = [msg.to_client.encode(m) for m in samples(msg.ToClient)]
    return [
        Target("a stranger's first message", strangers, _stranger, 3.0),
        Target("a worker's message", workers, _worker, 2.0),
        Target("a coordinator's message", coordinators, _client),
        Target("an answer to a connection test", [_link_proof()], _link, 0.3),
        _requests(),
        _handshakes(folder),
        _states(),
        _journals(folder / "journal.jsonl", settings),
        _records(folder / "membership.jsonl"),
        _checkpoints(folder),
        _terms(folder),
        _addresses(folder),
        _pid_files(folder),
        _scenarios(folder / "scenario.yaml"),
    ]


def _stranger(data: bytes) -> bool:
    first = msg.from_stranger.decode(data)
    return msg.proves(first.proof, TOKEN, NONCE)


def _worker(data: bytes) -> bool:
    msg.from_client.decode(data)
    return False


def _client(data: bytes) -> bool:
    msg.to_client.decode(data)
    return False


def _states() -> Target:
    state = {"a": [1, 2.5, None, {"b": torch.ones(2)}], "c": (torch.zeros(1), {3, 4}, "text")}
    structure, tensors = flatten(state)

    def decode(data: bytes) -> bool:
        tensor_paths(data)
        unflatten(data, tensors)
        return False

    return Target("the structure of a state", [structure], decode)


def _journals(path: Path, settings: Settings) -> Target:
    with Journal.create(path, settings) as journal:
        for event in samples(AnyEvent):
            journal.append(1.0, event, tuple(samples(AnyAction)))
    seed = path.read_bytes()
    whole = list(read(path)[1])

    def decode(data: bytes) -> bool:
        path.write_bytes(data)
        records = list(read(path)[1])
        return not _is_part(records, whole)

    return Target("a journal", [seed], decode, 0.1)


def _records(path: Path) -> Target:
    recorder = MembershipRecorder(path)
    for event in samples(AnyInput):
        recorder.write(1.0, event, RunState(), None, tuple(samples(AnyEffect)), range(0))
    recorder.close()
    seed = path.read_bytes()
    whole = list(read_record(path))

    def decode(data: bytes) -> bool:
        path.write_bytes(data)
        return not _is_part(list(read_record(path)), whole)

    return Target("a membership record", [seed], decode, 0.1)


def _is_part(records: list[Any], whole: list[Any]) -> bool:
    """Whether these are whole records of a file, if not all of them: lines may be lost or twice."""
    return all(record in whole for record in records)


def _terms(folder: Path) -> Target:
    Claim(folder, 10.0).move_fence(3)
    seed = (folder / TERM).read_bytes()

    def decode(data: bytes) -> bool:
        (folder / TERM).write_bytes(data)
        try:
            read_term(folder)
        except OSError as e:
            raise InvalidInputError(TERM, str(e.strerror)) from None
        return False

    return Target("a term", [seed], decode, 0.3)


def _addresses(folder: Path) -> Target:
    def decode(data: bytes) -> bool:
        (folder / "address").write_bytes(data)
        read_addresses(folder)
        return False

    seeds = [b"127.0.0.1:29400\n", b"127.0.0.1:29400\nhost.example:29400\n", b"[::1]:29400\n"]
    return Target("an address", seeds, decode, 0.3)


def _pid_files(folder: Path) -> Target:
    """Which workers outlived a coordinator. None: a damaged file says nothing of a process."""
    run = RunFolder.make(folder / "run")
    (run.logs / "w0.log").touch()
    path = run.logs / "w0.pid"
    write_pid_file(os.getpid(), path)
    seed, me = path.read_bytes(), {"w0": os.getpid()}

    def decode(data: bytes) -> bool:
        path.write_bytes(data)
        run.ended()
        return run.outlived() not in ({}, me)

    return Target("a pid file", [seed], decode, 0.1)


def _scenarios(path: Path) -> Target:
    def decode(data: bytes) -> bool:
        path.write_bytes(data)
        load_scenario(path)
        return False

    seeds = [p.read_bytes() for p in sorted((ROOT / "scenarios").rglob("*.yaml"))]
    return Target("a scenario", seeds, decode, 0.003)


def _link_proof() -> bytes:
    return msg.proof("another", "0.1 w0", msg.LISTENER).encode()


def _link(data: bytes) -> bool:
    """What a worker that tests a connection reads from the other one."""
    return data[:64] == msg.proof(TOKEN, "0.1 w0", msg.LISTENER).encode()


def _requests() -> Target:
    """Requests to the page, up to the point where the page itself would answer."""
    reached = False

    async def page(scope: Any, receive: Any, send: Any) -> None:
        nonlocal reached
        reached = True

    async def ignore(_: Any) -> None: ...

    guard = Guard(page, keys=Keys("51cf" * 8), port=80, names=["host"])

    def decode(data: bytes) -> bool:
        nonlocal reached
        reached = False
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            connection.receive_data(data)
            request = connection.next_event()
        except h11.RemoteProtocolError as e:
            raise InvalidInputError("request", str(e)) from None
        if not isinstance(request, h11.Request):
            raise InvalidInputError("request", "is not whole")
        path, _, query = request.target.partition(b"?")
        scope = {
            "type": "http",
            "method": request.method.decode("ascii"),
            "path": unquote(path.decode("ascii")),
            "query_string": query,
            "headers": list(request.headers),
        }
        with suppress(StopIteration):
            guard(scope, None, ignore).send(None)  # type: ignore[arg-type]
        return reached

    head = "Host: 127.0.0.1:80\r\nCookie: a=b; evenstep-80=0f0f\r\n"
    seeds = [f"{line} HTTP/1.1\r\n{head}\r\n" for line in ("GET /?key=0f", "GET /events?x=1%41")]
    seeds.append(f"POST /commands HTTP/1.1\r\nAuthorization: Bearer 0f\r\n{head}\r\n")
    return Target("a request to the page", [seed.encode() for seed in seeds], decode, 0.3)


def _handshakes(folder: Path) -> Target:
    """The begin of a TLS connection to the coordinator."""
    (folder / "tls.pem").write_bytes(make_certificate())
    server = server_context(folder / "tls.pem")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        client.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()

    def decode(data: bytes) -> bool:
        received = ssl.MemoryBIO()
        received.write(data)
        try:
            server.wrap_bio(received, ssl.MemoryBIO(), server_side=True).do_handshake()
        except ssl.SSLWantReadError:
            return False  # it waits for the rest
        except ssl.SSLError as e:
            raise InvalidInputError("handshake", str(e)) from None
        return True

    return Target("a TLS handshake", [hello.read()], decode, 0.1)


def _checkpoints(folder: Path) -> Target:
    model = torch.nn.Linear(3, 2)
    state = TrainingState({"model": model}, {}, {"step": 7})
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(7, state)
    checkpoints.close()
    (path,) = (folder / "checkpoints").glob("*.pt")
    seed = path.read_bytes()
    whole, _ = flatten(load_checkpoint(path).tree)

    def decode(data: bytes) -> bool:
        path.write_bytes(data)
        structure, tensors = flatten(load_checkpoint(path).tree)
        own = [*model.state_dict().values()]
        return structure != whole or not all(map(torch.equal, tensors, own))

    return Target("a checkpoint", [seed], decode, 0.01)


def main(argv: Sequence[str] | None = None) -> int:
    """Try all targets. Returns 1 if anything was accepted, crashed, or slowed a run."""
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description="Hostile input.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-ports", action="store_true", help="decoders only")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    in_memory = IN_MEMORY if Path(IN_MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        found = targets(Path(folder))
        weights = sum(target.weight for target in found)
        for target in found:
            began_s = time.monotonic()
            for _ in range(max(1, round(args.inputs * target.weight / weights))):
                target.try_one(mutate(target.seeds, rng))
            counts = ", ".join(f"{num} {what}" for what, num in sorted(target.outcomes.items()))
            print(f"{target.name}: {counts}; {time.monotonic() - began_s:.0f} s", flush=True)
    crashes = [crash for target in found for crash in target.crashes]
    for crash in crashes[:MAX_SHOWN]:
        print(crash)
    total = Counter[str]()
    for target in found:
        total += target.outcomes
    slowed = False
    if not args.no_ports:
        siege = at_the_ports_of_a_run()
        slowed = siege.slows
        print(siege.line)
    print(
        f"{total.total()} inputs, seed {args.seed}: "
        f"{total['accepted']} accepted, {total['crashes']} crashes"
    )
    return 1 if total["accepted"] or total["crashes"] or slowed else 0


if __name__ == "__main__":
    raise SystemExit(main())
