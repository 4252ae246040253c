"""Utility against cost: is finishing earlier worth the extra cost of a larger cluster?"""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

import msgspec

from evenstep.errors import ConfigError
from evenstep.ports import JobView, SizeRecord


class Utility(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The larger size pays off while it adds more utility than cost.

    Utility is a function of the job's total time, in the currency of the workers' prices:
    `linear` "y0,x0" falls from y0 at 0 s to 0 at x0 seconds and keeps falling; `step`
    "value:end,value:end,..." holds the first value until its end, then is piecewise linear.
    """

    linear: str | float = ""  # float: `points` rejects a lone number, naming the expected form
    step: str | float = ""

    def __post_init__(self) -> None:
        if bool(self.linear) == bool(self.step):
            raise ConfigError(
                "", 'give either linear, as in "100,10800", or step, as in "100:3600,20:7200"'
            )
        self.points(initial_total_s=0.0)

    def worth(self, smaller: SizeRecord, larger: SizeRecord, job: JobView) -> tuple[bool, str]:
        """Pass or fail, and the figures behind it. A job of unknown length never passes."""
        if job.samples_left <= 0:
            return False, "no samples left; set `samples` if the job has a length"
        # Time left does not depend on the batch: n steps of B samples at R samples/s take nB / R.
        small_s = job.samples_left / smaller.samples_per_s
        large_s = job.samples_left / larger.samples_per_s
        points = self.points(initial_total_s=job.initial_total_s)
        small_total_s, large_total_s = job.elapsed_s + small_s, job.elapsed_s + large_s
        utility = value_at(points, large_total_s) - value_at(points, small_total_s)
        # Past cost is sunk at either size: compare the remaining cost only.
        cost = large_s * larger.price_per_s - small_s * smaller.price_per_s
        passed = utility > cost
        return passed, (
            f"utility {utility:+.4g} {'>' if passed else '<='} cost {cost:+.4g}"
            f" (finishes at {large_total_s:.0f} s instead of {small_total_s:.0f} s)"
        )

    def points(self, *, initial_total_s: float) -> tuple[tuple[float, float], ...]:
        """The corners (second, value) of the utility, first at 0 s; linear between and beyond.

        A step utility gets a last corner, 0 at `initial_total_s`: finishing no earlier than at the
        first size is worth nothing, finishing later is worth less. As in the published code it is
        omitted if it lies before the user's last end, which then defines the value of lateness.
        """
        if self.linear:
            text = _text(self.linear)
            y0, x0 = _numbers("linear", text, text.split(","), "y0,x0")
            if x0 <= 0:
                raise ConfigError("linear", f"x0 must be above 0 s, got {x0:g}")
            if y0 < 0:
                raise ConfigError("linear", f"must not rise: y0 must be 0 or more, got {y0:g}")
            return (0.0, y0), (x0, 0.0)
        corners: list[tuple[float, float]] = []
        text = _text(self.step)
        for part in text.split(","):
            value, end_s = _numbers("step", text, part.split(":"), "value:end,value:end")
            corners.append((end_s, value))
        if corners[0][0] < 0:
            raise ConfigError("step", f"ends must not be negative, got {corners[0][0]:g}")
        for (end_s, value), (later_s, next_value) in pairwise(corners):
            if later_s <= end_s:
                raise ConfigError("step", f"ends must increase, got {later_s:g} after {end_s:g}")
            if next_value > value:
                raise ConfigError("step", f"must not rise: {value:g}, then {next_value:g}")
        last_s, last = corners[-1]
        if last < 0:
            raise ConfigError("step", f"must not rise: {last:g}, then 0 at the end")
        if corners[0][0] > 0:
            corners.insert(0, (0.0, corners[0][1]))
        if initial_total_s > last_s:
            corners.append((initial_total_s, 0.0))
        return tuple(corners)


def value_at(points: tuple[tuple[float, float], ...], total_s: float) -> float:
    """The utility of a job that takes `total_s`, extrapolated beyond the last corner."""
    value = points[-1][1]  # a single corner is a constant
    for (start_s, start), (end_s, end) in pairwise(points):
        value = start + (total_s - start_s) * (end - start) / (end_s - start_s)
        if total_s < end_s:
            break
    return value


def _text(setting: str | float) -> str:
    return setting if isinstance(setting, str) else f"{setting:g}"


def _numbers(field: str, given: str, parts: list[str], form: str) -> tuple[float, float]:
    try:
        first, second = (float(p) for p in parts)
    except ValueError:
        raise ConfigError(field, f'expected "{form}", got "{given}"') from None
    if not (isfinite(first) and isfinite(second)):
        raise ConfigError(field, f'numbers must be finite, got "{given}"')
    return first, second
