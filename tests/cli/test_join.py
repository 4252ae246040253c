"""`evenstep join`: the environment of a worker, and how a run is found."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evenstep.cli.endpoint import advertised_address, find_coordinator
from evenstep.cli.main import main
from evenstep.cli.operators import ask_coordinator
from evenstep.cli.signals import stop_signals
from evenstep.coordinate import client
from evenstep.coordinate.client import ask_from
from evenstep.errors import ConfigError
from evenstep.messages import Ask
from tests.coordinate.hosted import hosted

BOUND_S = 600.0


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Prints evenstep's variables of its environment."""
    path = tmp_path / "print_environment.py"
    found = "{k: v for k, v in os.environ.items() if k.startswith('EVENSTEP_')}"
    path.write_text(f"import json, os; print(json.dumps({found}))")
    return path


def environment_of(*args: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "join", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_certificate_of_a_run_is_passed_to_the_worker(tmp_path: Path, script: Path) -> None:
    with hosted(tmp_path / "run", tls=True) as run:
        env = environment_of(tmp_path / "run", script)
        assert Path(env["EVENSTEP_TOKEN_FILE"]).read_text().split() == [run.token, run.fingerprint]
        assert env["EVENSTEP_COORDINATOR"] == run.address
        elsewhere = environment_of("--token-file", tmp_path / "run" / "token", run.address, script)
        assert elsewhere["EVENSTEP_TOKEN"].split() == [run.token, run.fingerprint]


def test_a_worker_gets_its_address_unless_it_is_loopback(tmp_path: Path, script: Path) -> None:
    with hosted(tmp_path / "run") as run:
        assert "EVENSTEP_ADDRESS" not in environment_of(tmp_path / "run", script)
        own = environment_of("--address", "10.0.0.7", tmp_path / "run", script)
        assert own["EVENSTEP_ADDRESS"] == "10.0.0.7"
        _, local = ask_from(run.name, run.port, run.token, Ask(proof="", what="status"))
    assert local == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "local", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", ""),
        ("localhost", "::1", ""),
        ("10.0.0.1", "10.0.0.7", "10.0.0.7"),
        ("trainer.example", "fd00::7", "fd00::7"),
    ],
)
def test_a_worker_advertises_its_address_towards_the_coordinator(
    host: str, local: str, expected: str
) -> None:
    assert advertised_address(host, local) == expected


def test_on_its_own_host_a_run_on_all_addresses_is_reached_by_loopback(
    tmp_path: Path,
) -> None:
    with hosted(tmp_path / "run", at="0.0.0.0", tls=True):
        coordinator = find_coordinator(str(tmp_path / "run"))
        assert ask_coordinator(str(tmp_path / "run"), None, "status")["state"] == "starting"
        assert advertised_address(coordinator.host, "127.0.0.1") == advertised_address(
            "0.0.0.0", ""
        )  # not loopback


def test_from_another_host_a_run_is_reached_at_its_remote_address(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("51c0" * 8)
    for remote, host in (("192.0.2.7:4711", "192.0.2.7"), ("[2001:db8::7]:4711", "2001:db8::7")):
        (tmp_path / "address").write_text(f"0.0.0.0:4711\n{remote}\n")
        coordinator = find_coordinator(str(tmp_path))
        assert (coordinator.host, coordinator.port) == (host, 4711)
    (tmp_path / "address").write_text(f"0.0.0.0:4711\n{socket.gethostname()}:4711\n")
    assert find_coordinator(str(tmp_path)).host == "0.0.0.0"
    (tmp_path / "address").write_text("0.0.0.0:4711\nno-such-host.invalid:4711\n")
    with pytest.raises(ConfigError, match=r"Give HOST:PORT instead .* and port 4711"):
        find_coordinator(str(tmp_path))


@pytest.mark.long  # workers give up after two minutes
def test_a_run_whose_coordinator_does_not_come_back_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Path
) -> None:
    monkeypatch.setattr(client, "FIRST_DIAL_S", 0.0)
    with hosted(tmp_path / "run") as run:
        pass
    result = CliRunner().invoke(main, ["join", str(tmp_path / "run"), str(script)])
    message = f"evenstep: no coordinator listens at {run.address}; has the run ended?\n"
    assert (result.exit_code, result.stderr) == (75, message)


@pytest.mark.parametrize("where", ["nope", "runs/nope", "host:", ":4711", "host:99999"])
def test_a_run_that_is_neither_folder_nor_address_is_refused(script: Path, where: str) -> None:
    message = f"evenstep: {where}: is neither a run folder nor HOST:PORT\n"
    for command, *more in (["status"], ["scale", "2"], ["drain", "w0"], ["join", str(script)]):
        result = CliRunner().invoke(main, [command, where, *more])
        assert (result.exit_code, result.stderr) == (2, message), command


def test_an_address_without_a_token_names_the_option_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("EVENSTEP_TOKEN", "EVENSTEP_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^--token-file: is missing: .* EVENSTEP_TOKEN_FILE$"):
        find_coordinator("127.0.0.1:4711")
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read: No such file"):
        find_coordinator("127.0.0.1:4711", tmp_path / "nowhere")
    monkeypatch.setenv("EVENSTEP_TOKEN", "51c0" * 8)
    assert find_coordinator("127.0.0.1:4711").token == "51c0" * 8


def test_handlers_of_signals_are_as_before_when_the_command_is_over(
    tmp_path: Path, script: Path
) -> None:
    before = [signal.getsignal(number) for number in stop_signals()]
    result = CliRunner().invoke(main, ["join", str(tmp_path / "nowhere"), str(script)])
    assert result.exit_code != 0
    assert [signal.getsignal(number) for number in stop_signals()] == before
