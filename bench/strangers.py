"""Strangers at the ports of a run, while it trains: who do not know its token.

They connect to the coordinator, to its page and to the data ports that Gloo opens, and send
nothing, garbage, or a handshake with a wrong proof; and they keep hundreds of connections open,
also while a new generation forms.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from bench.jobs import BIN, BOUND_S, ENVIRONMENT, end_process
from evenstep import messages as msg
from evenstep.cli.operators import ask_coordinator
from evenstep.coordinate.client import NoAnswerError
from evenstep.errors import ConfigError

IDLE, TURN_S, TURNS = 200, 2.0, 6
SLOWED = 0.8  # of the calm step rate; with less, strangers slow steps down
SCRIPT = """
import time, torch, evenstep
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(240_000, 4))
with evenstep.join() as session:
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(data, batch=12)
    for _ in session.epochs(1000):
        for (x,) in loader:
            time.sleep(0.005)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
OPTIONS = ("--workers", "3", "--tls", "--page")
PAYLOADS = (
    b"\x00" * 8,
    b"\xff" * 4096,
    bytes(range(256)) * 4096,
    b"GET / HTTP/1.1\r\n\r\n",
    msg.from_client.encode(msg.Hello(proof="0" * 64, nonce="00" * 16)),
    msg.from_client.encode(msg.Ask(proof="", what="stop")),
)


class Siege(NamedTuple):
    """What came of it."""

    line: str
    ratio: float  # of the step rate, to the calm one

    @property
    def slows(self) -> bool:
        return self.ratio < SLOWED


def at_the_ports_of_a_run() -> Siege:
    """Strangers at all ports of a run for a while. Raises if the run did not survive."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [BIN / "evenstep", "run", *OPTIONS, "--run", folder / "run", "script.py"],
                cwd=folder,
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return _besiege(folder / "run", process.pid)
        except BaseException:
            print((folder / "log").read_text()[-3000:])
            raise
        finally:
            end_process(process)


def _besiege(run: Path, pid: int) -> Siege:
    _step_after(run, 50)
    ports = _listening(pid)
    calm, besieged, sent = [], [], 0
    for _ in range(TURNS):
        calm.append(_steps_per_s(run))
        with _strangers(ports) as num:
            besieged.append(_steps_per_s(run))
        sent += num
    ratio = median(besieged) / median(calm)
    assert _status(run)["generation"] == 1, "strangers changed the roster"
    with _strangers(ports) as num:
        _form_another(run)
    sent += num
    status = _status(run)
    return Siege(
        f"{sent} connections of strangers to {len(ports)} ports of a run, up to "
        f"{len(ports) * (IDLE + len(PAYLOADS))} at once: {sum(status['refused'].values())} refused "
        f"by the coordinator, {ratio:.2f} of the calm step rate, a new generation of 4 formed "
        "among them, no worker lost",
        ratio,
    )


def _form_another(run: Path) -> None:
    """A worker joins, and all train together."""
    ask_coordinator(str(run), None, "scale", num_workers=4)
    deadline_s = time.monotonic() + BOUND_S
    while (status := _status(run)).get("generation", 1) == 1 or status["state"] != "training":
        if time.monotonic() > deadline_s:
            raise SystemExit("no generation forms among strangers")
        time.sleep(0.1)
    _step_after(run, status["step"] + 50)
    status = _status(run)
    training = sorted(w["worker"] for w in status["workers"] if w["state"] == "training")
    assert training == ["w0", "w1", "w2", "w3"], status
    assert status["generation"] == 2, "it formed more than once"


@contextmanager
def _strangers(ports: list[tuple[str, int]]) -> Iterator[int]:
    """Connections to all of these ports, and how many; they stay open."""
    held: list[socket.socket] = []
    try:
        yield sum(_send(port, held) for port in ports)
    finally:
        for connection in held:
            connection.close()


def _send(port: tuple[str, int], held: list[socket.socket]) -> int:
    sent = 0
    for payload in (*PAYLOADS, *[b""] * IDLE):
        with suppress(OSError):  # it may be closed while we send
            connection = socket.create_connection(port, timeout=5.0)
            held.append(connection)
            sent += 1
            connection.sendall(payload)
    return sent


def _listening(pid: int) -> list[tuple[str, int]]:
    """Where the processes of a run listen."""
    root = psutil.Process(pid)
    return sorted(
        (connection.laddr.ip, connection.laddr.port)
        for process in (root, *root.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    )


def _steps_per_s(run: Path) -> float:
    began_s, step = time.monotonic(), _status(run)["step"]
    time.sleep(TURN_S)
    return float((_status(run)["step"] - step) / (time.monotonic() - began_s))


def _step_after(run: Path, step: int) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while _status(run).get("step", -1) < step:
        if time.monotonic() > deadline_s:
            raise SystemExit("the run does not train")
        time.sleep(0.1)


def _status(run: Path) -> dict[str, Any]:
    try:
        return ask_coordinator(str(run), None, "status")
    except (NoAnswerError, ConfigError):
        return {}
