"""Breaks the code in one place at a time and checks that tests fail: `make mutants`.

Each mutant is a file, a piece of its code, the replacement, and the tests that should fail. It is
applied to a copy of the repository. A survivor is a gap in the tests, or equivalent code; survivors
are listed at the end. Not part of `make test`: a mutant that hangs takes 2 * BOUND_S.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BOUND_S = 120  # a mutant may hang: that counts as a failure
TRAIN, COORDINATE, DECIDE, PAGE = (
    f"src/evenstep/{verb}/" for verb in ("train", "coordinate", "decide", "page")
)

OBSERVE, LAUNCH = "src/evenstep/observe/", "src/evenstep/launch/"

RECOVERY, LOOPS = "tests/faults/test_recovery.py", "tests/faults/test_loops.py"
CHANGES, SCALING = "tests/faults/test_changes.py", "tests/faults/test_scaling.py"


class Mutant(NamedTuple):
    """One way to break the code, and the tests that should fail."""

    path: str
    code: str
    becomes: str
    tests: str  # paths, and optionally a selection: "path -k words"


MUTANTS = [
    # Launchers: what is asked of an engine twice, given up too early, or told wrongly.
    Mutant(
        LAUNCH + "requests.py",
        "doubtful=not r.asked,",
        "doubtful=False,",
        "tests/launch/test_requests.py",
    ),
    Mutant(
        LAUNCH + "requests.py",
        "request.in_flight or request.changed_s >= began_s:",
        "request.in_flight:",
        "tests/launch/test_requests.py",
    ),
    Mutant(
        LAUNCH + "requests.py",
        "for w, r in self.open.items() if not r.asked}",
        "for w, r in self.open.items() if not r.runs}",
        "tests/launch/test_requests.py",
    ),
    Mutant(
        LAUNCH + "requests.py",
        "stopping=not (wanted or runs))",
        "stopping=not wanted)",
        "tests/launch/test_requests.py",
    ),
    Mutant(
        LAUNCH + "remote.py",
        "final = isinstance(error, LaunchRefusedError)",
        "final = True",
        "tests/launch/test_remote.py",
    ),
    Mutant(
        LAUNCH + "engines/slurm.py",
        "if state in ENDED_BY_SLURM and code != TEMPFAIL:",
        "if state in ENDED_BY_SLURM:",
        "tests/launch/engines/test_slurm.py",
    ),
    Mutant(
        COORDINATE + "liveness.py",
        "if started_s is None or queued or d.is_in",
        "if started_s is None or d.is_in",
        "tests/coordinate/test_engines.py",
    ),
    # The page: who is let in, who may command, and whom it hangs up on.
    Mutant(PAGE + "guard.py", "if role is None:", "if False:", "tests/page/test_access.py"),
    Mutant(
        PAGE + "guard.py",
        "if not is_own_host(",
        "if False and not is_own_host(",
        "tests/page/test_access.py -k name",
    ),
    Mutant(
        PAGE + "access.py",
        "return Role.READ if keys.role_of_key(key.strip()) else None",
        "return keys.role_of_key(key.strip())",
        "tests/page/test_commands.py",
    ),
    Mutant(
        PAGE + "access.py",
        "if not same(headers.get(CSRF_HEADER",
        "if False and not same(headers.get(CSRF_HEADER",
        "tests/page/test_commands.py",
    ),
    Mutant(
        PAGE + "access.py",
        'if urlsplit(headers.get("origin", "")).netloc != host:',
        "if False:",
        "tests/page/test_commands.py",
    ),
    Mutant(
        PAGE + "server.py",
        "if self._request_timer is None:",
        "if False:",
        "tests/page/test_bounds.py -k request",
    ),
    # Loops that count by themselves are refused.
    Mutant(
        TRAIN + "optimizer_settings.py",
        "            self._compare(settings)",
        "            pass",
        f"{LOOPS} -k counts_a_repeated_batch",
    ),
    Mutant(
        TRAIN + "exchange.py",
        "            check_settings(step.number, reports)",
        "            pass",
        "tests/train/test_counting.py -k learning_rates",
    ),
    Mutant(
        TRAIN + "exchange.py",
        "            self._settings.warn_if_begun_anew()",
        "            pass",
        "tests/faults/test_resumed_counters.py",
    ),
    Mutant(
        TRAIN + "between_steps.py",
        "            check_not_sharded_since(self._job.model.module)",
        "            pass",
        "tests/train/test_wrong_use.py -k sharded_after",
    ),
    Mutant(
        "src/evenstep/adapters/lightning/progress.py",
        "                    setattr(callback, name, value)",
        "                    pass",
        "tests/adapters/test_joins.py -m long -k first_batch",
    ),
    Mutant(
        TRAIN + "roster/elastic.py",
        "        if self._move_to and in_loop and not step.num_unused:",
        "        if self._move_to and in_loop:",
        "tests/adapters/test_joins.py -m long -k ema",
    ),
    Mutant(
        TRAIN + "data/loader.py",
        " and not self._roster.is_ending:",
        ":",
        "tests/train/test_void.py -k lease_that_ends",
    ),
    # A void step: everything is rolled back, nothing of it is kept.
    Mutant(
        TRAIN + "recover/rollback.py",
        "            torch._foreach_copy_(self._buffers, self._saved_buffers)",
        "            pass",
        f"{RECOVERY} -k bucket",
    ),
    Mutant(
        TRAIN + "recover/rollback.py",
        "            torch._foreach_copy_(self._saved_buffers, self._buffers)",
        "            pass",
        f"{RECOVERY} -k bucket",
    ),
    Mutant(
        TRAIN + "recover/rollback.py",
        "        if step.num_unused or self._is_overtaken:  # gradients",
        "        if self._is_overtaken:  # gradients",
        f"{LOOPS} -k accumulate",
    ),
    Mutant(
        TRAIN + "recover/rollback.py",
        "            undo.step_is_void(self._step.number)\n",
        "            pass\n",
        "tests/train/recover/test_rollback.py",
    ),
    Mutant(
        TRAIN + "recover/rollback.py",
        "        step.num_unused = self.num_unused_before\n",
        "",
        f"tests/train/test_void.py {LOOPS} -k alternate or accumulating",
    ),
    Mutant(
        TRAIN + "recover/rollback.py",
        "        return self._seen or (self._several and self._batches_left > 0)",
        "        return False",
        f"{LOOPS} -k alternate",
    ),
    Mutant(
        TRAIN + "optimizers.py",
        "        if self._step.is_discarded:\n            return None\n",
        "",
        f"{RECOVERY} -k bucket",
    ),
    Mutant(
        TRAIN + "optimizers.py",
        "        if self._step.is_discarded:\n",
        "        if self._step.is_void:\n",
        "tests/faults/test_loops.py -k miss_a_result",
    ),
    Mutant(
        TRAIN + "exchange.py",
        "            self._updates.check(reports)\n",
        "            pass\n",
        "tests/train/test_counting.py",
    ),
    Mutant(
        TRAIN + "updates.py",
        "            if change != UNCHANGED:",
        "            if False:",
        "tests/faults/test_loops.py -k before_it_goes_wrong",
    ),
    Mutant(
        TRAIN + "updates.py",
        "self.windows.updated(id(scheduler), SCHEDULER)",
        "pass",
        "tests/faults/test_loops.py -k before_it_goes_wrong",
    ),
    Mutant(
        TRAIN + "roster/catch_up.py",
        "Situation(step.num_unused > 0 or is_amid,",
        "Situation(step.num_unused > 0,",
        "tests/faults/test_loops.py -k miss_a_result",
    ),
    Mutant(
        TRAIN + "recover/rollback.py",
        "        step.num_reduced, step.reduced_in, step.num_sums = self._counts_before\n",
        "",
        "tests/train/recover/test_rollback.py",
    ),
    Mutant(
        TRAIN + "roster/departure.py",
        "        if interrupts or step.has_batch or step.is_void:\n",
        "        if interrupts or step.has_batch:\n",
        "tests/train/test_void.py",
    ),
    Mutant(
        TRAIN + "roster/departure.py",
        "not rollback.is_past_reduction and rollback.is_possible",
        "not rollback.is_past_reduction",
        "tests/train/test_void.py",
    ),
    # Workers that are behind get the state of those that are ahead.
    Mutant(
        TRAIN + "roster/catch_up.py",
        "    newest = max(ages)",
        "    newest = min(age for age in ages if age[0] >= 0 or max(ages)[0] < 0)",
        "tests/train/roster/test_catch_up.py",
    ),
    Mutant(
        TRAIN + "roster/catch_up.py",
        "    missing_sum = tuple(rank for rank in sources if positions[rank].sums < position.sums)",
        "    missing_sum = ()",
        "tests/train/roster/test_catch_up.py",
    ),
    Mutant(
        TRAIN + "roster/catch_up.py",
        "            job.load_plain_state(state.plain)\n",
        "",
        f"{CHANGES} -k joins",
    ),
    Mutant(
        TRAIN + "roster/elastic.py",
        "        while step.num_sums < wanted:",
        "        for _ in range(1):",
        f"{RECOVERY} -k epoch",
    ),
    Mutant(
        TRAIN + "session.py",
        "        if self._roster.is_late:\n            return 0, length\n",
        "",
        f"{LOOPS} -k joins_later",
    ),
    Mutant(
        TRAIN + "data/loader.py",
        "        if self.epoch != loop.epoch:\n            loop.is_over = True",
        "        if False:\n            loop.is_over = True",
        f"{SCALING} -k spare",
    ),
    # Gradients and data.
    Mutant(
        TRAIN + "reduce/reducer.py",
        "        return self._step.batch.weight / self._step.batch.total",
        "        return 1.0",
        "tests/train/test_exact.py",
    ),
    Mutant(
        TRAIN + "exchange.py",
        "        return step.batch.total / total if total > 0 else 0.0, used",
        "        return 1.0, used",
        "tests/train/test_loop.py",
    ),
    Mutant(
        TRAIN + "data/loader.py",
        "            self.cursor, self._index = max(self.cursor, end), ",
        "            self.cursor, self._index = end - (self.cursor > 0), ",
        f"{RECOVERY} -k forward",
    ),
    Mutant(
        TRAIN + "data/loader.py",
        "        if generation != loop.cut_for:",
        "        if not loop.cut_for:",
        f"{RECOVERY} -k forward",
    ),
    Mutant(
        TRAIN + "data/permutation.py",
        "            low = low ^ (_mix(high ^ key) & low_mask)",
        "            low = low ^ (_mix(low ^ key) & low_mask)",
        "tests/train/data/test_permutation.py",
    ),
    Mutant(
        TRAIN + "data/sampled.py",
        "                part.generator = torch.Generator().manual_seed(seed)",
        "                pass",
        "tests/train/data/test_sampled.py",
    ),
    Mutant(
        TRAIN + "data/stream.py",
        "        while epoch == self._epoch and self._kept and self._begin < begin:",
        "        while epoch == self._epoch and self._kept and self._begin <= begin:",
        "tests/train/data/test_stream.py",
    ),
    Mutant(
        TRAIN + "data/stream.py",
        "        with self._random.installed():\n            if begin",
        "        if True:\n            if begin",
        "tests/train/data/test_stream.py",
    ),
    Mutant(
        TRAIN + "data/repeated.py",
        "        first = epoch * self.length",
        "        first = 0",
        "tests/train/test_data.py",
    ),
    Mutant(
        TRAIN + "data/loader.py",
        '(digest := state.get("digest")) and',
        "(digest := 0) and",
        "tests/train/test_data.py",
    ),
    Mutant(
        TRAIN + "exchange.py",
        "            _refuse_data(step.number, reports)",
        "            pass",
        "tests/train/test_data.py",
    ),
    Mutant(
        TRAIN + "reduce/reducer.py",
        "                if len(bucket.filled) < len(bucket.params):",
        "                if not bucket.filled:",
        "tests/train/test_exact.py",
    ),
    # Process groups.
    Mutant(
        TRAIN + "comm/group.py",
        "                abort_gloo(box[0], self.rank, self.world)",
        "                pass",
        "tests/train/comm/test_group.py -k aborts",
    ),
    Mutant(
        TRAIN + "roster/generations.py",
        "        if why := self.superseded():\n            raise SupersededError(why)",
        "        pass",
        "tests/train/roster/test_generations.py",
    ),
    Mutant(
        TRAIN + "roster/generations.py",
        "return self.control.newest_unplanned if self.generation else",
        "return self.control.newest_unplanned if self.has_trained else",
        "tests/train/roster/test_generations.py",
    ),
    Mutant(
        TRAIN + "roster/control.py",
        "        if not progress.waiting:\n            self._to_resend.pop(Stuck, None)",
        "        self._to_resend.pop(Stuck, None)",
        "tests/train/roster/test_control.py -k stuck",
    ),
    # The last checkpoint of a run.
    Mutant(
        TRAIN + "roster/checkpointing.py",
        "        if not self.is_active or self._saved_step == step.number:",
        "        if True:",
        f"{CHANGES} -k end_of_training",
    ),
    Mutant(
        TRAIN + "recover/checkpoint.py",
        "        intact = check == _checksum(structure, tensors)",
        "        intact = True",
        "tests/train/recover/test_checkpoint.py",
    ),
    # Membership.
    Mutant(
        COORDINATE + "roster.py",
        "    if joiners := _defer_joiners(d):",
        "    if joiners := ():",
        f"tests/coordinate {CHANGES}",
    ),
    Mutant(
        COORDINATE + "roster.py",
        "        d.processes[worker] = replace(d.process(worker), lost=True)\n",
        "",
        "tests/coordinate",
    ),
    Mutant(
        COORDINATE + "liveness.py",
        "now_s - c.heard_s > silent_s}",
        "now_s - c.heard_s > 1e9}",
        f"tests/coordinate/test_overdue.py {CHANGES} -k silent or stopped",
    ),
    Mutant(
        COORDINATE + "announce.py",
        "replace(member, state=WorkerState.LEAVING, leaves_because=why)",
        "replace(member, leaves_because=why)",
        f"{CHANGES} -k sigterm",
    ),
    Mutant(
        COORDINATE + "draft.py",
        '        return next((w for w in roster if w in able), "")',
        '        return ""',
        f"{CHANGES} -k paused",
    ),
    Mutant(
        COORDINATE + "exits.py",
        "        return Meaning.REPLACE\n",
        "        return Meaning.FINE\n",
        f"{CHANGES} -k few",
    ),
    Mutant(
        COORDINATE + "membership.py",
        "    d.finished[member.id] = step\n",
        "",
        "tests/cli/test_run.py -k run_on",
    ),
    # Lost workers that may train on, and numbers that were told.
    Mutant(
        COORDINATE + "roster.py",
        "    if rosters:\n        until_s",
        "    if False:\n        until_s",
        "tests/coordinate/test_doubt.py",
    ),
    Mutant(
        COORDINATE + "takeover.py",
        "        d.doubts = dict.fromkeys(event.lost, doubt)",
        "        pass",
        "tests/coordinate/test_doubt.py",
    ),
    Mutant(
        COORDINATE + "takeover.py",
        "MAX_END_ANNOUNCEMENTS = 2",
        "MAX_END_ANNOUNCEMENTS = 0",
        "tests/coordinate/test_takeover.py",
    ),
    Mutant(
        COORDINATE + "liveness.py",
        "        if link <= present and",
        "        if link <= d.members.keys() and",
        "tests/coordinate/test_liveness.py",
    ),
    Mutant(
        COORDINATE + "takeover.py",
        "    lease_s = max(d.terms.lease_s, event.lease_s)",
        "    lease_s = d.terms.lease_s",
        "tests/coordinate/test_term.py",
    ),
    Mutant(
        COORDINATE + "service.py",
        "case ev.Send(message=Lease()) if self._claim_problem:",
        "case ev.Send(message=Lease()) if False:",
        "tests/coordinate/test_term.py",
    ),
    Mutant(
        TRAIN + "recover/checkpoint.py",
        "            self._check_fence()  # again",
        "            pass  # again",
        "tests/train/roster/test_run_fence.py",
    ),
    Mutant(
        COORDINATE + "takeover.py",
        "    elif behind and d.joiners():",
        "    elif False:",
        "tests/coordinate",
    ),
    Mutant(
        COORDINATE + "roster.py",
        "d.put(replace(spare, begun=False, reachable=False))",
        "d.put(replace(spare, begun=True, reachable=False))",
        f"tests/coordinate/test_spares.py {SCALING} -k spare",
    ),
    # Whom clients trust.
    Mutant(
        COORDINATE + "client.py",
        "        if encrypted.fingerprint != fingerprint:",
        "        if False:",
        "tests/coordinate/test_tls.py",
    ),
    # Decisions.
    Mutant(
        DECIDE + "split.py",
        "                return water_fill(batch, low, high)  # all",
        "                return high  # all",
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
    # Hosts that shard their model: weighted within the host, and its processes act as one.
    Mutant(
        TRAIN + "reduce/reduce_scatter.py",
        "            input_tensor.mul_(weight)",
        "            input_tensor.mul_(1 / self._size)",
        "tests/adapters/test_hsdp.py -k uneven",
    ),
    Mutant(
        TRAIN + "comm/host.py",
        "        distributed.all_reduce(worst, distributed.ReduceOp.MAX)\n",
        "",
        "tests/adapters/test_hsdp.py -m long -k what_one_process",
    ),
    # Sinks: nobody waits for them, and each tells of itself once.
    Mutant(
        OBSERVE + "feed.py",
        "                self._waiting.popleft()\n",
        "                pass\n",
        "tests/observe/test_feed.py -k hangs",
    ),
    Mutant(
        OBSERVE + "feed.py",
        "self._thread.join(within_s)",
        "self._thread.join()",
        "tests/observe/test_feed.py -k hangs",
    ),
    Mutant(
        OBSERVE + "feed.py",
        "is_news, self._is_reported = not self._is_reported, True",
        "is_news = True",
        "tests/observe/test_feed.py -k raises",
    ),
    Mutant(
        OBSERVE + "feed.py",
        "except BaseException as e:",
        "except ValueError as e:",
        "tests/observe/test_feed.py -k raises",
    ),
    Mutant(
        OBSERVE + "feed.py",
        '                self._problem = ""',
        "                pass",
        "tests/observe/test_feed.py -k tenth",
    ),
    Mutant(
        OBSERVE + "sinks/tensorboard.py",
        "            self._add(self._event(wall_time=unix_s, step=step, session_log=start))\n",
        "            pass\n",
        "tests/observe/sinks/test_files.py -k repeats",
    ),
    Mutant(
        OBSERVE + "sinks/json_lines.py",
        "                os.ftruncate(self._file, end)",
        "                pass",
        "tests/observe/sinks/test_files.py -k resumed",
    ),
    Mutant(
        TRAIN + "join.py",
        "sinks if place.rank == 0 and probe is None else ()",
        "sinks",
        "tests/train/plan/test_figures.py -k only_rank_0",
    ),
    Mutant(
        COORDINATE + "service.py",
        "            *self._sinks.problems,\n",
        "",
        "tests/cli/test_sinks.py -k says_it_once",
    ),
]


def main(*words: str) -> int:
    """Run the mutants whose path or tests contain one of the words. Returns the survivors."""
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
        for name in ("src", "bench", "tests", "examples", "scenarios", "pyproject.toml"):
            source = ROOT / name
            copy_of = shutil.copytree if source.is_dir() else shutil.copy
            copy_of(source, copy / name)
        (copy / mutant.path).write_text(code.replace(mutant.code, mutant.becomes, 1))
        noticed = not _passes(copy, mutant.tests)
    print(f"{'noticed ' if noticed else 'SURVIVES'} {mutant.path}: {mutant.tests}", flush=True)
    return noticed


def _passes(copy: Path, tests: str) -> bool:
    """Whether tests pass on a copy, which child processes import too."""
    paths, _, words = tests.partition(" -k ")
    selected = ["-k", words] if words else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"--timeout={BOUND_S}"]
    env = {"PATH": "/usr/bin:/bin:/usr/sbin", "HOME": str(copy)}
    env["PYTHONPATH"] = f"{copy / 'src'}:{copy}"
    with (copy / "output").open("w+") as output:
        process = subprocess.Popen(
            [*command, *paths.split(), *selected],
            cwd=copy,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(2 * BOUND_S)
        except subprocess.TimeoutExpired:  # pytest's timeout cannot end a thread that hangs
            code = 1
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        assert code in (0, 1), output.read()
    return code == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
