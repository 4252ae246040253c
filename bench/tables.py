"""Generated tables in docs/: replaces the text between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, first column left-aligned."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def write(page: str, name: str, table: str, made_by: str = "make tables") -> None:
    """Replace the table called `name` in a page of docs/."""
    path = DOCS / page
    begin, end = f"<!-- {name}: made by {made_by} -->", f"<!-- end of {name} -->"
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{path} has no markers for the table {name}: {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")
