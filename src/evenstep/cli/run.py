"""`evenstep run`: train a script with a coordinator and workers on this machine."""

from __future__ import annotations

import asyncio
import datetime
import logging
from pathlib import Path
from typing import Any

import click

from evenstep.cli.local_run import LocalRun
from evenstep.cli.options import require_name
from evenstep.cli.run_options import (
    check_settings,
    scaling_setting,
    server_tls,
    worker_counts,
    worker_prices,
)
from evenstep.coordinate.events import Terms
from evenstep.coordinate.run_folder import RunFolder
from evenstep.errors import ConfigError
from evenstep.journal import read
from evenstep.launch.logs import show_log

log = logging.getLogger("evenstep")

FAILED = 1
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("script", type=FILE)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--workers",
    metavar="N|MIN:MAX",
    help="Workers to start here; MIN:MAX also bounds the run.  [default: 1]",
)
@click.option("--min", type=click.IntRange(min=1), help="Pause below this many workers.")
@click.option("--run", "folder", type=click.Path(path_type=Path), help="Folder for a new run.")
@click.option("--resume", type=click.Path(path_type=Path), help="Folder of a run to resume.")
@click.option(
    "--restarts",
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    help="Lost workers to replace, in total.",
)
@click.option("--policy", help="How to divide the batch among workers.")
@click.option(
    "--scale",
    metavar="NAME[:KEY=VALUE]",
    help="Search for the best number of workers: efficiency, utility:linear=Y0,X0 or your own.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="[KIND=]PRICE",
    help="Price of a worker-hour, for all kinds or for one.  [default: 1]",
)
@click.option(
    "--spares",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Surplus workers to keep ready, so that they can rejoin without start-up.",
)
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a setting.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="0 picks a free port.")
@click.option(
    "--lease",
    default=3600.0,
    show_default=True,
    type=POSITIVE,
    help="Seconds that workers train on without a coordinator.",
)
@click.option(
    "--checkpoint-every",
    default=60.0,
    show_default=True,
    type=POSITIVE,
    help="Seconds between checkpoints.",
)
@click.option(
    "--keep", default=3, show_default=True, type=click.IntRange(min=1), help="Checkpoints to keep."
)
@click.option("--tls-cert", type=FILE, help="Serve TLS with this certificate (PEM).")
@click.option("--tls-key", type=FILE, help="Private key of the certificate (PEM).")
@click.pass_context
def run_command(ctx: click.Context, /, script: Path, args: tuple[str, ...], **options: Any) -> None:
    """Train SCRIPT ARGS on workers that may join, leave and fail.

    Each worker runs `python SCRIPT ARGS`; options of run go before SCRIPT. Ctrl-C or SIGTERM stops
    the run gracefully, with a checkpoint; a second one, at least a second later, kills it. Exit
    code 0: trained to the end, or stopped gracefully. 1: the script failed, or no worker is left.
    """
    old = _open_folder(options["folder"], options["resume"])
    workers = worker_counts(options["workers"], _workers_at_start(old))
    flags = []
    if options["policy"] is not None:
        flags.append(f"policy={require_name('--policy', options['policy'])}")
    if options["min"]:
        flags.append(f"workers.min={options['min']}")
    if options["scale"] is not None:
        flags.append(scaling_setting(require_name("--scale", options["scale"]), workers))
    sets = (*flags, *options["sets"])
    resumed = old is not None and old.journal.exists()
    settings = check_settings(sets, workers.sets, resumed=resumed)
    tls = server_tls(options["tls_cert"], options["tls_key"])
    prices = worker_prices(options["prices"])
    folder = old or RunFolder.make(options["folder"] or _new_folder(script))
    try:
        folder.write_tls_ca(options["tls_cert"])
        terms = Terms(
            run=str(folder.path),
            lease_s=options["lease"],
            checkpoint_every_s=options["checkpoint_every"],
            checkpoints_kept=options["keep"],
            sets=(*workers.sets, *sets),
            min_workers=workers.min,
            max_workers=workers.max,
            restarts=options["restarts"],
            spares=options["spares"],
            prices=prices,
        )
        show_log()
        # MIN:MAX asks for no particular size, and neither does a run resumed without --workers.
        size_asked = ":" not in (options["workers"] or ":")
        if max(1, workers.start) < settings.workers.min:
            log.warning("%s", _too_few(workers.start, settings.workers.min, folder.path))
        command = [str(script), *args]
        run = LocalRun(folder, terms, workers.start, command, size_asked=size_asked)
        ending = asyncio.run(run.run_to_end(options["host"], options["port"], tls))
    except BaseException:
        if old is None and not folder.address():  # the coordinator never listened
            folder.discard()
        raise
    finally:
        folder.close()
    newest = folder.newest_checkpoint()
    saved = f"newest checkpoint: {newest}" if newest else "no checkpoint"
    why = ending.why.rstrip(".")
    click.echo(f"evenstep: {why}; run folder: {folder.path}; {saved}", err=True)
    if ending.told:
        click.echo(ending.told.rstrip(), err=True)
    ctx.exit(0 if ending.ok else FAILED)


def _open_folder(new: Path | None, old: Path | None) -> RunFolder | None:
    if new is not None and old is not None:
        raise ConfigError("--run, --resume", "give one of them: a new folder, or one to resume")
    return RunFolder.open(old) if old is not None else None


def _new_folder(script: Path) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{now}-{script.stem}"


def _workers_at_start(folder: RunFolder | None) -> str:
    """The --workers of a run that is resumed; empty for a new run."""
    if folder is None or not folder.journal.exists():
        return ""
    return str(read(folder.journal)[0].about.get("workers", ""))


def _too_few(num_workers: int, needed: int, folder: Path) -> str:
    return (
        f"--workers starts {num_workers} of the {needed} workers that the run needs (workers.min). "
        f"It pauses until {needed - num_workers} more have joined: `evenstep scale {folder} "
        f"{needed}` starts them here, `evenstep join` on another machine"
    )
