"""Flatten a nested state into its tensors and a msgpack description of its structure, and back.

Nothing is pickled, so a state received from another worker can only ever be data.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from evenstep.errors import ConfigError, InvalidInputError

KeyPath = tuple[str | int, ...]

TENSORS = (torch.Tensor, torch.nn.Parameter)
MAPPINGS: dict[type, str] = {dict: "dict", Counter: "counter", OrderedDict: "ordered"}
SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
CONTAINERS: dict[str, Any] = {tag: kind for kind, tag in (MAPPINGS | SEQUENCES).items()}


def flatten(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The structure of a state as bytes, and its tensors (not copies), in order.

    Equal states have equal structures, in any process. NumPy scalars become Python numbers. A value
    of an unsupported type raises a ConfigError that names the path to it.
    """
    tensors: list[torch.Tensor] = []
    try:
        return msgspec.msgpack.encode(_encode(state, "", tensors)), tensors
    except RecursionError:
        raise ConfigError("state", "is nested too deeply, or contains itself") from None
    except UnicodeEncodeError as e:
        raise ConfigError("state", f"has text that is not Unicode: {e.object!r}") from None


def unflatten(structure: bytes, tensors: Sequence[Any]) -> Any:
    """Rebuild the state with these tensors, or with placeholders for them."""
    with _invalid_input():
        return _decode(msgspec.msgpack.decode(structure), tensors)


def tensor_paths(structure: bytes) -> list[KeyPath]:
    """The paths to the tensors, in their order. No two are equal."""
    with _invalid_input():
        return [path for _, path in sorted(_find_tensors(msgspec.msgpack.decode(structure), ()))]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor's memory as bytes."""
    # Not view(-1): a tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def _invalid_input() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as e:
        raise InvalidInputError("state", f"has an invalid structure: {e}") from None


def _encode(x: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    """`x` as msgpack values; a type that msgpack lacks becomes a list that begins with a tag."""
    kind = type(x)
    if x is None or kind in (bool, float, str, bytes):
        return x
    if kind is int:
        return x if -(2**63) <= x < 2**64 else ["int", hex(x)]
    if isinstance(x, np.floating | np.integer | np.bool_) and type(x.item()) in (float, int, bool):
        return x.item()
    if kind in TENSORS and x.layout is torch.strided and not x.is_quantized:
        tensors.append(x.detach())
        return ["tensor", len(tensors) - 1]
    if kind in SEQUENCES:
        items = [_encode(v, _join(path, i), tensors) for i, v in enumerate(x)]
        return [SEQUENCES[kind], items]
    if kind in MAPPINGS:
        for key in x:
            if type(key) not in (str, int):
                raise _unsupported(path, key, " as a key")
        keys = [_encode(key, path, tensors) for key in x]
        values = [_encode(value, _join(path, key), tensors) for key, value in x.items()]
        # The versions in a module's state_dict.
        metadata = _encode(getattr(x, "_metadata", None), _join(path, "_metadata"), tensors)
        return [MAPPINGS[kind], keys, values, *([] if metadata is None else [metadata])]
    if kind is set:
        # Sorted, since the order of a set differs between processes.
        items = [_encode(v, path, tensors) for v in x]
        return ["set", sorted(items, key=msgspec.msgpack.encode)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(x).removeprefix("torch.")]
    raise _unsupported(path, x)


def _decode(x: Any, tensors: Sequence[Any]) -> Any:
    match x:
        case ["int", digits]:
            return int(digits, 16)
        case ["tensor", index]:
            return tensors[index]
        case ["list" | "tuple" | "size" as tag, items]:
            return CONTAINERS[tag](_decode(v, tensors) for v in items)
        case ["dict" | "counter" | "ordered" as tag, keys, values, *metadata]:
            pairs = zip(keys, values, strict=True)
            mapping = CONTAINERS[tag]({_decode(k, ()): _decode(v, tensors) for k, v in pairs})
            if metadata:
                mapping._metadata = _decode(metadata[0], tensors)
            return mapping
        case ["set", items]:
            return {_decode(v, tensors) for v in items}
        case ["dtype", name] if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case ["device", name]:
            return torch.device(name)
        case list() | dict():
            raise ValueError(x)
    return x


def _find_tensors(x: Any, path: KeyPath) -> Iterator[tuple[int, KeyPath]]:
    match x:
        case ["tensor", index]:
            yield index, path
        case ["list" | "tuple" | "set", items]:
            for i, item in enumerate(items):
                yield from _find_tensors(item, (*path, i))
        case ["dict" | "counter" | "ordered", keys, values, *_]:
            for key, value in zip(keys, values, strict=True):
                yield from _find_tensors(value, (*path, _decode(key, ())))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _unsupported(path: str, x: Any, role: str = "") -> ConfigError:
    name = type(x).__name__
    if isinstance(x, torch.Tensor):
        name = f"{x.layout} {name}".removeprefix("torch.")
    article = "an" if name[0].lower() in "aeiou" else "a"
    return ConfigError(
        path or "state",
        f"{article} {name} cannot be serialised{role}; "
        "keep only tensors, numbers, text, lists and mappings in a state_dict",
    )
