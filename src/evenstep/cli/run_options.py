"""Checks the options of `evenstep run` before anything starts."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from evenstep.config import Settings
from evenstep.coordinate.events import MAX_WORKERS
from evenstep.engine import assemble
from evenstep.errors import ConfigError
from evenstep.strict import build, override
from evenstep.types import MOST_SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """How many workers to start, and the bounds of the run."""

    start: int
    min: int
    max: int

    @property
    def sets(self) -> tuple[str, ...]:
        """The bounds as settings; none if the run is unbounded."""
        if self.max == MAX_WORKERS:
            return ()
        return f"workers.max={self.max}", f"scaling.min_workers={self.min}"


def worker_counts(given: str | None, at_start: str) -> WorkerCounts:
    """From --workers and, for a resumed run, its value `at_start`, whose bounds stay."""
    start, bound = _parse_workers(given or at_start or "1")
    lower, upper = _parse_workers(at_start) if at_start else (start, bound)
    if bound and (start, bound) != (lower, upper):
        raise ConfigError(
            "--workers",
            f"MIN:MAX stays as the run began, {at_start}; give a single number to choose how many "
            f"to start: got {given}",
        )
    if upper and start > upper:
        raise ConfigError("--workers", f"at most {upper}, as the run began: got {start}")
    return WorkerCounts(start=start, min=lower if upper else 1, max=upper or MAX_WORKERS)


def _parse_workers(text: str) -> tuple[int, int]:
    """N as (N, 0), MIN:MAX as (MIN, MAX)."""
    lower, colon, upper = text.partition(":")
    if not lower.isdecimal() or (colon and not upper.isdecimal()):
        raise ConfigError("--workers", f"expected N or MIN:MAX, got {text!r}")
    if colon and not 1 <= int(lower) <= int(upper):
        raise ConfigError("--workers", f"need 1 <= MIN <= MAX, got {text!r}")
    return int(lower), int(upper or 0)


def scaling_setting(text: str, workers: WorkerCounts) -> str:
    """--scale as a setting: the heuristic and its options."""
    few = workers.start
    if few == workers.max:
        raise ConfigError("--scale", f"needs a range of sizes, such as --workers {few}:{few + 4}")
    name, _, option = text.partition(":")
    choice: dict[str, Any] = {"name": name}
    if option:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError("--scale", f"expected NAME:KEY=VALUE, got {text!r}")
        try:
            choice[key] = float(value)
        except ValueError:
            choice[key] = value
    return f"scaling.heuristic={msgspec.json.encode(choice).decode()}"


def worker_prices(texts: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """--price options as (kind, price of a worker-hour); kind "" stands for all others."""
    prices: dict[str, float] = {}
    for text in texts:
        kind, _, number = text.rpartition("=")
        try:
            prices[kind] = float(number)
        except ValueError:
            raise ConfigError("--price", f"expected PRICE or KIND=PRICE, got {text!r}") from None
        if not 0 <= prices[kind] < math.inf:
            raise ConfigError("--price", f"must be 0 or more and finite, got {number}")
    return tuple(prices.items())


def check_settings(sets: tuple[str, ...], bounds: tuple[str, ...], *, resumed: bool) -> Settings:
    """The settings of the command line, checked as far as they can be without the script."""
    if sets and resumed:
        raise ConfigError(sets[0].partition("=")[0], "stays as the run's journal has it")
    # Placeholders for what only the script knows: its batch and the length of the job.
    plain = override({"batch": {"size": MOST_SAMPLES}, "samples": 1}, (*bounds, *sets))
    settings = build(Settings, plain, source="--set")
    if settings.batch.size != MOST_SAMPLES:
        raise ConfigError("batch.size", "belongs to the script: set it there", "--set")
    assemble(settings)
    return settings


def server_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS context for --tls-cert and --tls-key; None without them."""
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert, --tls-key", "give both, or neither")
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError("--tls-cert, --tls-key", f"cannot be used: {e}") from None
    return context
