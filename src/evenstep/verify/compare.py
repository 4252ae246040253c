"""Compare a distributed run with a single-process run: records in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, sqrt

import numpy as np

from evenstep.types import FloatArray
from evenstep.verify.records import Gradients, RankRecord

MAX_NAMED = 3  # samples or layers in a message
TINY = 1e-300
NEAR_ONE = 0.2  # a ratio this close to 1 identifies a cause

TOLERANCE = {"torch.float64": 1e-10, "torch.float32": 1e-4}
HALF_TOLERANCE = 5e-2  # half precision, of the parameters or by autocast

MIN_NORM = 0.1  # of the whole gradient's: a smaller one may be mostly rounding, and counts as this


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one comparison."""

    subject: str
    agrees: bool | None  # None: it could not be compared
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientGap:
    """The difference between a step's gradients in two runs."""

    error: float  # relative, of the parameter with the largest
    parameter: str
    norm: float  # of the reference gradient
    ratio: float  # of the other gradient's component along the reference to that norm


def compare_data(reference: RankRecord, distributed: Sequence[RankRecord]) -> Finding:
    """Whether the workers together used exactly the samples of the single-process run."""
    difference = _data_difference(reference, distributed)
    if difference:
        return Finding("data", False, difference)
    total = sum(len(step.samples) for step in reference.steps)
    shares = ", ".join(str(len(record.steps[0].samples)) for record in distributed)
    message = f"{total} samples, each used once as alone; shares in step 1: {shares}"
    return Finding("data", True, message)


def _data_difference(reference: RankRecord, distributed: Sequence[RankRecord]) -> str:
    num_steps = len(reference.steps)
    if not num_steps:
        return "the script ended without a step. It must loop over session.loader(...)."
    for rank, record in enumerate(distributed):
        if len(record.steps) != num_steps:
            return f"worker {rank} took {len(record.steps)} steps, alone {num_steps}"
    for step, expected in enumerate(reference.steps):
        parts = [record.steps[step].samples for record in distributed]
        wanted = Counter(index for index, _ in expected.samples)
        used = Counter(index for part in parts for index, _ in part)
        if used != wanted:
            missing, extra = sorted((wanted - used).elements()), sorted((used - wanted).elements())
            what = f"{_list(missing)} missing, {_list(extra)} repeated or unexpected"
            return f"step {step + 1}: {what}"
        digests = dict(expected.samples)
        for rank, part in enumerate(parts):
            changed = [index for index, digest in part if digest != digests[index]]
            if changed:
                return (
                    f"step {step + 1}: worker {rank} read different data than the run alone for "
                    f"{_list(changed)}. Give every worker the same whole dataset, not a part of "
                    "it, and seed all random data."
                )
    return ""


def compare_parameters(distributed: Sequence[RankRecord]) -> Finding:
    """Whether all workers had the same parameters after every step."""
    for step, records in enumerate(zip(*(record.steps for record in distributed), strict=False)):
        for rank, record in enumerate(records):
            if record.parameters != records[0].parameters:
                message = (
                    f"worker {rank} has different parameters than worker 0 after step {step + 1}. "
                    "Everything that changes them, such as the learning rate, must be the same on "
                    "all workers."
                )
                return Finding("parameters", False, message)
    return Finding("parameters", True, "equal on all workers after every step")


def compare_gradients(
    reference: RankRecord,
    distributed: Sequence[RankRecord],
    gaps: Sequence[GradientGap],
    reseeded_gaps: Sequence[GradientGap] = (),
) -> Finding:
    """Whether each step's reduced gradient was that of the single-process run.

    `gaps` are to the distributed run, `reseeded_gaps` to a second single-process run with other
    random seeds: a difference there is not caused by the workers.
    """
    subject = "gradients"
    if all(gap.norm == 0 for gap in gaps):
        return Finding(subject, None, "all zero in the run alone: there is nothing to compare")
    limit, dtypes = tolerance(reference), ", ".join(reference.dtypes).replace("torch.", "")
    errors = ", ".join(f"{gap.error:.1e}" for gap in gaps)
    message = f"relative error {errors} in steps 1 to {len(gaps)}; at most {limit:.0e} for {dtypes}"
    if reference.dropouts:
        message += "; dropout was off"
    exceeding = [gap for gap in gaps if not gap.error <= limit]
    if not exceeding:
        return Finding(subject, True, message)
    message += f". Largest in {exceeding[0].parameter}. "
    random_error = max((gap.error for gap in reseeded_gaps), default=0.0)
    if random_error > limit:
        message += (
            f"But two runs alone with different seeds differ by {random_error:.1e} too: the loop "
            f"draws random numbers from {_sources(reference.draws)} to verify the rest."
        )
        return Finding(subject, None, message)
    return Finding(subject, False, message + _likely_cause(reference, distributed, gaps))


def tolerance(record: RankRecord) -> float:
    """The relative error that the coarsest precision in use explains."""
    limits = [TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in record.dtypes]
    return max(limits, default=HALF_TOLERANCE)


def gradient_gap(reference: Gradients, other: Gradients) -> GradientGap:
    """The difference between two gradients. A parameter without one counts as zero."""
    norm = sqrt(sum(_dot(g, g) for g in reference.values()))
    errors, projection = {}, 0.0
    for name in sorted({*reference, *other}):
        either = reference.get(name, other.get(name))
        assert either is not None
        ours, theirs = reference.get(name, 0 * either), other.get(name, 0 * either)
        distance = sqrt(_dot(theirs - ours, theirs - ours))
        own_norm = sqrt(_dot(ours, ours))
        errors[name] = distance and distance / max(own_norm, MIN_NORM * norm, TINY)
        projection += _dot(ours, theirs)
    worst = max(errors, key=lambda name: inf if isnan(errors[name]) else errors[name], default="")
    return GradientGap(
        error=errors.get(worst, 0.0),
        parameter=worst,
        norm=norm,
        ratio=projection / max(norm**2, TINY),
    )


def _likely_cause(
    reference: RankRecord, distributed: Sequence[RankRecord], gaps: Sequence[GradientGap]
) -> str:
    """The likely cause of different gradients, and what to do about it."""
    if any(isnan(gap.error) for gap in gaps):
        return "Some gradients are not finite: the script itself may diverge."
    ratios = [gap.ratio / _sum_of_squares(distributed, step) for step, gap in enumerate(gaps)]
    causes = []
    if abs(sum(ratios) / len(ratios) - 1) < NEAR_ONE:
        causes.append(
            "They are as short as those of a loss that is not a mean over its samples but a sum, "
            "or a sum divided by a fixed batch size. Use the mean."
        )
    if reference.local_norms:
        names = ", ".join(reference.local_norms[:MAX_NAMED])
        more = " ..." if reference.local_norms[MAX_NAMED:] else ""
        causes.append(
            f"BatchNorm ({names}{more}) uses the statistics of each worker's own share. For "
            "statistics of all workers: session.prepare(model, ..., sync_batchnorm=True)."
        )
    if causes:
        return " ".join(causes)
    return (
        "Usual causes: a loss that is not a mean over samples (for a mean over tokens or pixels "
        "pass weight= to session.loader); batch statistics inside the model; samples of a batch "
        "left out; random numbers from a generator of the script's own."
    )


def _sources(draws: Sequence[str]) -> str:
    """The generators that a loop draws from, and what to turn off."""
    if not draws:
        return "no global generator, but one of its own: seed it, or turn it off,"
    example = ", as functional.dropout and noise do" if "torch" in draws else ""
    return f"{' and '.join(draws)}{example}: turn that off"


def _sum_of_squares(distributed: Sequence[RankRecord], step: int) -> float:
    """The squared fractions of a step's samples, summed: averaging sums shrinks them by this."""
    shares = [len(record.steps[step].samples) for record in distributed]
    return sum((share / sum(shares)) ** 2 for share in shares)


def _dot(a: FloatArray, b: FloatArray) -> float:
    return float(np.vdot(a, b))


def _list(indices: Sequence[int]) -> str:
    if not indices:
        return "none"
    more = f" and {len(indices) - MAX_NAMED} more" if len(indices) > MAX_NAMED else ""
    return f"sample {', '.join(map(str, indices[:MAX_NAMED]))}{more}"
