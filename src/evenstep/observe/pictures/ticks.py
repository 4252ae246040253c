"""Round numbers for axes, and how they are written."""

from __future__ import annotations

from math import ceil, floor, log10

STEPS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(60.0, 120.0, 180.0, 300.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0, 7200.0, 10800.0),
    *(14400.0, 21600.0, 28800.0, 43200.0, 86400.0, 172800.0, 432000.0, 864000.0),
)


def time_ticks(begin_s: float, end_s: float, most: int) -> tuple[list[float], str]:
    """Times for an axis, and the unit that `clock` writes them in."""
    wanted = (end_s - begin_s) / max(1, most)
    step = next((s for s in STEPS_S if s >= wanted), STEPS_S[-1] * ceil(wanted / STEPS_S[-1]))
    first = ceil(begin_s / step - 1e-9)
    times = [i * step for i in range(first, floor(end_s / step + 1e-9) + 1)]
    return times, unit(end_s)


def unit(end_s: float) -> str:
    """In which to write times up to this one."""
    if end_s < 120:
        return "s"
    return "min" if end_s < 7200 else "h" if end_s < 4 * 86400 else "days"


def clock(at_s: float, unit: str) -> str:
    """A time of the run's clock: 12.5, 3:25 (min) or 2:05 (h), 1.5 (days)."""
    if unit == "s":
        return f"{at_s:.6g}"
    if unit == "days":
        return f"{at_s / 86400:.9g}"
    part = 60 if unit == "h" else 1
    whole = round(at_s / part * 1000) / 1000
    rest = f"{whole % 60:06.3f}".rstrip("0").rstrip(".") if whole % 1 else f"{whole % 60:02.0f}"
    return f"{int(whole // 60)}:{rest}"


def value_ticks(top: float, most: int = 4) -> list[float]:
    """Round values from 0 up to `top`."""
    if not top > 0:
        return [0.0]
    raw = top / most
    power = 10.0 ** floor(log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    return [i * step for i in range(floor(top / step * 1.001) + 1)]


def short(value: float) -> str:
    """A value on an axis: 0.25, 12, 3,400, 25k, 1.2M."""
    size = abs(value)
    for bound, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= bound:
            return f"{value / (bound if letter != 'k' else 1e3):.4g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A duration: 850 µs, 12.5 ms, 3.2 s, 4:10 min."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{clock(round(value), 'min')} min"
