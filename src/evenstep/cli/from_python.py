"""`evenstep.run(...)`: the command `evenstep run`, called from Python, say in a Ray job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import click

from evenstep.errors import ConfigError, EvenstepError

Option = str | int | float | bool | Path | Sequence[str]


class RunFailedError(EvenstepError, RuntimeError):
    """A run ended before its end: the script failed, or no worker is left. Its log says which."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"the run ended with exit code {self.code}; what it printed says why"


def run(script: str | Path, *args: str, **options: Option) -> None:
    """Train `script args` as `evenstep run` does, and wait for the end.

    Options are those of the command, with underscores; a list repeats one:
    `evenstep.run("train.py", "--lr", "0.1", on="ray", workers="2:8", kind=["gpu=1", "cpu=8"])`.
    Raises RunFailedError, or ConfigError for a wrong option.
    """
    if threading.current_thread() is not threading.main_thread() or _in_event_loop():
        raise ConfigError("evenstep.run", "call it in the main thread and outside of an event loop")
    # Imported here: a script that only joins runs needs none of it.
    from evenstep.cli.run import run_command

    line = [*as_flags(options), str(script), *args]
    try:
        code = run_command.main(line, prog_name="evenstep run", standalone_mode=False)
    except click.ClickException as e:
        raise ConfigError("evenstep.run", e.format_message()) from None
    if code:
        raise RunFailedError(int(code))


def as_flags(options: dict[str, Option]) -> list[str]:
    """Options as the command line spells them."""
    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.rstrip('_').replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else []
        elif isinstance(value, str | int | float | Path):
            flags += [f"{flag}={value}"]
        else:
            flags += [f"{flag}={each}" for each in value]
    return flags


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
