"""`evenstep page`: a run in a browser."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from evenstep.cli.endpoint import token_option
from evenstep.cli.operators import ask_coordinator
from evenstep.cli.page_beside import check_page
from evenstep.coordinate.addresses import interface_of
from evenstep.coordinate.run_folder import JOURNAL
from evenstep.errors import ConfigError, JournalError
from evenstep.journal import read
from evenstep.launch.logs import show_log

log = logging.getLogger("evenstep")


@click.command("page", context_settings={"show_default": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port",
    default=0,
    show_default=False,
    type=click.IntRange(0, 65535),
    help="0 picks a free port.",
)
@click.option("--commands", is_flag=True, help="Let the page scale, drain and stop the run.")
@token_option
def page_command(run: Path, host: str, port: int, commands: bool, token_file: Path | None) -> None:
    """Show RUN in a browser: the folder of a run, live or over, or a journal file.

    Prints a URL with a fresh key. Who has it may look and, with --commands, scale, drain and stop
    the run. Ctrl-C closes the page and leaves the run alone.
    """
    check_page()
    from evenstep.page.access import write_key
    from evenstep.page.site import Site
    from evenstep.page.watched import Watched

    is_folder = run.is_dir()
    journal = run / JOURNAL if is_folder else run
    _check(run, journal, is_folder=is_folder)
    if commands and not is_folder:
        raise ConfigError("--commands", f"{run} is a journal; commands need the folder of a run")
    show_log()

    def ask(what: str, **about: Any) -> dict[str, Any]:
        return ask_coordinator(str(run), token_file, what, **about)

    watched = Watched(journal, name=run.absolute().name, ask=ask if is_folder else None)
    site = Site(watched, host=host, port=port, commands=commands)
    click.echo(site.url)
    sys.stdout.flush()
    log.info("serving %s at %s on %s: open to those who have its key; not encrypted",
             run, site.address, interface_of(host))  # fmt: skip
    if is_folder:
        try:
            log.info("programs may read it with the key in %s", write_key(run, site.keys.read))
        except OSError as e:
            log.warning("programs cannot read it: no file for their key: %s", e)
    with suppress(KeyboardInterrupt):
        asyncio.run(site.serve())


def _check(run: Path, journal: Path, *, is_folder: bool) -> None:
    """Refuse what is no run, or of another version, before a browser is opened for it."""
    if is_folder and not journal.exists():
        if not (run / "token").exists():
            raise ConfigError(
                str(run), "is not the folder of a run: it has no journal and no token"
            )
        return  # its first worker has not joined yet
    try:
        read(journal)
    except JournalError:
        if not (is_folder and not journal.stat().st_size):
            raise
