"""Strangers at the ports of a run, while it trains: who do not know its token.

They connect to the coordinator and to the data ports that Gloo opens, and send nothing, garbage,
or a handshake with a wrong proof; and they keep hundreds of connections open.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.jobs import BIN, BOUND_S, ENVIRONMENT, end_process
from evenstep import messages as msg
from evenstep.cli.operators import ask_coordinator
from evenstep.coordinate.client import NoAnswerError
from evenstep.errors import ConfigError

IDLE, TURN_S, TURNS = 200, 2.0, 6
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
PAYLOADS = (
    b"\x00" * 8,
    b"\xff" * 4096,
    bytes(range(256)) * 4096,
    b"GET / HTTP/1.1\r\n\r\n",
    msg.from_client.encode(msg.Hello(proof="0" * 64, nonce="00" * 16)),
    msg.from_client.encode(msg.Ask(proof="", what="stop")),
)


def at_the_ports_of_a_run() -> str:
    """What came of it, in one line. Raises if the run did not survive."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [BIN / "evenstep", "run", "--workers", "3", "--run", folder / "run", "script.py"],
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


def _besiege(run: Path, pid: int) -> str:
    _step_after(run, 50)
    ports = _listening(pid)
    calm, besieged, sent = [], [], 0
    for _ in range(TURNS):
        calm.append(_steps_per_s(run))
        held: list[socket.socket] = []
        for port in ports:
            sent += _send(port, held)
        besieged.append(_steps_per_s(run))
        for connection in held:
            connection.close()
    ratio = median(besieged) / median(calm)
    status = _status(run)
    assert status["generation"] == 1, "strangers changed the roster"
    return (
        f"{sent} connections of strangers to {len(ports)} ports of a run, up to "
        f"{len(ports) * (IDLE + len(PAYLOADS))} at once: {sum(status['refused'].values())} refused "
        f"by the coordinator, {ratio:.2f} of the calm step rate, no worker lost"
    )


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
