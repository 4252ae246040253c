"""State as people keep it, nested dicts and lists around tensors, taken apart and put together.

The structure becomes a few bytes of plain values, the tensors a list. Nothing is pickled, so that
what comes from a peer can only ever be data.
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

Path = tuple[str | int, ...]

TENSORS = (torch.Tensor, torch.nn.Parameter)
MAPPINGS: dict[type, str] = {dict: "dict", Counter: "counter", OrderedDict: "ordered"}
SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
MAKES: dict[str, Any] = {name: kind for kind, name in (MAPPINGS | SEQUENCES).items()}


def take_apart(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The structure of a state as bytes, and its tensors, as they are and in order.

    Equal states have equal structures, in any process. Numbers of numpy become plain ones. What
    cannot be handed over is refused by the path to it.
    """
    tensors: list[torch.Tensor] = []
    try:
        return msgspec.msgpack.encode(_fold(state, "", tensors)), tensors
    except RecursionError:
        raise ConfigError("state", "is nested too deeply, or holds itself") from None
    except UnicodeEncodeError as e:
        raise ConfigError("state", f"has text that is not Unicode: {e.object!r}") from None


def put_together(plan: bytes, tensors: Sequence[Any]) -> Any:
    """The state again, with these tensors in their places, or with what stands for them."""
    with _refusing():
        return _unfold(msgspec.msgpack.decode(plan), tensors)


def places(plan: bytes) -> list[Path]:
    """The paths to the tensors, in their order. No two are the same."""
    with _refusing():
        return [path for _, path in sorted(_places(msgspec.msgpack.decode(plan), ()))]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, flat and as bytes."""
    # Not view(-1): a single number may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as e:
        raise InvalidInputError("plan", f"is not the structure of a state: {e}") from None


def _fold(x: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    """`x` as plain values: what is not a value of msgpack is a list that begins with a tag."""
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
        items = [_fold(v, _join(path, i), tensors) for i, v in enumerate(x)]
        return [SEQUENCES[kind], items]
    if kind in MAPPINGS:
        for key in x:
            if type(key) not in (str, int):
                raise _refusal(path, key, "as a key")
        keys = [_fold(key, path, tensors) for key in x]
        values = [_fold(value, _join(path, key), tensors) for key, value in x.items()]
        # What a module's state_dict says of its versions.
        about = _fold(getattr(x, "_metadata", None), _join(path, "_metadata"), tensors)
        return [MAPPINGS[kind], keys, values, *([] if about is None else [about])]
    if kind is set:
        # In an order that does not change from process to process.
        items = [_fold(v, path, tensors) for v in x]
        return ["set", sorted(items, key=msgspec.msgpack.encode)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(x).removeprefix("torch.")]
    raise _refusal(path, x)


def _unfold(x: Any, tensors: Sequence[Any]) -> Any:
    match x:
        case ["int", digits]:
            return int(digits, 16)
        case ["tensor", place]:
            return tensors[place]
        case ["list" | "tuple" | "size" as kind, items]:
            return MAKES[kind](_unfold(v, tensors) for v in items)
        case ["dict" | "counter" | "ordered" as kind, keys, values, *about]:
            pairs = zip(keys, values, strict=True)
            made = MAKES[kind]({_unfold(k, ()): _unfold(v, tensors) for k, v in pairs})
            if about:
                made._metadata = _unfold(about[0], tensors)
            return made
        case ["set", items]:
            return {_unfold(v, tensors) for v in items}
        case ["dtype", name] if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case ["device", name]:
            return torch.device(name)
        case list() | dict():
            raise ValueError(x)
    return x


def _places(x: Any, path: Path) -> Iterator[tuple[int, Path]]:
    match x:
        case ["tensor", place]:
            yield place, path
        case ["list" | "tuple" | "set", items]:
            for i, item in enumerate(items):
                yield from _places(item, (*path, i))
        case ["dict" | "counter" | "ordered", keys, values, *_]:
            for key, value in zip(keys, values, strict=True):
                yield from _places(value, (*path, _unfold(key, ())))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _refusal(path: str, x: Any, where: str = "") -> ConfigError:
    name = type(x).__name__
    if isinstance(x, torch.Tensor):
        name = f"{x.layout} {name}".removeprefix("torch.")
    one = "an" if name[0].lower() in "aeiou" else "a"
    return ConfigError(
        path or "state",
        f"{one} {name} cannot be handed over{' ' if where else ''}{where}; "
        "keep tensors, numbers, text, lists and mappings in a state_dict",
    )
