"""A script that `verify` starts, in a new or a forked process, runs as `python script` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.verify.process import start_script

FACTS = """
import atexit, multiprocessing, os, pickle, sys
import beside
class Mine: pass
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
print(__name__, __file__, __package__, __spec__, sys.argv, sys.path[0], beside.name)
print(sorted(os.environ.items()), multiprocessing.current_process().name)
multiprocessing.set_start_method("spawn")
atexit.register(print, "at exit")
print("to stderr", file=sys.stderr)
"""
WORKER = """
import multiprocessing
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
"""
ENDS = {
    "an end": "",
    "a code": "raise SystemExit(3)",
    "a text": "import sys; sys.exit('said')",
    "an error": "def f(): raise ValueError('mine')\nf()",
    "no syntax": "a b",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "a hook": "import sys; sys.excepthook = lambda *_: print('hooked')\n1 / 0",
    "a future": "from __future__ import annotations\nx: nowhere = 1\nprint(__annotations__)",
    "no future": "x: nowhere = 1",
}


def run(folder: Path, source: str, *args: str, fork: bool | None) -> tuple[int | None, list[str]]:
    """The exit code and the output of a script; `fork` None: as Python itself runs it."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(source)
    (folder / "beside.py").write_text("name = 'beside'")
    env = {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8", "ONLY": "this"}
    if fork is None:
        with log.open("wb") as out:
            command = [sys.executable, str(script), *args]
            code: int | None = subprocess.run(
                command, env=env, stdout=out, stderr=out, check=False
            ).returncode
    else:
        process = start_script(script, args, env, log, fork=fork)
        process.join(300)
        code = process.exitcode
    return code, sorted(log.read_text().splitlines())


@pytest.mark.parametrize("source", [FACTS, WORKER, *ENDS.values()], ids=["facts", "pool", *ENDS])
def test_a_script_runs_and_ends_as_under_python(tmp_path: Path, source: str) -> None:
    expected = run(tmp_path, source, "-x", "1", fork=None)
    assert run(tmp_path, source, "-x", "1", fork=True) == expected
    assert run(tmp_path, source, "-x", "1", fork=False) == expected


def test_unseeded_numbers_differ_between_forked_processes(tmp_path: Path) -> None:
    source = "import random, numpy; print(random.random(), numpy.random.rand())"
    (_, [first]), (_, [second]) = (run(tmp_path, source, fork=True) for _ in range(2))
    assert not set(first.split()) & set(second.split())


def test_threads_are_those_of_the_environment(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import torch; print(torch.get_num_threads())")
    process = start_script(script, [], {"OMP_NUM_THREADS": "3"}, log, fork=True)
    process.join(300)
    assert log.read_text() == "3\n"
