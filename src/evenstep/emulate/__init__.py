"""Uneven hardware on one machine: CPU quotas, interference and device curves, on a schedule.

For the bench, the demo and tests. A user's run never imports it.
"""

from evenstep.emulate.cgroup import Hierarchy, NoQuotaError
from evenstep.emulate.curve import DeviceCurve, DeviceMemoryError
from evenstep.emulate.interference import Interference, InterferenceError
from evenstep.emulate.quota import Quota, sweep
from evenstep.emulate.schedule import (
    Schedule,
    ScheduleRunner,
    h_level,
    omnilearn,
    periodic,
    steady,
    step_change,
)
from evenstep.emulate.throttle import Throttle
from evenstep.emulate.worker_api import line_up, own_throttle
from evenstep.emulate.workers import UnevenRunError, WorkerResult, run_uneven

__all__ = [
    "DeviceCurve",
    "DeviceMemoryError",
    "Hierarchy",
    "Interference",
    "InterferenceError",
    "NoQuotaError",
    "Quota",
    "Schedule",
    "ScheduleRunner",
    "Throttle",
    "UnevenRunError",
    "WorkerResult",
    "h_level",
    "line_up",
    "omnilearn",
    "own_throttle",
    "periodic",
    "run_uneven",
    "steady",
    "step_change",
    "sweep",
]
