"""Whether a run on several workers did what the run alone did: evidence in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, sqrt

import numpy as np

from evenstep.types import FloatArray
from evenstep.verify.records import Gradients, Record

SHOWN = 3
TINY = 1e-300
ABOUT = 0.2  # near enough to name a cause

TOLERANCE = {"torch.float64": 1e-10, "torch.float32": 1e-4}
COARSE = 5e-2  # half precision, of the parameters or by autocast

SMALL = 0.1
"""Of the whole gradient's length: what is shorter may be mostly rounding, and is held to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was compared. `agree` is None where it could not be."""

    about: str
    agree: bool | None
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far the gradients of a step are apart."""

    error: float  # relative, of the parameter that is furthest off
    parameter: str
    length: float  # of the first run's gradient
    ratio: float  # of the second run's gradient along the first's, to that length


def judge_data(alone: Record, together: Sequence[Record]) -> Finding:
    """Whether the workers trained on the samples of the run alone, each of them once."""

    def found(told: str, agree: bool = False) -> Finding:
        return Finding(about="data", agree=agree, told=told)

    if not alone.steps:
        return found("the script ended without a step. Loop over session.loader(...).")
    for rank, record in enumerate(together):
        if len(record.steps) != len(alone.steps):
            return found(f"worker {rank} took {len(record.steps)} steps, alone {len(alone.steps)}")
    for step, expected in enumerate(alone.steps):
        parts = [record.steps[step].samples for record in together]
        wanted = Counter(index for index, _ in expected.samples)
        got = Counter(index for part in parts for index, _ in part)
        if got != wanted:
            lost, extra = sorted((wanted - got).elements()), sorted((got - wanted).elements())
            return found(f"step {step + 1}: {_some(lost)} lost, {_some(extra)} repeated or foreign")
        holds = dict(expected.samples)
        for rank, part in enumerate(parts):
            other = [index for index, digest in part if digest != holds[index]]
            if other:
                return found(
                    f"step {step + 1}: worker {rank} read something else than the run alone for "
                    f"{_some(other)}. Give every worker the same, whole dataset: not its own part "
                    "of it, and nothing drawn without a seed."
                )
    num = sum(len(step.samples) for step in alone.steps)
    first = ", ".join(str(len(record.steps[0].samples)) for record in together)
    return found(
        f"{num} samples, each once and the same as alone; in step 1 shared as {first}", True
    )


def judge_parameters(together: Sequence[Record]) -> Finding:
    """Whether all workers had the same parameters after every step."""
    for step, several in enumerate(zip(*(record.steps for record in together), strict=False)):
        for rank, one in enumerate(several):
            if one.parameters != several[0].parameters:
                told = (
                    f"worker {rank} ended step {step + 1} with others than worker 0. Everything "
                    "that changes them, the learning rate too, must be the same on all workers."
                )
                return Finding(about="parameters", agree=False, told=told)
    return Finding(about="parameters", agree=True, told="equal on all workers after every step")


def judge_gradients(
    alone: Record, together: Sequence[Record], gaps: Sequence[Gap], again: Sequence[Gap] = ()
) -> Finding:
    """Whether each step's reduced gradient was that of the run alone.

    `gaps` are to the run on several workers, `again` to a second run alone with other random
    numbers: what differs there has nothing to do with workers.
    """
    limit, dtypes = tolerance(alone), ", ".join(alone.dtypes).replace("torch.", "")
    several = ", ".join(f"{gap.error:.1e}" for gap in gaps)
    told = f"relative error {several} in steps 1 to {len(gaps)}; at most {limit:.0e} for {dtypes}"
    if alone.dropouts:
        told += "; dropout was off"
    if all(gap.length == 0 for gap in gaps):
        told = "all are zero in the run alone: there is nothing to compare"
        return Finding(about="gradients", agree=None, told=told)
    off = [step for step, gap in enumerate(gaps) if not gap.error <= limit]
    if not off:
        return Finding(about="gradients", agree=True, told=told)
    told += f". Most in {gaps[off[0]].parameter}. "
    random = max((gap.error for gap in again), default=0.0)
    if random > limit:
        told += (
            f"But they differ by {random:.1e} between two runs alone too: the script draws at "
            "random, as by functional.dropout, noise or mixing samples. Turn that off to verify "
            "the rest."
        )
        return Finding(about="gradients", agree=None, told=told)
    return Finding(about="gradients", agree=False, told=told + _why(alone, together, gaps))


def tolerance(record: Record) -> float:
    """The relative error that the coarsest precision in use explains."""
    return max((TOLERANCE.get(dtype, COARSE) for dtype in record.dtypes), default=COARSE)


def gap(alone: Gradients, other: Gradients) -> Gap:
    """How far two gradients are apart. A parameter without one counts as zero."""
    length = sqrt(sum(_dot(g, g) for g in alone.values()))
    errors, along = {}, 0.0
    for name in sorted({*alone, *other}):
        some = alone.get(name, other.get(name))
        assert some is not None
        mine, theirs = alone.get(name, 0 * some), other.get(name, 0 * some)
        off = sqrt(_dot(theirs - mine, theirs - mine))
        errors[name] = off and off / max(sqrt(_dot(mine, mine)), SMALL * length, TINY)
        along += _dot(mine, theirs)
    worst = max(errors, key=lambda name: inf if isnan(errors[name]) else errors[name], default="")
    return Gap(
        error=errors.get(worst, 0.0),
        parameter=worst,
        length=length,
        ratio=along / max(length**2, TINY),
    )


def _why(alone: Record, together: Sequence[Record], gaps: Sequence[Gap]) -> str:
    """The likely cause of gradients that differ, and the way out."""
    if any(isnan(gap.error) for gap in gaps):
        return "There are gradients that are not finite: the script itself may diverge."
    if alone.local_norms:
        some = ", ".join(alone.local_norms[:SHOWN]) + (" ..." if alone.local_norms[SHOWN:] else "")
        return (
            f"BatchNorm ({some}) sees the statistics of each worker's own share. For those of all: "
            "session.prepare(model, ..., sync_batchnorm=True)."
        )
    ratios = [gap.ratio / _sum_of_squares(together, step) for step, gap in enumerate(gaps)]
    if abs(sum(ratios) / len(ratios) - 1) < ABOUT:
        return (
            "They are as short as those of a loss that is not the mean over the samples it is "
            "given, but a sum, or a sum divided by a fixed batch. Take the mean."
        )
    return (
        "Usual causes: a loss that is no mean over samples (for one over tokens or pixels give "
        "session.loader a weight); statistics over the batch within the model; samples of a "
        "batch left out; random draws from a generator of the script's own."
    )


def _sum_of_squares(together: Sequence[Record], step: int) -> float:
    """Of the workers' fractions of a step: what remains of a sum when it is taken for a mean."""
    shares = [len(record.steps[step].samples) for record in together]
    return sum((share / sum(shares)) ** 2 for share in shares)


def _dot(a: FloatArray, b: FloatArray) -> float:
    return float(np.vdot(a, b))


def _some(indices: Sequence[int]) -> str:
    if not indices:
        return "none"
    more = f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else ""
    return f"sample {', '.join(map(str, indices[:SHOWN]))}{more}"
