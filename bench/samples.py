"""A valid value of each message, event, action and effect, made from its type alone.

So that a fuzzer begins from every member of a union, also from those that are added later.
"""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
from msgspec import inspect

TEXTS = ("w0", "step-00000012.pt", "")
"""One of them fits every pattern."""


def members(union: Any) -> list[type]:
    """The types of a union."""
    return list(get_args(union)) or [union]


def samples(union: Any, **known: Any) -> list[Any]:
    """Values of each type in a union, with and without its optional fields; equal ones once.

    `known`: fields that a type's own checks depend on.
    """
    made = []
    for kind in members(union):
        for whole in (False, True):
            value = sample(inspect.type_info(kind), known, whole)
            if value not in made:
                made.append(value)
    return made


def sample(kind: inspect.Type, known: dict[str, Any], whole: bool) -> Any:
    """A value of a type. `whole`: with all that is optional."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            values = {
                f.name: known[f.name] if f.name in known else sample(f.type, known, whole)
                for f in fields
                if f.required or (whole and not _is_open(f.type))
            }
            return cls(**values) if not kind.array_like else cls(*values.values())
        case inspect.UnionType(types=types):
            none = [t for t in types if isinstance(t, inspect.NoneType)]
            return sample(none[0] if none and not whole else types[0], known, whole)
        case inspect.Metadata(type=inner):
            return sample(inner, known, whole)
        case inspect.CustomType():
            return msgspec.UNSET
    return _plain(kind, known, whole)


def _plain(kind: inspect.Type, known: dict[str, Any], whole: bool) -> Any:
    match kind:
        case inspect.StrType(pattern=pattern):
            return next(t for t in TEXTS if pattern is None or re.search(pattern, t))
        case inspect.IntType():
            return 3
        case inspect.FloatType():
            return 0.5
        case inspect.BoolType():
            return whole
        case inspect.BytesType():
            return b"\x00\xff"
        case inspect.NoneType():
            return None
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return (sample(item, known, whole),)
        case inspect.TupleType(item_types=items):
            return tuple(sample(item, known, whole) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {sample(key, known, whole): sample(value, known, whole)}
        case inspect.AnyType():
            return {"batch": 64}
        case inspect.LiteralType(values=values):
            return values[0]
    raise TypeError(f"no sample of {kind}")


def _is_open(kind: inspect.Type) -> bool:
    """Whether it may be left unset."""
    return isinstance(kind, inspect.CustomType)
