"""`evenstep join`: what a worker is told of the run that it is started for."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evenstep.cli.main import main
from evenstep.cli.place import locate, outward, question
from evenstep.coordinate.ask import ask_from
from evenstep.errors import ConfigError
from evenstep.messages import Ask
from tests.coordinate.hosted import hosted, make_certificate, speaking_tls

BOUND_S = 600.0


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
    with hosted(tmp_path / "run", tls=speaking_tls(cert, key)) as run:
        run.service.folder.write_tls_ca(cert)
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


def test_on_its_own_host_a_run_that_listens_everywhere_is_found_by_loopback(tmp_path: Path) -> None:
    """The certificate tells: it is for 127.0.0.1 alone."""
    cert, key = make_certificate(tmp_path, "known")
    with hosted(tmp_path / "run", tls=speaking_tls(cert, key), at="0.0.0.0") as run:
        run.service.folder.write_tls_ca(cert)
        there = locate(str(tmp_path / "run"))
        assert question(there, "status")["state"] == "starting"
        assert outward(there.host, "127.0.0.1") == outward("0.0.0.0", "")  # and not loopback


def test_from_another_host_a_run_is_dialled_where_others_reach_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    for elsewhere, host in (("192.0.2.7:4711", "192.0.2.7"), ("[2001:db8::7]:4711", "2001:db8::7")):
        (tmp_path / "address").write_text(f"0.0.0.0:4711\n{elsewhere}\n")
        there = locate(str(tmp_path))
        assert (there.host, there.port) == (host, 4711)
    (tmp_path / "address").write_text(f"0.0.0.0:4711\n{socket.gethostname()}:4711\n")
    assert locate(str(tmp_path)).host == "0.0.0.0"
    (tmp_path / "address").write_text("0.0.0.0:4711\nno-such-host.invalid:4711\n")
    with pytest.raises(ConfigError, match=r"Give HOST:PORT instead .* and port 4711"):
        locate(str(tmp_path))


@pytest.mark.parametrize("where", ["nope", "runs/nope", "host:", ":4711", "host:99999"])
def test_what_is_neither_a_folder_nor_an_address_is_refused_as_such(
    script: Path, where: str
) -> None:
    told = f"evenstep: {where}: is neither the folder of a run nor HOST:PORT\n"
    for command, *more in (["status"], ["scale", "2"], ["drain", "w0"], ["join", str(script)]):
        result = CliRunner().invoke(main, [command, where, *more])
        assert (result.exit_code, result.stderr) == (2, told), command


def test_an_address_without_a_token_names_the_option_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("EVENSTEP_TOKEN", "EVENSTEP_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^--token-file: is missing: .* EVENSTEP_TOKEN_FILE$"):
        locate("127.0.0.1:4711")
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read: No such file"):
        locate("127.0.0.1:4711", tmp_path / "nowhere")
    monkeypatch.setenv("EVENSTEP_TOKEN", "t")
    assert locate("127.0.0.1:4711").token == "t"
