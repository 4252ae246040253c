"""Runs the matrix and writes it into docs/loops.md.

    python -m bench.matrix [--rows classify,gan] [--columns alone,torchrun] [--seed 7]

Rows that are not run, or whose packages are not installed, stay as they are in the table; with
columns left out, it is only printed. Kills, joins and stops land at random steps; the seed is
printed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.matrix.cases import CASES, Case
from bench.matrix.cells import COLUMNS, Failed, Ways
from bench.tables import markdown, read, write

PAGE, TABLE, MADE_BY = "loops.md", "matrix", "python -m bench.matrix"


def main() -> None:
    """Run the cells asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="names, separated by commas")
    parser.add_argument("--columns", default="", help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=int(np.random.default_rng().integers(2**31)))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    known = [case.name for case in CASES]
    names = args.rows.split(",") if args.rows else known
    columns = args.columns.split(",") if args.columns else list(COLUMNS)
    if unknown := [name for name in (*names, *columns) if name not in (*known, *COLUMNS)]:
        parser.error(f"unknown: {', '.join(unknown)}; rows: {', '.join(known)}")
    header = ["script", "what it does", "lines changed", *columns]
    rows = {}
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        for case in CASES:
            if case.name not in names:
                continue
            if case.missing:
                print(f"{case.name} needs {', '.join(case.missing)}", flush=True)
                continue
            rows[case.name] = row(case, columns, Path(folder, case.name), args.seed)
            print(" | ".join(rows[case.name]), flush=True)
    if args.columns:
        print(markdown(header, rows.values()))
    else:
        write(PAGE, TABLE, markdown(header, merge(read(PAGE, TABLE, MADE_BY), rows)), MADE_BY)


def merge(table: list[list[str]], rows: Mapping[str, list[str]]) -> list[list[str]]:
    """The rows of a table with some of them replaced or added, in the order of the cases."""
    old = {line[0]: line for line in table[1:]}
    return [
        line for case in CASES if (line := rows.get(case.name) or old.get(link(case))) is not None
    ]


def row(case: Case, columns: list[str], folder: Path, seed: int) -> list[str]:
    """One line of the table."""
    ways = Ways(case, folder, np.random.default_rng((seed, CASES.index(case))))
    cells = [cell(ways, column) for column in columns]
    return [
        link(case),
        case.what,
        str(case.lines_changed),
        *cells,
    ]


def link(case: Case) -> str:
    """The first cell of a row."""
    return f"[{case.name}](../bench/scripts/{case.script.name})"


def cell(ways: Ways, column: str) -> str:
    """The error of one way to run a case."""
    case = ways.case
    if column in case.refused:
        return case.refused[column]
    try:
        error = ways.measure(column)
    except Failed as e:
        raise SystemExit(f"{case.name}, {column} ({ways.history.get(column, '')}): {e}") from None
    return f"{error:.0e}" if error else "0"


if __name__ == "__main__":
    main()
