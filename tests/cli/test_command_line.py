"""The command line as a whole: it answers quickly and refuses bad input in one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from evenstep import __version__
from evenstep.cli.main import COMMANDS, OPERATORS, main
from evenstep.cli.run import run_command
from evenstep.coordinate.events import Terms
from evenstep.decide.batching import POLICIES
from evenstep.errors import nearest

HEAVY = {"torch", "numpy", "yaml", "msgspec"}


def test_help_loads_nothing_heavy() -> None:
    help_code = (
        "import sys; from evenstep.cli.main import main; main(['--help'], standalone_mode=False)"
    )
    report = "; print('loaded', *sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run(
        [sys.executable, "-c", help_code + report], capture_output=True, text=True, check=True
    )
    *answer, loaded = done.stdout.splitlines()
    assert "Commands:" in answer
    assert "click" in loaded.split()
    assert not HEAVY & set(loaded.split())


def test_python_m_evenstep_is_evenstep() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"evenstep {__version__}\n"


def test_every_command_is_listed_and_has_help() -> None:
    listed = CliRunner().invoke(main, ["--help"]).output
    for name, summary in COMMANDS.items():
        assert f"{name} " in listed
        assert summary in listed
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_commands_load_neither_torch_nor_cryptography() -> None:
    names = {"operators", *COMMANDS} - set(OPERATORS)
    modules = ", ".join(f"evenstep.cli.{name}" for name in names)
    code = f"import sys, {modules}; print({{'torch', 'cryptography'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("simulat", "No such command 'simulat'. Did you mean 'simulate'?"),
        ("xyzzy", "No such command 'xyzzy'."),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest_one(typed: str, message: str) -> None:
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert message in result.output


def test_a_negative_number_of_workers_is_refused_as_a_number() -> None:
    result = CliRunner().invoke(main, ["scale", "some-run", "-1"])
    assert result.exit_code == 2
    assert "NUM_WORKERS: must be 1 or more, got -1" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "automatic"], "policy: unknown name 'automatic'; did you mean auto?"),
        (["--policy", ""], "--policy: is empty; give a name, or leave the option out"),
        (["--scale", "", "--workers", "1:3"], "--scale: is empty"),
        (
            ["--scale", "utility:linear=100", "--workers", "1:3"],
            'scaling.heuristic.linear: expected "y0,x0", got "100"',
        ),
    ],
)
def test_an_invalid_plugin_is_refused_before_a_run_folder_is_made(
    tmp_path: Path, options: list[str], message: str
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text("")
    result = CliRunner().invoke(main, ["run", *options, "--run", str(folder), str(script)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not folder.exists()


@pytest.mark.parametrize("made_before", [False, True])
def test_a_run_that_cannot_listen_leaves_its_folder_as_it_was(
    tmp_path: Path, made_before: bool
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text("")
    if made_before:
        folder.mkdir()
        (folder / "notes.txt").write_text("the user's own")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for _ in range(2):  # the second time, the folder can be used again
            result = CliRunner().invoke(
                main, ["run", "--port", port, "--run", str(folder), str(script)]
            )
            assert result.exit_code == 2
            assert f"cannot listen at 127.0.0.1:{port}" in result.stderr
    assert folder.exists() == made_before
    if made_before:
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--workers", "2", "--min", "5"],
            "--workers starts 2 of the 5 workers that the run needs (workers.min). It pauses until "
            "3 more have joined",
        ),
        (["--workers", "2", "--min", "2"], ""),
        (["--workers", "0"], ""),
    ],
)
def test_fewer_workers_than_the_minimum_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: list[str], message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that the run fails at once
        port = str(taken.getsockname()[1])
        args = [*options, "--port", port, "--run", str(tmp_path / "run"), str(script)]
        assert CliRunner().invoke(main, ["run", *args]).exit_code == 2
    assert [r.levelname for r in caplog.records if "workers.min" in r.message] == [
        "WARNING"
    ] * bool(message)
    assert message in caplog.text


def test_an_invalid_price_leaves_no_folder(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text("")
    args = ["run", "--price", "cheap", "--run", str(folder), str(script)]
    assert CliRunner().invoke(main, args).exit_code == 2
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "near"),
    [("automatic", "auto"), ("autoo", "auto"), ("unifrom", "uniform"), ("prop", "proportional")],
)
def test_the_nearest_name_has_the_same_beginning(name: str, near: str) -> None:
    assert nearest(name, POLICIES) == near
    assert nearest("xyzzy", POLICIES) == ""


def test_help_names_the_default_price() -> None:
    price = next(option for option in run_command.params if option.name == "prices")
    assert isinstance(price, click.Option)
    assert price.help is not None
    assert f"[default: {Terms().price_of('cpu'):g}]" in price.help
