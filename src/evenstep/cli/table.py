"""Plain aligned tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under a head, the first column left-aligned, the others right-aligned."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if i else '<'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(form.format(*line).rstrip() for line in lines)
