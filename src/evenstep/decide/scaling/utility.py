"""Utility against cost: is finishing earlier worth what the larger cluster costs more?"""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

import msgspec

from evenstep.errors import ConfigError
from evenstep.ports import JobView, SizeRecord


class Utility(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The larger size is worth it while it adds more utility than cost.

    Utility is a function of the job's total time, in the currency of the workers' prices:
    `linear` "y0,x0" falls from y0 at once to 0 at x0 seconds and goes on falling; `step`
    "value:end,value:end,..." holds the first value until its end, then joins the points by lines.
    """

    linear: str | float = ""  # a lone number is refused by `points`, with the form it expects
    step: str | float = ""

    def __post_init__(self) -> None:
        if bool(self.linear) == bool(self.step):
            raise ConfigError(
                "", 'give either linear, as in "100,10800", or step, as in "100:3600,20:7200"'
            )
        self.points(initial_total_s=0.0)

    def worth(self, smaller: SizeRecord, larger: SizeRecord, job: JobView) -> tuple[bool, str]:
        """Pass or fail, and the figures it rests on. Without a known length nothing passes."""
        if job.samples_left <= 0:
            return False, "no samples left to weigh; set `samples` if the job has a length"
        # With n steps of batch B to go, n * B / R is samples_left / R at any batch.
        small_s = job.samples_left / smaller.samples_per_s
        large_s = job.samples_left / larger.samples_per_s
        points = self.points(initial_total_s=job.initial_total_s)
        small_total_s, large_total_s = job.elapsed_s + small_s, job.elapsed_s + large_s
        utility = value_at(points, large_total_s) - value_at(points, small_total_s)
        # What has been spent is spent at either size: only the rest of the job costs differently.
        cost = large_s * larger.price_per_s - small_s * smaller.price_per_s
        passed = utility > cost
        return passed, (
            f"utility {utility:+.4g} {'>' if passed else '<='} cost {cost:+.4g}"
            f" (done at {large_total_s:.0f} s instead of {small_total_s:.0f} s)"
        )

    def points(self, *, initial_total_s: float) -> tuple[tuple[float, float], ...]:
        """The corners (second, value) of the utility, first at 0 s; lines between and beyond.

        A step utility gets a last corner, 0 at `initial_total_s`: what the job would take at its
        first size earns nothing, and later is worse. It is left out if it lies before the user's
        last end, as in the published code: the user has then said what lateness is worth.
        """
        if self.linear:
            told = _text(self.linear)
            y0, x0 = _numbers("linear", told, told.split(","), "y0,x0")
            if x0 <= 0:
                raise ConfigError("linear", f"x0 must be above 0 s, got {x0:g}")
            if y0 < 0:
                raise ConfigError("linear", f"rises with time: y0 must not be negative, got {y0:g}")
            return (0.0, y0), (x0, 0.0)
        corners: list[tuple[float, float]] = []
        told = _text(self.step)
        for part in told.split(","):
            value, end_s = _numbers("step", told, part.split(":"), "value:end,value:end")
            corners.append((end_s, value))
        if corners[0][0] < 0:
            raise ConfigError("step", f"ends must not be negative, got {corners[0][0]:g}")
        for (end_s, value), (later_s, next_value) in pairwise(corners):
            if later_s <= end_s:
                raise ConfigError("step", f"ends must increase, got {later_s:g} after {end_s:g}")
            if next_value > value:
                raise ConfigError("step", f"rises with time: {next_value:g} after {value:g}")
        last_s, last = corners[-1]
        if last < 0:
            raise ConfigError("step", f"rises with time: {last:g}, then 0 at the initial total")
        if corners[0][0] > 0:
            corners.insert(0, (0.0, corners[0][1]))
        if initial_total_s > last_s:
            corners.append((initial_total_s, 0.0))
        return tuple(corners)


def value_at(points: tuple[tuple[float, float], ...], total_s: float) -> float:
    """The utility of a job that takes `total_s`; beyond the last corner its last line goes on."""
    value = points[-1][1]  # a lone corner is a constant
    for (start_s, start), (end_s, end) in pairwise(points):
        value = start + (total_s - start_s) * (end - start) / (end_s - start_s)
        if total_s < end_s:
            break
    return value


def _text(told: str | float) -> str:
    return told if isinstance(told, str) else f"{told:g}"


def _numbers(field: str, given: str, parts: list[str], form: str) -> tuple[float, float]:
    try:
        first, second = (float(p) for p in parts)
    except ValueError:
        raise ConfigError(field, f'expected "{form}", got "{given}"') from None
    if not (isfinite(first) and isfinite(second)):
        raise ConfigError(field, f'numbers must be finite, got "{given}"')
    return first, second
