"""Runs the matrix and writes it into docs/loops.md.

    python -m bench.matrix [--rows classify,gan] [--columns alone,torchrun] [--seed 7]

With rows or columns left out, the table is only printed. Kills, joins and stops land at random
steps; the seed is printed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from bench.matrix.cases import CASES, Case
from bench.matrix.cells import COLUMNS, Failed, Ways
from bench.tables import markdown, write

MADE_BY = "python -m bench.matrix"


def main() -> None:
    """Run the cells asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="names, separated by commas")
    parser.add_argument("--columns", default="", help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=int(np.random.default_rng().integers(2**31)))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    rows = args.rows.split(",") if args.rows else [case.name for case in CASES]
    columns = args.columns.split(",") if args.columns else list(COLUMNS)
    lines = []
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        for case in CASES:
            if case.name in rows:
                lines.append(row(case, columns, Path(folder, case.name), args.seed))
                print(" | ".join(lines[-1]), flush=True)
    table = markdown(["script", "what it does", "lines changed", *columns], lines)
    if args.rows or args.columns:
        print(table)
    else:
        write("loops.md", "matrix", table, MADE_BY)


def row(case: Case, columns: list[str], folder: Path, seed: int) -> list[str]:
    """One line of the table."""
    ways = Ways(case, folder, np.random.default_rng((seed, CASES.index(case))))
    cells = [cell(ways, column) for column in columns]
    return [
        f"[{case.name}](../bench/scripts/{case.script.name})",
        case.what,
        str(case.lines_changed),
        *cells,
    ]


def cell(ways: Ways, column: str) -> str:
    """The error of one way to run a case."""
    case = ways.case
    if case.missing:
        return f"needs {', '.join(case.missing)}"
    if column == "verify" and case.not_verified:
        return case.not_verified
    try:
        error = ways.measure(column)
    except Failed as e:
        raise SystemExit(f"{case.name}, {column} ({ways.history.get(column, '')}): {e}") from None
    return f"{error:.0e}" if error else "0"


if __name__ == "__main__":
    main()
