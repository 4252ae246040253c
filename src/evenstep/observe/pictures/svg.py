"""Elements of SVG and HTML as text, everything from outside escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Text from anywhere, as it may stand in an element or an attribute."""
    return Markup(_FORBIDDEN.sub("\ufffd", str(text)).translate(_ESCAPES))


def element(name: str, *children: object, **attributes: object) -> Markup:
    """An element. `cls` is the class; underscores become hyphens; None leaves an attribute out."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            key = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
            parts.append(f'{key}="{_plain(value)}"')
    head = " ".join(parts)
    content = join(children)
    return Markup(f"<{head}>{content}</{name}>" if content or name in _PAIRED else f"<{head}/>")


_PAIRED = {"g", "div", "span", "td", "th", "p", "script", "style", "section", "table"}


def join(children: Iterable[object]) -> Markup:
    """Children one after the other, escaped unless they are markup."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in children))


def _plain(value: object) -> str:
    return number(value) if isinstance(value, float) else escape(value)


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    text = f"{value:.1f}"
    return "0" if text in ("0.0", "-0.0") else text.removesuffix(".0")
