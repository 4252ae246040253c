"""Start a user's script as a process, `python script args`, that is new or forked from this one.

Importing torch and its compiler takes seconds; a forked process has them from the start.
"""

from __future__ import annotations

import atexit
import gc
import os
import random  # noqa: TID251 - only seeded here: users' scripts draw from it
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from multiprocessing import current_process, set_start_method
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

PRELOADED = (
    "torch._dynamo",  # the first optimizer of a process imports it
    "evenstep.train.join",
)


def start_script(
    script: Path, args: Sequence[str], env: Mapping[str, str], log: Path, *, fork: bool
) -> BaseProcess:
    """Start the script with this environment; its output goes to `log`."""
    if fork:
        _preload()
    kind = ForkProcess if fork else SpawnProcess
    process = kind(target=_run, args=(script, list(args), dict(env), log))
    process.start()
    return process


@cache
def _preload() -> None:
    """Import what scripts need. No operation of torch: its threads do not survive a fork."""
    for module in PRELOADED:
        import_module(module)
    gc.freeze()  # so that garbage collection in forked processes does not copy these pages


def _run(script: Path, args: list[str], env: dict[str, str], log: Path) -> None:
    """In the new process: become the script."""
    atexit._clear()  # what this process would run at its end is not the script's
    if "torch" in sys.modules:
        _be_distinct(env)
    os.environ.clear()
    os.environ.update(env)
    _redirect(log)
    current_process().name = "MainProcess"
    set_start_method(None, force=True)  # the script may choose
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__file__ = str(script.absolute())
    try:
        exec(compile(script.read_bytes(), main.__file__, "exec", dont_inherit=True), main.__dict__)
    except Exception as e:
        trace = e.__traceback__ and e.__traceback__.tb_next  # without the frame of this function
        sys.excepthook(type(e), e.with_traceback(trace), trace)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _redirect(log: Path) -> None:
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _be_distinct(env: Mapping[str, str]) -> None:
    """Undo what a forked process shares with its siblings."""
    random.seed()
    sys.modules["numpy"].random.seed()
    threads = env.get("OMP_NUM_THREADS")
    if threads and threads != os.environ.get("OMP_NUM_THREADS"):  # which torch has read
        sys.modules["torch"].set_num_threads(int(threads))
