"""Damaged and hostile input for every port and every file format.

    python -m bench.fuzz                       # a million inputs, and strangers at a run's ports
    python -m bench.fuzz --inputs 20000 --seed 7 --no-ports

Each input is a valid one, mutated: bits flipped, bytes cut, repeated, inserted or exchanged with
another input's, numbers and words replaced. A decoder may refuse it with its own error or return a
valid value; anything else is a crash. What carries a proof or a checksum must be refused.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench.strangers import at_the_ports_of_a_run
from evenstep import messages as msg
from evenstep.config import Settings
from evenstep.coordinate.record import MembershipRecorder, read_record
from evenstep.errors import EvenstepError
from evenstep.journal import Journal, read
from evenstep.strict import build
from evenstep.train.recover.checkpoint import Checkpoints, load_checkpoint
from evenstep.train.recover.flatten import flatten, tensor_paths, unflatten
from evenstep.train.recover.state import TrainingState
from evenstep.types import Joined, Worker

TOKEN, NONCE = "51cf" * 16, "00" * 16
NUMBERS = (b"0", b"-1", b"1e999", b"NaN", b"-0.0", b"9" * 400, b"1.5", b"null", b'""', b"true")
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
    hello = msg.Hello(proof=msg.proof("another", NONCE), nonce=NONCE, worker="w0", host="here")
    firsts: list[msg.Hello | msg.Ask] = [hello]
    firsts += [msg.Ask(proof="", what=what) for what in ("status", "scale", "drain", "stop")]
    strangers = [msg.from_stranger.encode(first) for first in firsts]
    workers: list[msg.FromClient] = [
        msg.Publish(generation=3, key="here/0", value=b"\x00\xff"),
        msg.Began(generation=3, step=5),
        msg.Alive(generation=3, step=5, waiting=True),
        msg.Stuck(generation=3, step=5, waited_s=2.5),
        msg.Failed(told="Traceback"),
    ]
    generation = msg.Generation(
        number=3, roster=("w0", "w1"), shares=(5, 3), planned=True, reason="w1 joined"
    )
    coordinators: list[msg.ToClient] = [
        generation,
        msg.Welcome(worker="w0", lease_s=9.0),
        msg.Goodbye(why="bye"),
    ]
    return [
        Target("a stranger's first message", strangers, _stranger, 3.0),
        Target("a worker's message", [msg.from_client.encode(m) for m in workers], _worker, 2.0),
        Target("a coordinator's message", [msg.to_client.encode(m) for m in coordinators], _client),
        _states(),
        _journals(folder / "journal.jsonl", settings),
        _records(folder / "membership.jsonl"),
        _checkpoints(folder),
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
    workers = tuple(Worker(id=f"w{i}", kind="cpu", cores=1.0) for i in range(2))
    with Journal.create(path, settings) as journal:
        for i in range(3):
            journal.append(float(i), Joined(workers=workers), ())
    seed = path.read_bytes()
    whole = list(read(path)[1])

    def decode(data: bytes) -> bool:
        path.write_bytes(data)
        records = list(read(path)[1])
        return records != whole[: len(records)]

    return Target("a journal", [seed], decode, 0.1)


def _records(path: Path) -> Target:
    MembershipRecorder(path).close()
    seed = path.read_bytes()

    def decode(data: bytes) -> bool:
        path.write_bytes(data)
        list(read_record(path))
        return False

    return Target("a membership record", [seed], decode, 0.1)


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
    """Try all targets. Returns 1 if anything was accepted or crashed."""
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description="Hostile input.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-ports", action="store_true", help="decoders only")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
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
    if not args.no_ports:
        print(at_the_ports_of_a_run())
    print(
        f"{total.total()} inputs, seed {args.seed}: "
        f"{total['accepted']} accepted, {total['crashes']} crashes"
    )
    return 1 if total["accepted"] or total["crashes"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
