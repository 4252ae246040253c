"""Colours of the pictures, light and dark, as one style sheet of plain rules.

Ten colours that colour-blind people can tell apart, in the order in which workers come. The rules
use no variables: programs that typeset papers do not know them.
"""

from __future__ import annotations

NUM_COLOURS = 10

LIGHT = {
    "workers": "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #7b61b8 #a89a00 #8c6239 #5f7f95",
    "ink": "#22262b",
    "soft": "#5d666f",
    "grid": "#e4e7ea",
    "paper": "#ffffff",
    "rest": "#b4bbc2",
    "wait": "#d3d9de",
    "idle": "#f3e3df",
    "main": "#0b5fa5",
    "bad": "#c0392b",
    "good": "#1d7f5c",
}
DARK = {
    "workers": "#4ea8e0 #f2b347 #2fc79a #e39bc3 #90d2f7 #f48a48 #b19ae6 #d8cb4b #c0946a #9db7c9",
    "ink": "#e8eaed",
    "soft": "#a3abb3",
    "grid": "#33393f",
    "paper": "#14171a",
    "rest": "#6d757d",
    "wait": "#3b424a",
    "idle": "#40302c",
    "main": "#5fb0f0",
    "bad": "#ff7a66",
    "good": "#4cd0a0",
}

SHAPES = """
.es text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.es .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.es .thin { stroke-width: 1; }
.es .dash { stroke-dasharray: 5 3; }
.es .dots { stroke-dasharray: 1.5 3; stroke-linecap: round; }
.es .soft-fill { fill-opacity: 0.22; }
.es .band { fill-opacity: 0.88; }
.es .num { font-variant-numeric: tabular-nums; }
.es .strong { font-weight: 600; }
.es .decision { cursor: pointer; }
.es .decision:hover .mark, .es .decision:focus .mark { stroke-width: 3; }
.es .decision.chosen .mark { stroke-width: 3; }
.es .hit { fill: none; pointer-events: all; }
"""


def stylesheet() -> str:
    """The rules for pictures in a page: light, dark if that is preferred, or by `data-theme`."""
    return (
        f"{SHAPES}{_colours(LIGHT, '.es')}"
        f"@media screen and (prefers-color-scheme: dark) {{\n"
        f"{_colours(DARK, ':root:not([data-theme=light]) .es')}}}\n"
        f"{_colours(DARK, ':root[data-theme=dark] .es')}"
    )


def standalone() -> str:
    """The rules inside a picture that is a file of its own."""
    dark = f"@media screen and (prefers-color-scheme: dark) {{\n{_colours(DARK, '.es')}}}\n"
    return f"{SHAPES}{_colours(LIGHT, '.es')}{dark}"


def _colours(theme: dict[str, str], scope: str) -> str:
    rules = []
    for i, colour in enumerate(theme["workers"].split()):
        rules += [f".f{i} {{ fill: {colour}; }}", f".s{i} {{ stroke: {colour}; }}"]
    for name in ("ink", "soft", "grid", "paper", "rest", "wait", "idle", "main", "bad", "good"):
        colour = theme[name]
        rules += [f".f-{name} {{ fill: {colour}; }}", f".s-{name} {{ stroke: {colour}; }}"]
    rules.append(f"text {{ fill: {theme['ink']}; }}")
    rules.append(f"text.soft {{ fill: {theme['soft']}; }}")
    return "".join(f"{scope} {rule}\n" for rule in rules)
