"""Breaks the code in one place at a time and sees that tests fail: `make mutants`.

Each mutant is a file, a piece of it, what it becomes, and tests that protect it. It is applied to
a copy of the repository. A survivor is a gap in the tests, or equivalent code; it is named at the
end. Not part of `make test`: mutants that hang are only noticed after BOUND_S.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BOUND_S = 300  # a mutant may hang: that is found out too
TRAIN, COORDINATE, DECIDE = (f"src/evenstep/{room}/" for room in ("train", "coordinate", "decide"))

RECOVERY, LOOPS = "tests/faults/test_recovery.py", "tests/faults/test_loops.py"
CHANGES, SCALING = "tests/faults/test_changes.py", "tests/faults/test_scaling.py"


class Mutant(NamedTuple):
    """One way to break the code, and who should notice."""

    path: str
    code: str
    becomes: str
    tests: str  # a path, and optionally what to select: "path -k words"


MUTANTS = [
    # A void step: everything is put back, nothing of it is kept.
    Mutant(
        TRAIN + "guard.py",
        "            torch._foreach_copy_(self._buffers, self._kept)",
        "            pass",
        f"{RECOVERY} -k bucket",
    ),
    Mutant(
        TRAIN + "regroup.py",
        "        self._at, self._batches_since_step = self._before\n",
        "        self._at = self._before[0]\n",
        f"{LOOPS} -k turns",
    ),
    Mutant(
        TRAIN + "regroup.py",
        "        if self._in_hand or self.void:\n",
        "        if self._in_hand:\n",
        "tests/train/test_void.py",
    ),
    Mutant(
        TRAIN + "regroup.py",
        "self._is_reduced or not self._can_roll_back",
        "self._is_reduced",
        "tests/train/test_void.py",
    ),
    Mutant(
        TRAIN + "guard.py",
        "        return None if void() else step(*args, **kwargs)",
        "        return step(*args, **kwargs)",
        f"{RECOVERY} -k bucket",
    ),
    Mutant(
        TRAIN + "guard.py",
        "            torch._foreach_copy_(self._kept, self._buffers)",
        "            pass",
        f"{RECOVERY} -k bucket",
    ),
    Mutant(
        TRAIN + "guard.py",
        "        if accumulating:\n",
        "        if False:\n",
        f"{LOOPS} -k accumulate",
    ),
    Mutant(
        TRAIN + "guard.py",
        "        return self._seen or (self._num_optimizers > 1 and self._left > 0)",
        "        return False",
        f"{LOOPS} -k turns",
    ),
    # The state of those ahead goes to those behind.
    Mutant(
        TRAIN + "position.py",
        "    furthest = max((row[1] for row in rows if row[0]), default=-1)",
        "    furthest = min((row[1] for row in rows if row[0]), default=-1)",
        "tests/train/roster/test_position.py",
    ),
    Mutant(
        TRAIN + "regroup.py",
        "            self._take_on(self._state.plain)\n            # In the midst",
        "            # In the midst",
        f"{CHANGES} -k joins",
    ),
    Mutant(
        TRAIN + "position.py",
        "    late = tuple(rank for rank in sources if rows[rank][2] < sums)",
        "    late = ()",
        "tests/train/roster/test_position.py",
    ),
    Mutant(
        TRAIN + "elastic.py",
        "        while self._at.sums < wanted:",
        "        for _ in range(1):",
        f"{RECOVERY} -k epoch",
    ),
    Mutant(
        TRAIN + "elastic.py",
        "        return (0, length) if self._late else part",
        "        return part",
        f"{LOOPS} -k joins_later",
    ),
    # Gradients and data.
    Mutant(
        TRAIN + "stepping.py",
        "        self._reducer.weight = weight / total",
        "        self._reducer.weight = 1 / self.world",
        "tests/train/test_exact.py",
    ),
    Mutant(
        TRAIN + "stepping.py",
        "        return self._report[2] / total if total > 0 else 0.0, used",
        "        return 1.0, used",
        "tests/train/test_loop.py",
    ),
    Mutant(
        TRAIN + "loader.py",
        "            self.cursor = max(self.cursor, end)",
        "            self.cursor += end - self.cursor - (self.cursor > 0)",
        f"{RECOVERY} -k forward",
    ),
    Mutant(
        TRAIN + "loader.py",
        "            if generation != cut_for:",
        "            if not cut_for:",
        f"{RECOVERY} -k forward",
    ),
    Mutant(
        TRAIN + "reduce.py",
        "                if len(bucket.filled) < len(bucket.params):",
        "                if not bucket.filled:",
        "tests/train/test_exact.py",
    ),
    # Groups.
    Mutant(
        TRAIN + "group.py",
        "                _abort_gloo(box[0], self.rank, self.world)",
        "                pass",
        "tests/train/comm/test_group.py -k aborts",
    ),
    Mutant(
        TRAIN + "membership.py",
        "        if why := self.superseded():\n            raise SupersededError(why)",
        "        pass",
        f"{RECOVERY} -k forward",
    ),
    # The last word of a run.
    Mutant(
        TRAIN + "elastic.py",
        "        if not self._saves or self._saved_step == self._next_step:",
        "        if True:",
        f"{CHANGES} -k end_of_training",
    ),
    Mutant(
        TRAIN + "checkpoint.py",
        "    whole = check == _check_sum(plan, tensors)",
        "    whole = True",
        "tests/train/recover/test_checkpoint.py",
    ),
    # Membership.
    Mutant(
        COORDINATE + "changes.py",
        "        if newcomers := self._put_off():",
        "        if newcomers := ():",
        f"tests/coordinate {CHANGES}",
    ),
    Mutant(
        COORDINATE + "changes.py",
        "            self.crew.missed.add(worker)\n",
        "",
        "tests/coordinate",
    ),
    Mutant(
        COORDINATE + "watch.py",
        "now_s - m.heard_s > silent_s}",
        "now_s - m.heard_s > 1e9}",
        f"tests/coordinate/test_watch.py {CHANGES} -k silent or stopped",
    ),
    Mutant(
        COORDINATE + "changes.py",
        "            member.state, member.leaves_because = State.ASKED, why",
        "            member.leaves_because = why",
        f"{CHANGES} -k sigterm",
    ),
    Mutant(
        COORDINATE + "standing.py",
        '        return next((w for w in roster if w in able), "")',
        '        return ""',
        f"{CHANGES} -k paused",
    ),
    Mutant(
        COORDINATE + "crew.py",
        "            return Meaning.REPLACE\n",
        "            return Meaning.FINE\n",
        f"{CHANGES} -k few",
    ),
    Mutant(
        COORDINATE + "coordinator.py",
        "        self.trained.add(member.id)\n",
        "",
        "tests/cli/test_run.py -k after",
    ),
    Mutant(
        COORDINATE + "takeover.py",
        "        elif behind and self._newcomers():",
        "        elif False:",
        "tests/coordinate",
    ),
    Mutant(
        COORDINATE + "changes.py",
        "member.may_stay = State.SPARE, False, False",
        "member.may_stay = State.SPARE, True, False",
        f"tests/coordinate/test_spares.py {SCALING} -k spare",
    ),
    # Decisions.
    Mutant(
        DECIDE + "split.py",
        "        if surplus < 0:\n",
        "        if surplus <= 0:\n",
        "tests/decide/test_split.py",
    ),
    Mutant(
        DECIDE + "machine.py",
        "    if num < minimum:",
        "    if num <= minimum:",
        "tests/decide",
    ),
    Mutant(
        DECIDE + "machine.py",
        "        launching=max(0, cluster.launching - len(workers)),",
        "        launching=cluster.launching,",
        "tests/decide",
    ),
    Mutant(
        DECIDE + "machine.py",
        "    repeated = event.step <= cluster.furthest_step",
        "    repeated = event.step < cluster.furthest_step",
        "tests/decide tests/simulate",
    ),
    Mutant(
        DECIDE + "scaling/utility.py",
        "        passed = utility > cost",
        "        passed = utility >= cost",
        "tests/decide/test_utility.py",
    ),
    Mutant(
        DECIDE + "straggler.py",
        ".num_under >= min_under]",
        ".num_under > min_under]",
        "tests/decide/test_straggler.py",
    ),
    Mutant(
        DECIDE + "batching/proportional.py",
        "change[i] <= self.dead_band",
        "change[i] <= 0",
        "tests/decide/test_proportional.py",
    ),
]


def main(*words: str) -> int:
    """Try all mutants whose path or tests contain one of the words; how many survive."""
    chosen = [m for m in MUTANTS if not words or any(w in f"{m.path} {m.tests}" for w in words)]
    survivors = [mutant for mutant in chosen if not _is_noticed(mutant)]
    for mutant in survivors:
        print(f"survives: {mutant.path}: {mutant.code.strip()!r} -> {mutant.becomes.strip()!r}")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants noticed")
    return min(len(survivors), 125)


def _is_noticed(mutant: Mutant) -> bool:
    code = (ROOT / mutant.path).read_text()
    assert mutant.code in code, f"{mutant.path} has changed: {mutant.code!r} is not in it"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "examples", "scenarios", "pyproject.toml"):
            source = ROOT / name
            copy_of = shutil.copytree if source.is_dir() else shutil.copy
            copy_of(source, copy / name)
        (copy / mutant.path).write_text(code.replace(mutant.code, mutant.becomes, 1))
        noticed = not _passes(copy, mutant.tests)
    print(f"{'noticed ' if noticed else 'SURVIVES'} {mutant.path}: {mutant.tests}", flush=True)
    return noticed


def _passes(copy: Path, tests: str) -> bool:
    """Whether tests pass on a copy. What is imported there is the copy's, in children too."""
    paths, _, words = tests.partition(" -k ")
    selected = ["-k", words] if words else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"--timeout={BOUND_S}"]
    env = {"PATH": "/usr/bin:/bin:/usr/sbin", "HOME": str(copy)}
    env["PYTHONPATH"] = f"{copy / 'src'}:{copy}"
    done = subprocess.run(
        [*command, *paths.split(), *selected], cwd=copy, env=env, capture_output=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
