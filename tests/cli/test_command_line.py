"""The command line as a whole: quick to answer, and one line for what it refuses."""

from __future__ import annotations

import subprocess
import sys

from click.testing import CliRunner

from evenstep import __version__
from evenstep.cli.main import COMMANDS, main

HEAVY = {"torch", "numpy", "yaml", "msgspec"}


def test_help_loads_nothing_heavy() -> None:
    asked = (
        "import sys; from evenstep.cli.main import main; main(['--help'], standalone_mode=False)"
    )
    tell = "; print('loaded', *sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run(
        [sys.executable, "-c", asked + tell], capture_output=True, text=True, check=True
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


def test_every_command_is_listed_and_says_the_same_of_itself() -> None:
    listed = CliRunner().invoke(main, ["--help"]).output
    for name, summary in COMMANDS.items():
        assert f"{name} " in listed
        assert summary in listed
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_commands_load_no_torch() -> None:
    modules = ", ".join(f"evenstep.cli.{name}" for name in COMMANDS)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["simulat"])
    assert result.exit_code == 2
    assert "simulat" in result.output
