"""Converts plain data into structs, strictly: errors name the dotted path of the setting."""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from evenstep.errors import ConfigError, InvalidInputError, UnknownSettingError, nearest

T = TypeVar("T")


def build(kind: type[T], data: Any, *, source: str = "") -> T:
    """`data` converted to a `kind`; raises a ConfigError that names the setting."""
    with within("", source):
        built: T = _build(kind, data)
        return built


@contextmanager
def within(key: str, source: str = "") -> Iterator[None]:
    """Prepend `key` to the path of a ConfigError that this block raises, and add its source."""
    try:
        yield
    except ConfigError as e:
        raise e.within(key, source) from None


def whole(field: str, value: Any, minimum: int | None = None) -> int:
    """`value` as an int of at least `minimum`; raises a ConfigError otherwise."""
    bound = "" if minimum is None else f", {minimum} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(field, f"expected a whole number{bound}, got {value!r}") from None
    if minimum is not None and number < minimum:
        raise ConfigError(field, f"must be {minimum} or more, got {number}")
    return number


def require_name(field: str, text: str) -> str:
    """`text`, unless it is blank."""
    if not text.strip():
        raise ConfigError(field, "is empty; give a name, or leave the option out")
    return text


def load_yaml(path: Path) -> Any:
    """The content of a YAML file as plain data."""
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError("", f"cannot be read: {e.strerror}", str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError("", f"is not YAML: {e}", str(path)) from None


def override(data: Any, sets: Sequence[str]) -> Any:
    """A copy of `data` with each `dotted.path=value` set; values are read as YAML."""
    for setting in sets:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise ConfigError("", f"expected path=value, got {setting!r}", "--set")
        try:
            value = _parse(text)
        except yaml.YAMLError as e:
            raise ConfigError(path, f"is not YAML: {e}", "--set") from None
        data = _put(data, path.split("."), value)
    return data


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, and a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"duplicate key {key!r} in line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)  # safe: a SafeLoader yields plain data only


def _put(data: Any, keys: list[str], value: Any) -> Any:
    if not keys:
        return value
    key, *rest = keys
    if isinstance(data, list):
        if not (key.isdecimal() and int(key) < len(data)):
            raise ConfigError(key, f"there are {len(data)} entries, counted from 0", "--set")
        return [_put(x, rest, value) if i == int(key) else x for i, x in enumerate(data)]
    if not isinstance(data, dict | str | None):
        raise ConfigError(key, f"cannot be set within {data!r}", "--set")
    # Setting an option turns the short form of a plug-in (`policy: auto`) into the long one.
    copy = {"name": data} if isinstance(data, str) else dict(data or {})
    with within(key):
        return copy | {key: _put(copy.get(key), rest, value)}


def _build(kind: Any, data: Any) -> Any:
    args, origin = get_args(kind), get_origin(kind)
    if origin in (Union, types.UnionType) and type(None) in args:
        inner = [a for a in args if a is not type(None)]
        if data is not None and len(inner) == 1:
            return _build(inner[0], data)
    if origin in (tuple, list) and isinstance(data, list | tuple) and _is_struct(args[0]):
        return origin(_child(str(i), args[0], item) for i, item in enumerate(data))
    if _is_struct(kind):
        return kind.from_plain(data) if hasattr(kind, "from_plain") else _struct(kind, data)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        expected = str(e).split(", got ")[0].removeprefix("Expected ").replace("`", "")
        shown = f'"{data}"' if isinstance(data, str) else repr(data)
        raise ConfigError("", f"expected {expected}, got {shown}") from None


def _child(key: str, kind: Any, data: Any) -> Any:
    with within(key):
        return _build(kind, data)


def _struct(kind: type[msgspec.Struct], data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError("", f"expected a mapping of settings, got {data!r}")
    hints = get_type_hints(kind)
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    for key in data:
        if key not in fields:
            near = nearest(str(key), fields)
            raise UnknownSettingError(str(key), near or f"one of {', '.join(fields)}")
    for name, field in fields.items():
        if field.required and name not in data:
            raise ConfigError(name, "is missing")
    try:
        return kind(**{k: _child(k, hints[k], v) for k, v in data.items()})
    except InvalidInputError as e:
        raise ConfigError("", str(e)) from None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
