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
    before, _, after = _split(page, name, made_by)
    (DOCS / page).write_text(f"{before}\n{table}\n{after}", encoding="utf-8")


def read(page: str, name: str, made_by: str = "make tables") -> list[list[str]]:
    """Header and rows of the table called `name` in a page of docs/."""
    header, _, *rows = _split(page, name, made_by)[1].strip().splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in (header, *rows)]


def _split(page: str, name: str, made_by: str) -> tuple[str, str, str]:
    """What is before, between and after the markers of a table; the markers are outside."""
    path = DOCS / page
    begin, end = f"<!-- {name}: made by {made_by} -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    table, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{path} has no markers for the table {name}: {begin} ... {end}")
    return before + begin, table, end + after
