"""Uneven hardware on one machine: CPU quotas, interference and device curves, on a schedule."""

from evenstep.emulate.cgroup import Hierarchy, NoQuotaError
from evenstep.emulate.crew import CrewError, Finished, run_uneven
from evenstep.emulate.curve import DeviceCurve, DeviceMemoryError
from evenstep.emulate.follow import Follower
from evenstep.emulate.interference import Interference, InterferenceError
from evenstep.emulate.quota import Quota, sweep
from evenstep.emulate.schedule import Schedule, h_level, omnilearn, periodic, steady, step_change
from evenstep.emulate.throttle import Throttle
from evenstep.emulate.worker import line_up, own_throttle

__all__ = [
    "CrewError",
    "DeviceCurve",
    "DeviceMemoryError",
    "Finished",
    "Follower",
    "Hierarchy",
    "Interference",
    "InterferenceError",
    "NoQuotaError",
    "Quota",
    "Schedule",
    "Throttle",
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
