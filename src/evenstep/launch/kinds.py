"""Kinds of workers, as `--kind` describes them: what each of them gets of an engine."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from evenstep.errors import ConfigError
from evenstep.ports import WorkerKind

_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
FORM = "expected cpu=N, gpu=N or gpu=TYPE:N, with more after commas, such as gpu=A100:4,memory=64G"


ANY = WorkerKind(name="")
"""Where no `--kind` is given: the engine's defaults, and the worker names its kind itself."""


def parse_kinds(texts: Sequence[str]) -> dict[str, WorkerKind]:
    """Kinds by name."""
    kinds: dict[str, WorkerKind] = {}
    for text in texts:
        kind = parse_kind(text)
        if kind.name in kinds:
            raise ConfigError("--kind", f"two kinds are called {kind.name}: add name=... to one")
        kinds[kind.name] = kind
    return kinds or {ANY.name: ANY}


def parse_kind(text: str) -> WorkerKind:
    """KEY=VALUE,...: cpu, gpu, memory, price, flops and name; other keys are the engine's own."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not (equals and key and value):
            raise ConfigError("--kind", f'{FORM}; got "{part}" in "{text}"')
        if key in values:
            raise ConfigError("--kind", f'"{key}" is given twice in "{text}"')
        values[key] = value
    gpu_type, _, gpus = values.pop("gpu", "0").rpartition(":")
    cpus, memory = values.pop("cpu", "0"), values.pop("memory", "")
    price, flops = values.pop("price", None), values.pop("flops", None)
    kind = WorkerKind(
        name=values.pop("name", "") or _name(cpus, gpu_type, gpus, text),
        cpus=_count("cpu", cpus, text),
        gpus=_count("gpu", gpus, text),
        gpu_type=gpu_type,
        memory_bytes=_bytes(memory, text) if memory else 0,
        price=None if price is None else _number("price", price, text),
        flops=None if flops is None else _number("flops", flops, text) or None,
        options=values,
    )
    if not _NAME.fullmatch(kind.name):
        raise ConfigError("--kind", f'"{kind.name}" is no name: use letters, digits, "_.:-"')
    return kind


def _name(cpus: str, gpu_type: str, gpus: str, text: str) -> str:
    """A100x4, gpux1, cpux8."""
    if gpus != "0":
        return f"{gpu_type or 'gpu'}x{gpus}"
    if cpus != "0":
        return f"cpux{cpus}"
    raise ConfigError("--kind", f'{FORM}; "{text}" names neither: give it a name=...')


def _count(key: str, value: str, text: str) -> int:
    if not value.isdecimal():
        raise ConfigError("--kind", f'{key}: expected a whole number, got "{value}" in "{text}"')
    return int(value)


def _bytes(value: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)i?B?", value)
    if match is None or int(match[1]) == 0:
        problem = f'memory: expected a size such as 500M or 64G, got "{value}" in "{text}"'
        raise ConfigError("--kind", problem)
    return int(match[1]) * _SIZES[match[2]]


def _number(key: str, value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError("--kind", f'{key}: expected 0 or more, got "{value}" in "{text}"')
    return number
