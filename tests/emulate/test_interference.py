"""Interfering processes: where they run, how much they take, and that they end."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from evenstep.emulate import Interference, InterferenceError
from tests.emulate.conftest import Busy, ends

CORES = sorted(os.sched_getaffinity(0))


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_each_core_has_its_own_process_pinned_there() -> None:
    with Interference(CORES, 0.1) as noise:
        assert [os.sched_getaffinity(pid) for pid in noise.pids] == [{c} for c in CORES]


def test_it_takes_no_more_than_its_duty_and_the_duty_can_change(busy: Busy) -> None:
    wall_s, taken_s = 0.5, []
    with Interference(CORES[-1:], 0.0) as noise:
        (pid,) = noise.pids
        with suppress(PermissionError):  # so that other load takes little from it
            os.setpriority(os.PRIO_PROCESS, pid, -20)
        for duty in (0.0, 0.3, 1.0):
            noise.set(duty)
            before_s = cpu_s(pid)
            busy.cpu_s(wall_s)
            taken_s.append(cpu_s(pid) - before_s)
        assert noise.duty == 1.0
    # Ceilings: a busy machine gives less. CPU times are counted in 10 ms.
    assert taken_s[0] < 0.1 * wall_s
    assert 0 < taken_s[1] < 0.45 * wall_s
    assert taken_s[2] > 0


def test_close_ends_the_processes() -> None:
    noise = Interference(CORES[:1])
    (pid,) = noise.pids
    noise.close()
    noise.close()
    assert ends(pid)
    assert noise.pids == []


@pytest.mark.parametrize("duty", [0.0, 1.0])
def test_the_processes_do_not_outlive_a_killed_owner(duty: float) -> None:
    code = f"""
import os, sys
from evenstep.emulate import Interference
noise = Interference([{CORES[0]}], {duty})
if os.fork() == 0:  # a child that lives on, with all the files its parent had open
    sys.stdin.read()
    os._exit(0)
print(*noise.pids, flush=True)
os.kill(os.getpid(), 9)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert owner.wait() == -9
    assert ends(pid)
    owner.communicate()


def test_a_process_that_has_ended_raises_an_error() -> None:
    with Interference(CORES[:1], 0.1) as noise:
        (pid,) = noise.pids
        psutil.Process(pid).kill()
        assert ends(pid)
        with pytest.raises(InterferenceError, match=f"process {pid} has ended"):
            noise.set(0.5)


def test_an_unknown_core_is_refused_with_the_usable_ones() -> None:
    with pytest.raises(ValueError, match=rf"asked for \[9999\]; usable: {CORES[0]}"):
        Interference([9999])
    with pytest.raises(ValueError, match="asked for none"):
        Interference([])


@pytest.mark.parametrize("duty", [-0.1, 1.1, float("nan")])
def test_a_duty_outside_0_to_1_is_refused(duty: float) -> None:
    with pytest.raises(ValueError, match="duty: must lie in"):
        Interference(CORES[:1], duty)
