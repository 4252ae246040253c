"""Injects faults into a run, each at its moment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bench.chaos.cluster import BOUND_S, ChaosRun, CrashError, HangError, send
from bench.chaos.faults import REGROUP_POINTS, START_POINTS, Fault, method_of
from bench.testbed.live_run import EPOCH_STEPS, POLL_S
from bench.testbed.train import post

PHASES = {
    **dict.fromkeys(REGROUP_POINTS, "regroup"),
    **dict.fromkeys(START_POINTS, "join"),
    "epoch": "epoch end",
    "checkpoint": "checkpoint",
}
"""What goes on at a failpoint; at others, a step."""

CLAIM_S = 10.0  # for a worker to reach a failpoint; then the fault is withdrawn
MOMENT_S = 5.0  # for a moment to come
FULL_STEPS = 3  # trained while the disk is full
NO_ROOM = "term: no room to claim the run (No space left on device)"


class Injector:
    """Performs faults, and ends those that last."""

    def __init__(self, run: ChaosRun) -> None:
        self._run = run

    def inject(self, fault: Fault) -> str:
        """Wait for the fault's moment, and perform it. Returns what it hit, or "" for nothing."""
        run = self._run
        if fault.moment != "at once":
            run.settle(fault.steps)
            self._await_moment(fault)
        time.sleep(fault.delay_s)
        hit = PHASES.get(fault.point, "step") if fault.point else self._phase()
        perform = getattr(self, method_of(fault.kind))
        return hit if perform(fault) is not False else ""

    def _phase(self) -> str:
        """What the run is doing now."""
        if self._run.saves_checkpoint():
            return "checkpoint"
        status = self._run.status()
        if not status or status["state"] in ("starting", "waiting for workers to come back"):
            return "takeover"
        if status["state"] != "training":
            return "regroup"
        if any(w["state"] in ("starting", "ready") for w in status["workers"]):
            return "join"
        return "epoch end" if status["step"] % EPOCH_STEPS == EPOCH_STEPS - 1 else "step"

    def _await_moment(self, fault: Fault) -> None:
        run = self._run
        match fault.moment:
            case "join" if run.hosts is None:
                run.request("scale", num_workers=run.size + 1)
            case "join":
                send(run.roster()[-1:], signal.SIGKILL)  # another one is started
            case "loss":
                send(run.roster()[-1:], signal.SIGKILL)
            case "takeover":
                run.kill_coordinator()
                run.restart()
            case "epoch":
                self._until(lambda: run.status().get("step", 0) % EPOCH_STEPS == EPOCH_STEPS - 1)
            case "checkpoint":
                self._until(run.saves_checkpoint)

    def _until(self, holds: Callable[[], bool], bound_s: float = MOMENT_S) -> None:
        deadline_s = time.monotonic() + bound_s
        while not holds() and time.monotonic() < deadline_s:
            time.sleep(POLL_S / 10)

    def _picked(self, who: float, num: int) -> list[int]:
        """So many workers of the roster, from a fraction of it on."""
        roster = self._run.roster()
        first = int(who * len(roster))
        return [*roster[first:], *roster[:first]][:num]

    # One method per kind.

    def _kill_a_worker(self, fault: Fault) -> None:
        send(self._picked(fault.who, 1), signal.SIGKILL)

    def _kill_the_leader(self, fault: Fault) -> None:
        send(self._run.roster()[:1], signal.SIGKILL)

    def _kill_several(self, fault: Fault) -> None:
        send(self._picked(fault.who, fault.num), signal.SIGKILL)

    def _kill_at_a_point(self, fault: Fault) -> bool:
        ranked = fault.who < 0.5 and fault.point not in START_POINTS
        return self._posted("rank0" if ranked else "any", fault.point, "kill")

    def _exit_early(self, fault: Fault) -> bool:
        return self._posted("any", "forward", "exit")

    def _joiner_fails(self, fault: Fault) -> bool:
        return self._posted("any", fault.point, "raise")

    def _joiner_fails_elsewhere(self, fault: Fault) -> bool:
        self._run.settle(1)
        posted = post(self._run.out, "any", fault.point, "raise")
        self._run.rejoin(1)
        return self._until_claimed(posted)

    def _posted(self, who: str, point: str, action: str) -> bool:
        """Have a worker do something at a failpoint, and the run reach that point."""
        run = self._run
        run.settle(1)
        posted = post(run.out, who, point, action)
        if point in (*REGROUP_POINTS, *START_POINTS):
            if run.hosts is None:
                run.request("scale", num_workers=run.size + 1)
            else:
                send(run.roster()[-1:], signal.SIGKILL)
        return self._until_claimed(posted)

    def _until_claimed(self, posted: Path) -> bool:
        deadline_s = time.monotonic() + CLAIM_S
        while posted.exists():
            if time.monotonic() > deadline_s:
                posted.unlink(missing_ok=True)
                return False
            time.sleep(POLL_S)
        return True

    def _kill_the_coordinator(self, fault: Fault) -> None:
        self._run.kill_coordinator()
        time.sleep(fault.lasts_s)
        self._run.restart()

    def _kill_everybody(self, fault: Fault) -> None:
        self._kill_all()
        self._run.restart()

    def _kill_all(self) -> None:
        pids = self._run.everybody()
        self._run.kill_coordinator()
        send(pids, signal.SIGKILL)

    def _damage_a_file(self, fault: Fault) -> bool:
        if fault.everybody:
            self._kill_all()
        else:
            self._run.kill_coordinator()
        done = damage(self._run.folder, fault)
        self._run.restart()
        return done

    def _stop_a_worker(self, fault: Fault) -> None:
        self._pause(self._picked(fault.who, 1), fault.lasts_s)

    def _stop_the_coordinator(self, fault: Fault) -> None:
        self._pause([self._run.process.pid], min(fault.lasts_s, 5.0))

    def _pause(self, pids: list[int], lasts_s: float) -> None:
        send(pids, signal.SIGSTOP)
        time.sleep(lasts_s)
        send(pids, signal.SIGCONT)

    def _kill_while_another_is_stopped(self, fault: Fault) -> None:
        killed, *stopped = self._picked(fault.who, 2)
        send(stopped, signal.SIGSTOP)  # it must not be taken for dead
        send([killed], signal.SIGKILL)
        self._until(lambda: killed not in self._run.connected())
        send(stopped, signal.SIGCONT)

    def _notice(self, fault: Fault) -> None:
        send(self._picked(fault.who, 1), signal.SIGTERM)

    def _drain(self, fault: Fault) -> bool:
        rows = [w["worker"] for w in self._run.status().get("workers", ()) if w["rank"] is not None]
        return bool(rows) and self._run.request("drain", worker=rows[int(fault.who * len(rows))])

    def _scale(self, fault: Fault) -> None:
        self._run.size = fault.num
        self._run.fill_up()

    def _stop_the_run(self, fault: Fault) -> None:
        run = self._run
        run.settle(1)
        run.ask("stop")
        try:
            code = run.process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            raise HangError("the run does not stop") from None
        if code != 0:
            raise CrashError(f"a run that was asked to stop ended with {code}")
        run.size = fault.num
        run.restart()

    def _full_disk(self, fault: Fault) -> None:
        run = self._run
        assert run.disk is not None
        before = len(run.output())

        def waits_for_room() -> bool:  # to take over: it answers nobody
            return NO_ROOM in run.output()[before:]

        run.disk.fill()
        try:
            if fault.everybody:
                send(self._picked(fault.who, 1), signal.SIGKILL)
            time.sleep(fault.lasts_s)
            self._until(lambda: bool(run.status()) or waits_for_room(), BOUND_S)
            if not waits_for_room():
                run.settle(FULL_STEPS)
        finally:
            run.disk.free()

    def _partition(self, fault: Fault) -> None:
        hosts = self._run.hosts
        assert hosts is not None
        cut = int(fault.who * len(hosts))
        hosts.cut(cut)
        time.sleep(fault.lasts_s)
        hosts.restore(cut)

    def _one_way_partition(self, fault: Fault) -> None:
        hosts = self._run.hosts
        assert hosts is not None
        source = int(fault.who * len(hosts))
        target = (source + 1 + int(fault.where * (len(hosts) - 1))) % len(hosts)
        hosts.cut_one_way(source, target)
        time.sleep(fault.lasts_s)
        hosts.restore_one_way(source, target)


def damage(folder: Path, fault: Fault) -> bool:
    """Flip a bit of a file, or cut it off. Of checkpoints, the newest, if another one is there."""
    path = folder / fault.file
    if fault.file == "checkpoint":
        *others, path = [folder, *sorted((folder / "checkpoints").glob("*.pt"))]
        if len(others) < 2:
            return False
    if not path.exists() or not (size := path.stat().st_size):
        return False
    at = int(fault.where * size)
    if fault.torn:
        os.truncate(path, at)
        return True
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))
    return True
