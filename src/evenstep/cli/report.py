"""`evenstep report`: what is kept of a run, as one HTML file, tables or pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from evenstep.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.observe.history import History

REPORT = "report.html"
"""In the folder of a run, unless told otherwise."""

PAPER_WIDTH = 720  # pixels of a picture that is a file


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the page.  [default: report.html in the run's folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything in it as JSON instead.")
@click.option(
    "--csv",
    "csv_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write its tables into this folder as CSV instead.",
)
@click.option(
    "--svg",
    "svg_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each picture into this folder as SVG instead.",
)
def report_command(
    runs: tuple[Path, ...],
    output: Path | None,
    as_json: bool,
    csv_folder: Path | None,
    svg_folder: Path | None,
) -> None:
    """Write a report on RUN, the folder of a run or a journal: one HTML file that needs no network.

    Two or more runs are compared side by side. A run may still be training: the report shows it as
    far as its journal is written.
    """
    from evenstep.observe.history import History
    from evenstep.observe.report.csv_files import write_csv
    from evenstep.observe.report.page import page
    from evenstep.observe.report.tables import as_data

    histories = [History.read(path) for path in runs]
    _name_apart(histories, runs)
    for history in histories:
        for problem in history.problems:
            click.echo(f"{history.name}: {problem}", err=True)
    if as_json:
        click.echo(msgspec.json.encode(as_data(histories)).decode())
    if csv_folder is not None:
        with _writing(csv_folder):
            for path in write_csv(histories, csv_folder):
                click.echo(path, err=as_json)
    if svg_folder is not None:
        with _writing(svg_folder):
            for path in _write_svg(histories, svg_folder):
                click.echo(path, err=as_json)
    if output is not None or not (as_json or csv_folder or svg_folder):
        target = output or _default(runs)
        with _writing(target):
            target.write_text(page(histories), encoding="utf-8")
        click.echo(target, err=as_json)


def _default(runs: Sequence[Path]) -> Path:
    """Beside what it is on; of several runs, here."""
    if len(runs) > 1:
        return Path(REPORT)
    [run] = runs
    return run / REPORT if run.is_dir() else run.with_suffix(".html")


def _name_apart(histories: Sequence[History], runs: Sequence[Path]) -> None:
    """Different names for different runs: paths, where the last parts are alike."""
    names = [history.name for history in histories]
    for i, (history, path) in enumerate(zip(histories, runs, strict=True)):
        if names.count(history.name) > 1:
            alike = list(runs).count(path) > 1
            history.name = f"{path} ({i + 1})" if alike else str(path)


def _write_svg(histories: Sequence[History], folder: Path) -> list[Path]:
    """Each picture of each run as a file of its own; pictures of several runs on a common scale."""
    from evenstep.observe.pictures import PICTURES, draw_alike, whole

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in PICTURES:
        views = [(history, whole(history, PAPER_WIDTH)) for history in histories]
        for i, svg in enumerate(draw_alike(picture, views, standalone=True)):
            if svg:
                number = f"-{i + 1}" if len(histories) > 1 else ""
                path = folder / f"{picture.name}{number}.svg"
                path.write_text(f"{svg}\n", encoding="utf-8")
                written.append(path)
    return written


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ConfigError(str(path), f"cannot be written: {e.strerror}") from None
