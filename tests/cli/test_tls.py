"""`evenstep run --tls`: real processes, a script that does not train; and the ports it names."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from evenstep.cli.main import main
from evenstep.cli.ports import control_port, data_ports
from evenstep.coordinate.run_folder import TLS, RunFolder
from evenstep.coordinate.tls import make_certificate, pem_fingerprint, shortened
from tests.cli.test_run import LONG, SCRIPT, Runs, ended, until, workers_of
from tests.coordinate.proxy import RecordingProxy


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()
    for process in workers_of(tmp_path / "run"):
        process.kill()


def port_of(run: Path) -> int:
    return int((run / "address").read_text().rpartition(":")[2])


def trains(runs: Runs, run: Path, num_workers: int) -> bool:
    done = runs.run("status", "--json", run)
    workers = json.loads(done.stdout)["workers"] if done.returncode == 0 else []
    return [worker["state"] for worker in workers] == ["training"] * num_workers


def test_workers_and_commands_need_the_token_file_and_nothing_else(
    runs: Runs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = runs.start("run", "--tls", "--workers", "2", "--run", run, SCRIPT, LONG)
    until((run / "steps").exists)
    (copied := tmp_path / "copied").write_text((run / "token").read_text())
    token, fingerprint = copied.read_text().split()
    with RecordingProxy(port_of(run)) as proxy:
        guest = runs.start("join", "--token-file", copied, proxy.address, SCRIPT, LONG)
        until(lambda: trains(runs, run, 3))

        (other := tmp_path / "other").write_text(f"{token}\nsha256:{'0f' * 32}\n")
        refused = runs.run("join", "--token-file", other, proxy.address, SCRIPT, LONG)
        assert refused.returncode == 2
        assert refused.stdout == ""
        for words in (shortened(fingerprint), "sha256:0f0f0f0f0f0f...", "Is this the right"):
            assert words in refused.stderr

        first.kill()  # its workers train on; another coordinator takes over without --tls
        first.communicate()
        certificate = (run / TLS).read_bytes()
        second = runs.start("run", "--resume", run, SCRIPT, LONG)
        until(lambda: trains(runs, run, 3))
        second.send_signal(signal.SIGINT)
        said = ended(second)
        assert said.returncode == 0
        assert ended(guest).returncode == 75  # the run was stopped before its end
        seen = proxy.sent + proxy.answered
    assert (run / TLS).read_bytes() == certificate
    assert (run / "token").read_text().split() == [token, fingerprint]
    assert len(seen) > 1000
    for words in (token, '"type"', "Greeting", "Alive", "proof"):
        assert words.encode() not in seen
    line = rf"control port 127.0.0.1:{port_of(run)} on loopback: .*; TLS, certificate "
    assert re.search(line + re.escape(shortened(fingerprint)), said.stderr)
    assert "data ports on loopback, 127.0.0.1: one a worker" in said.stderr


def refusal(*args: str | Path) -> str:
    result = CliRunner().invoke(main, ["run", *map(str, args)])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    said = refusal("--tls", "--run", tmp_path / "run", SCRIPT)
    assert said == "evenstep: --tls: needs the package cryptography: pip install 'evenstep[tls]'\n"
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_the_certificate_it_began_with(tmp_path: Path) -> None:
    pem, run = make_certificate(), tmp_path / "run"
    key, _, certificate = pem.decode().partition("-----BEGIN CERT")
    (tmp_path / "own.pem").write_text(f"-----BEGIN CERT{certificate}")
    (tmp_path / "own.key").write_text(key)
    (tmp_path / "other.pem").write_bytes(make_certificate())
    RunFolder.make(run, pem_fingerprint(tmp_path, pem)).close()  # as with --tls-cert: no copy
    own, other = (("--tls-cert", tmp_path / name, "--tls-key") for name in ("own.pem", "other.pem"))
    assert "tls.pem: cannot be read" in refusal("--resume", run, SCRIPT)
    assert "tls.pem: cannot be read" in refusal("--resume", run, "--tls", SCRIPT)
    said = refusal("--resume", run, *other, tmp_path / "other.pem", SCRIPT)
    assert f"began with {shortened(pem_fingerprint(tmp_path, pem))}" in said
    said = refusal("--resume", run, *own, tmp_path / "other.pem", SCRIPT)
    assert "cannot be used for TLS" in said  # the key is of the other one
    # All is well with the certificate; so it gets as far as to listen.
    said = refusal("--resume", run, *own, tmp_path / "own.key", "--host", "192.0.2.1", SCRIPT)
    assert "cannot listen at 192.0.2.1" in said
    assert not (run / TLS).exists()


def test_tls_cannot_be_added_to_a_run_that_began_without(tmp_path: Path) -> None:
    RunFolder.make(tmp_path / "run").close()
    assert "began without TLS" in refusal("--resume", tmp_path / "run", "--tls", SCRIPT)


def test_ports_are_named_with_their_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    said = control_port([("127.0.0.1", 1), ("::1", 2)], "")
    assert "127.0.0.1:1 on loopback and [::1]:2 on loopback: " in said
    assert said.endswith("; not encrypted")
    assert "on all interfaces: " in control_port([("0.0.0.0", 1)], "")
    assert "on an interface unknown here, 192.0.2.1: " in data_ports("192.0.2.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "on eth7 (GLOO_SOCKET_IFNAME): " in data_ports("127.0.0.1")
