"""`evenstep join`: what a worker is told of the run that it is started for."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenstep.cli.place import outward
from evenstep.coordinate.ask import ask_from
from evenstep.messages import Ask
from tests.coordinate.hosted import hosted, make_certificate

BOUND_S = 60.0


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """It says what its environment tells it of the run."""
    path = tmp_path / "told.py"
    found = "{k: v for k, v in os.environ.items() if k.startswith('EVENSTEP_')}"
    path.write_text(f"import json, os; print(json.dumps({found}))")
    return path


def told(*args: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "join", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_certificate_of_a_run_is_passed_on(tmp_path: Path, script: Path) -> None:
    cert, key = make_certificate(tmp_path, "known")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with hosted(tmp_path / "run", tls=tls) as run:
        run.host.folder.write_tls_ca(cert)
        env = told(tmp_path / "run", script)
    assert env["EVENSTEP_TLS_CA"] == str(tmp_path / "run" / "tls.pem")
    assert env["EVENSTEP_COORDINATOR"] == run.address


def test_where_a_worker_is_reached_is_told_unless_it_is_loopback(
    tmp_path: Path, script: Path
) -> None:
    with hosted(tmp_path / "run") as run:
        assert "EVENSTEP_ADDRESS" not in told(tmp_path / "run", script)
        own = told("--address", "10.0.0.7", tmp_path / "run", script)
        assert own["EVENSTEP_ADDRESS"] == "10.0.0.7"
        _, mine = ask_from(run.name, run.port, run.token, Ask(proof="", what="status"))
    assert mine == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "mine", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", ""),
        ("localhost", "::1", ""),
        ("10.0.0.1", "10.0.0.7", "10.0.0.7"),
        ("trainer.example", "fd00::7", "fd00::7"),
    ],
)
def test_others_reach_a_worker_at_its_end_of_the_way_to_the_coordinator(
    host: str, mine: str, expected: str
) -> None:
    assert outward(host, mine) == expected
