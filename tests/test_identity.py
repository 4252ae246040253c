"""Tokens that are short are refused wherever they are read; so are impossible worker names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.json import encode

from evenstep.cli.endpoint import find_coordinator
from evenstep.cli.main import main
from evenstep.coordinate.run_folder import RunFolder
from evenstep.errors import ConfigError, InvalidInputError
from evenstep.identity import parse_credentials, run_id
from evenstep.launch.environment import read_environment
from evenstep.messages import from_client, from_stranger
from tests.coordinate.fake import ready
from tests.coordinate.hosted import hosted

TOKEN = "0123456789abcdef" * 2
BAD_TOKENS = ["", "\n", "t", TOKEN[1:], "\0" * 64, "not hex " * 8, TOKEN + "\n" + TOKEN]
BAD_TOKENS += ["sha256:" + "0f" * 32, f"{TOKEN}\nsha256:0f", f"{TOKEN} sha256:{'0f' * 32} x"]
FINGERPRINT = "sha256:" + "0f" * 32
BAD_NAMES = ["../../../x", "/x", ".x", "a b", "x\n", "a/b", "x" * 65, "\x1b[2J"]


def environment(token: str, worker: str = "w0") -> dict[str, str]:
    coordinator = {"EVENSTEP_COORDINATOR": "127.0.0.1:4711"}
    return {**coordinator, "EVENSTEP_TOKEN": token, "EVENSTEP_WORKER": worker}


def resumed(folder: Path) -> None:
    RunFolder.open(folder).close()


def operated(folder: Path) -> None:
    (folder / "address").write_text("127.0.0.1:4711\n")
    find_coordinator(str(folder))


def given_a_file(folder: Path) -> None:
    find_coordinator("127.0.0.1:4711", folder / "token")


def started_as_a_worker(folder: Path) -> None:
    read_environment(environment((folder / "token").read_text()))


def started_with_a_file(folder: Path) -> None:
    variables = {"EVENSTEP_TOKEN_FILE": str(folder / "token")}
    read_environment({"EVENSTEP_COORDINATOR": "127.0.0.1:4711", **variables})


READERS = (resumed, operated, given_a_file, started_as_a_worker, started_with_a_file)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("token", BAD_TOKENS)
def test_a_short_token_is_refused_by_every_reader(
    tmp_path: Path, read: Callable[[Path], None], token: str
) -> None:
    (tmp_path / "token").write_text(token)
    with pytest.raises(ConfigError, match=r"holds no token: .* begin a new run"):
        read(tmp_path)
    for valid in (TOKEN, f"{TOKEN}\n", f"{TOKEN}\n{FINGERPRINT}\n"):
        (tmp_path / "token").write_text(valid)
        read(tmp_path)


def test_a_run_on_a_full_disk_leaves_no_empty_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(ConfigError, match="No space left"):
            RunFolder.make(tmp_path / "run")
    assert not (tmp_path / "run" / "token").exists()
    RunFolder.make(tmp_path / "run").close()


def test_a_new_run_does_not_take_over_the_checkpoints_of_another(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000817.pt").touch()
    with pytest.raises(ConfigError, match=r"of another run, .*step-00000817.pt; name another"):
        RunFolder.make(tmp_path)
    assert not (tmp_path / "token").exists()


def test_a_token_file_may_have_the_fingerprint_of_a_certificate() -> None:
    assert parse_credentials(f"{TOKEN}\n", "token") == (TOKEN, "")
    for between in ("\n", " ", "\r\n"):  # as a file, as a variable, copied by another system
        assert parse_credentials(TOKEN + between + FINGERPRINT, "token") == (TOKEN, FINGERPRINT)


def test_a_token_that_can_be_guessed_is_refused() -> None:
    for token in ("0" * 32, "5f" * 32, "Aa0" * 20):
        with pytest.raises(ConfigError, match=r"can be guessed: .* `openssl rand -hex 32`"):
            parse_credentials(token, "token")


def test_a_variable_was_on_no_full_disk() -> None:
    with pytest.raises(ConfigError) as refused:
        read_environment(environment("5f"))
    assert "EVENSTEP_TOKEN: holds no token" in str(refused.value)
    assert "disk" not in str(refused.value)
    with pytest.raises(ConfigError, match="disk full"):
        parse_credentials("5f", "token")


def test_a_run_id_is_public_and_tells_tokens_apart() -> None:
    assert len({run_id(TOKEN), run_id(TOKEN + "0")}) == 2
    assert run_id(TOKEN) not in TOKEN


def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    new, empty, shared = tmp_path / "runs" / "a", tmp_path / "empty", tmp_path / "shared"
    for path in (empty, shared):
        path.mkdir()
        path.chmod(0o755)
    (shared / "train.py").touch()
    for path in (new, empty, shared):
        RunFolder.make(path).close()
    for path in (new, empty, shared / "logs", shared / "checkpoints"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755  # it holds files of the user's own


def test_a_run_folder_that_others_can_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunFolder.make(tmp_path / "run").close()
    assert not caplog.text
    for mode, what in ((0o755, "may list its files"), (0o777, "may list or change its files")):
        caplog.clear()
        (tmp_path / "run").chmod(mode)
        RunFolder.open(tmp_path / "run").close()
        assert f"{tmp_path}/run: other users of this host {what}" in caplog.text
        assert f"chmod 700 {tmp_path}/run" in caplog.text


def test_no_file_of_a_run_is_open_to_others(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        run.worker().enter()
    for name in ("journal.jsonl", "membership.jsonl", "term", "address", "token"):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o600, name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_impossible_worker_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"EVENSTEP_WORKER: .* is not a worker's name"):
        read_environment(environment(TOKEN, name))
    result = CliRunner().invoke(main, ["drain", str(tmp_path), name])
    assert result.exit_code == 2
    assert "is not a worker's name" in result.stderr


def hello(**fields: object) -> bytes:
    return encode({"type": "Hello", "proof": "", **fields})


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_impossible_worker_name_is_refused_on_the_wire(name: str) -> None:
    for line in (
        hello(worker=name),
        encode({"type": "Ask", "proof": "", "what": "drain", "worker": name}),
    ):
        with pytest.raises(InvalidInputError, match="worker"):
            from_stranger.decode(line)
    assert from_stranger.decode(hello(worker="gpu-7.rack_2"))


@pytest.mark.parametrize(
    "line",
    [
        hello(host="a\x1b[2Jb"),
        hello(host="x" * 2**16 + "x"),
        hello(pid=-1),
        hello(generation=2**53 + 1),
        hello(generation=-1),
        encode({"type": "Alive", "generation": 1, "step": 10**30, "waiting": False}),
        encode({"type": "Stuck", "generation": 1, "step": 1, "waited_s": -1.0}),
        b'{"type":"Stuck","generation":1,"step":1,"waited_s":1e999}',
        b'{"type":"Stuck","generation":1,"step":1,"waited_s":NaN}',
        encode({"type": "Leaving", "why": "two\nlines"}),
        encode({"type": "Done", "step": -1}),
    ],
)
def test_impossible_numbers_and_text_are_refused_on_the_wire(line: bytes) -> None:
    with pytest.raises(InvalidInputError):
        from_client.decode(line)


def test_what_workers_of_a_run_say_is_understood() -> None:
    assert from_client.decode(from_client.encode(ready(kind="NVIDIA GeForce RTX 3090 (Ti), 24 GB")))
