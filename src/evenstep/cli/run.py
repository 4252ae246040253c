"""`evenstep run`: train a script with a coordinator, and workers here or on an engine."""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from evenstep.cli.duration import duration
from evenstep.cli.engine import choose_engine, worker_prices
from evenstep.cli.local_run import LocalRun
from evenstep.cli.page_beside import check_page
from evenstep.cli.report import REPORT
from evenstep.cli.signals import discard_unwritable, echo
from evenstep.config import Settings
from evenstep.coordinate.addresses import outward_address
from evenstep.coordinate.events import MAX_WORKERS, Terms
from evenstep.coordinate.run_folder import TLS, RunFolder
from evenstep.coordinate.salvage import read_header
from evenstep.coordinate.tls import make_certificate, pem_fingerprint, server_context, shortened
from evenstep.engine import assemble
from evenstep.errors import ConfigError
from evenstep.launch.environment import read_credentials
from evenstep.launch.logs import show_log
from evenstep.observe.feed import SinkFeed
from evenstep.observe.sinks import open_sinks
from evenstep.observe.summary import summary
from evenstep.strict import build, override, require_name
from evenstep.types import MOST_SAMPLES

log = logging.getLogger("evenstep")

FAILED = 1
LOOPBACK = "127.0.0.1"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=0)
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("run", context_settings={"allow_interspersed_args": False, "show_default": True})
@click.argument("script", type=FILE)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--workers",
    metavar="N|MIN:MAX",
    help="Workers to start here; MIN:MAX also bounds the run. 0 or 0:MAX: none, it waits for "
    "`evenstep join`.  [default: 1]",
)
@click.option(
    "--on",
    metavar="ENGINE",
    default="local",
    help="Where workers run: local, slurm, ray or your own.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="SPEC",
    help="What a worker gets of the engine: cpu=8, gpu=A100:4, with memory=64G, price=1.2 or the "
    "engine's own options after commas. Repeat it for other kinds.",
)
@click.option("--partition", metavar="NAME", help="Of Slurm, for all kinds.")
@click.option("--address", help="Of a Ray cluster.  [default: auto]")
@click.option(
    "--pending",
    "pending_s",
    default="10m",
    type=duration,
    metavar="DURATION",
    help="Give up a request that the engine has not met for so long.",
)
@click.option("--min", type=click.IntRange(min=1), help="Pause below this many workers.")
@click.option("--run", "folder", type=click.Path(path_type=Path), help="Folder for a new run.")
@click.option("--resume", type=click.Path(path_type=Path), help="Folder of a run to resume.")
@click.option("--restarts", default=3, type=COUNT, help="Lost workers to replace, in total.")
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
    type=COUNT,
    help="Surplus workers to keep ready, so that they can rejoin without start-up.",
)
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a setting.")
@click.option(
    "--page", is_flag=True, help="Serve a live page of the run on loopback, and print its URL."
)
@click.option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="NAME:TARGET",
    help="Write the run's figures every 5 s: jsonlines:FILE, tensorboard:FOLDER, prometheus:FILE.",
)
@click.option(
    "--host",
    help="Address to listen on.  [default: 127.0.0.1; with --on, this host's outward address]",
)
@click.option(
    "--port",
    default=0,
    show_default=False,
    type=click.IntRange(0, 65535),
    help="0 picks a free port.",
)
@click.option(
    "--lease",
    default=3600.0,
    type=POSITIVE,
    help="Seconds that workers train on without a coordinator.",
)
@click.option(
    "--silence",
    default=5.0,
    type=POSITIVE,
    help="Seconds without a sign of life, at least 3, after which workers are tested or replaced.",
)
@click.option(
    "--checkpoint-every", default=60.0, type=POSITIVE, help="Seconds between checkpoints."
)
@click.option("--keep", default=3, type=click.IntRange(min=1), help="Checkpoints to keep.")
@click.option(
    "--token-file",
    type=FILE,
    help="The token of a new run, as in a secret that its workers have, too.  [default: random]",
)
@click.option(
    "--hand-over",
    is_flag=True,
    help="End at once on SIGTERM, with code 75, and leave the workers training for a coordinator "
    "that resumes the run.",
)
@click.option("--tls", is_flag=True, help="Encrypt control connections: makes a certificate.")
@click.option("--tls-cert", type=FILE, help="The same with a certificate of your own (PEM).")
@click.option("--tls-key", type=FILE, help="Private key of that certificate (PEM).")
@click.pass_context
def run_command(ctx: click.Context, /, script: Path, args: tuple[str, ...], **options: Any) -> None:
    """Train SCRIPT ARGS on workers that may join, leave and fail.

    Each worker runs `python SCRIPT ARGS`; options of run go before SCRIPT. Ctrl-C, SIGTERM, a
    closed terminal (SIGHUP) or output that nobody reads any more (`| head`) stops the run
    gracefully, with a checkpoint; a second signal, at least a second later, kills it. Exit code 0:
    trained to the end, or stopped gracefully. 1: the script failed, or no worker is left. 75:
    SIGTERM with --hand-over.
    """
    if options["page"]:
        check_page()
    _check_tls(options["tls"], options["tls_cert"], options["tls_key"])
    old = _open_folder(options["folder"], options["resume"])
    header = read_header(old.journal) if old is not None else None
    at_start = str(header.about.get("workers", "")) if header is not None else ""
    workers = _worker_counts(options["workers"], at_start)
    flags = []
    if options["policy"] is not None:
        flags.append(f"policy={require_name('--policy', options['policy'])}")
    if options["min"]:
        flags.append(f"workers.min={options['min']}")
    if options["scale"] is not None:
        flags.append(_scaling_setting(require_name("--scale", options["scale"]), workers))
    sets = (*flags, *options["sets"])
    settings = _check_settings(sets, workers.sets, resumed=header is not None)
    engine = choose_engine(options)
    kinds = tuple(engine.kinds.values()) if engine else ()
    prices = worker_prices(options["prices"], kinds)
    host = options["host"] or (outward_address("0.0.0.0") if engine else "") or LOOPBACK
    new = options["folder"] or _new_folder(script)
    token = _given_token(options["token_file"], old)
    folder = old or RunFolder.make(
        new, *_new_certificate(options["tls"], options["tls_cert"]), token=token
    )
    try:
        tls = _server_tls(folder, options["tls_cert"], options["tls_key"], asked=options["tls"])
        terms = Terms(
            run=str(folder.path),
            lease_s=options["lease"],
            silence_s=options["silence"],
            checkpoint_every_s=options["checkpoint_every"],
            checkpoints_kept=options["keep"],
            sets=(*workers.sets, *sets),
            min_workers=workers.min,
            max_workers=workers.max,
            restarts=options["restarts"],
            spares=options["spares"],
            prices=prices,
            flops=tuple((k.name, k.flops) for k in kinds if k.flops is not None),
            awaits_joiners=workers.start == 0,
            queues=engine is not None,
        )
        show_log()
        # MIN:MAX asks for no particular size, and neither does a run resumed without --workers.
        size_asked = workers.start == 0 or ":" not in (options["workers"] or ":")
        if 0 < workers.start < settings.workers.min:
            log.warning("%s", _too_few(workers.start, settings.workers.min, folder.path))
        command = [str(script), *args]
        sinks = SinkFeed(open_sinks(options["sinks"], "--sink"))
        run = LocalRun(
            folder,
            terms,
            workers.start,
            command,
            size_asked=size_asked,
            sinks=sinks,
            with_page=options["page"],
            hands_over=options["hand_over"],
            engine=engine,
        )
        ending = asyncio.run(run.run_to_end(host, options["port"], tls))
    except BaseException:
        if old is None and not folder.address():  # the coordinator never listened
            folder.discard()
        raise
    finally:
        folder.close()
    newest = folder.newest_checkpoint()
    saved = f"newest checkpoint: {newest}" if newest else "no checkpoint"
    why = ending.why.rstrip(".")
    echo(f"evenstep: {why}; run folder: {folder.path}; {saved}")
    lines = summary(run.totals)
    for line in lines:
        echo(f"  {line}")
    if lines:
        echo(f"  {'journal':<14}{folder.journal}")
        echo(f"  {'report':<14}`evenstep report {folder.path}` writes {folder.path / REPORT}")
    if ending.told:
        echo(ending.told.rstrip())
    discard_unwritable()
    ctx.exit(0 if ending.ok else FAILED)


def _open_folder(new: Path | None, old: Path | None) -> RunFolder | None:
    if new is not None and old is not None:
        raise ConfigError("--run, --resume", "give one of them: a new folder, or one to resume")
    return RunFolder.open(old) if old is not None else None


def _new_folder(script: Path) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{now}-{script.stem}"


def _given_token(file: Path | None, old: RunFolder | None) -> str:
    """The token of --token-file; a resumed run must have the same one. Empty: none is given."""
    token = read_credentials(file).token if file is not None else ""
    if token and old is not None and not secrets.compare_digest(token, old.token):
        raise ConfigError(
            "--token-file", f"is not the token of the run in {old.path}, which keeps its own"
        )
    return token


def _too_few(num_workers: int, needed: int, folder: Path) -> str:
    return (
        f"--workers starts {num_workers} of the {needed} workers that the run needs (workers.min). "
        f"It pauses until {needed - num_workers} more have joined: `evenstep scale {folder} "
        f"{needed}` starts them here, `evenstep join` on another machine"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """How many workers to start, and the bounds of the run."""

    start: int
    min: int
    max: int

    @property
    def sets(self) -> tuple[str, ...]:
        """The bounds as settings; none if the run is unbounded."""
        if self.max == MAX_WORKERS:
            return ()
        return f"workers.max={self.max}", f"scaling.min_workers={self.min}"


def _worker_counts(given: str | None, at_start: str) -> WorkerCounts:
    """From --workers and, for a resumed run, its value `at_start`, whose bounds stay."""
    start, bound = _parse_workers(given or at_start or "1")
    lower, upper = _parse_workers(at_start) if at_start else (start, bound)
    if bound and (start, bound) != (lower, upper):
        raise ConfigError(
            "--workers",
            f"MIN:MAX stays as the run began, {at_start}; give a single number to choose how many "
            f"to start: got {given}",
        )
    if upper and start > upper:
        raise ConfigError("--workers", f"at most {upper}, as the run began: got {start}")
    fewest = max(1, lower) if upper else 1
    return WorkerCounts(start=start, min=fewest, max=upper or MAX_WORKERS)


def _parse_workers(text: str) -> tuple[int, int]:
    """N as (N, 0), MIN:MAX as (MIN, MAX)."""
    lower, colon, upper = text.partition(":")
    if not lower.isdecimal() or (colon and not upper.isdecimal()):
        raise ConfigError("--workers", f"expected N or MIN:MAX, got {text!r}")
    if colon and not (int(lower) <= int(upper) and int(upper) > 0):
        raise ConfigError("--workers", f"need MIN <= MAX and MAX >= 1, got {text!r}")
    return int(lower), int(upper or 0)


def _scaling_setting(text: str, workers: WorkerCounts) -> str:
    """--scale as a setting: the heuristic and its options."""
    few = workers.start
    if few == workers.max:
        raise ConfigError("--scale", f"needs a range of sizes, such as --workers {few}:{few + 4}")
    name, _, option = text.partition(":")
    choice: dict[str, Any] = {"name": name}
    if option:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError("--scale", f"expected NAME:KEY=VALUE, got {text!r}")
        try:
            choice[key] = float(value)
        except ValueError:
            choice[key] = value
    return f"scaling.heuristic={msgspec.json.encode(choice).decode()}"


def _check_settings(sets: tuple[str, ...], bounds: tuple[str, ...], *, resumed: bool) -> Settings:
    """Settings of the command line, validated without the values that only the script knows."""
    if sets and resumed:
        raise ConfigError(sets[0].partition("=")[0], "stays as the run's journal has it")
    # Placeholders for what only the script knows: its batch and the length of the job.
    plain = override({"batch": {"size": MOST_SAMPLES}, "samples": 1}, (*bounds, *sets))
    settings = build(Settings, plain, source="--set")
    if settings.batch.size != MOST_SAMPLES:
        raise ConfigError("batch.size", "belongs to the script: set it there", "--set")
    assemble(settings)
    return settings


def _check_tls(make: bool, certificate: Path | None, key: Path | None) -> None:
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert, --tls-key", "give both, or neither")
    if make and certificate is not None:
        raise ConfigError("--tls, --tls-cert", "give one of them: a new certificate, or your own")


def _new_certificate(make: bool, own: Path | None) -> tuple[str, bytes]:
    """Of a new run: the certificate's fingerprint, and what to keep in its folder."""
    if own is not None:
        return pem_fingerprint(own, own.read_bytes()), b""
    if not make:
        return "", b""
    pem = make_certificate()
    return pem_fingerprint(Path(TLS), pem), pem


def _server_tls(
    folder: RunFolder, certificate: Path | None, key: Path | None, *, asked: bool
) -> ssl.SSLContext | None:
    """The TLS context of a run: with the certificate that its token file names, or no other."""
    if not folder.fingerprint:
        if asked or certificate is not None:
            raise ConfigError(
                "--tls",
                "the run began without TLS, and its workers would not find it any more: resume it "
                "without TLS, or begin a new run",
            )
        return None
    path = certificate or folder.path / TLS
    try:
        found = pem_fingerprint(path, path.read_bytes())
    except OSError as e:
        raise ConfigError(
            str(path),
            f"cannot be read: {e.strerror}. Give the certificate that the run began with by "
            "--tls-cert and --tls-key. If it is lost, remove the second line of "
            f"{folder.path / 'token'}: the run then goes on without TLS",
        ) from None
    if found != folder.fingerprint:
        raise ConfigError(
            str(path),
            f"is certificate {shortened(found)}; the run began with "
            f"{shortened(folder.fingerprint)}, which is all that its workers accept",
        )
    return server_context(path, key)
