"""`evenstep join`: a worker of this machine for a run that goes on elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import click

from evenstep.cli.place import locate, own_address, token_option
from evenstep.cli.signals import Requests
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.launch.local import worker_environment


@click.command("join", context_settings={"allow_interspersed_args": False})
@click.argument("where", metavar="HOST:PORT")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--address",
    help="At which the other workers reach this one.  [default: that which reaches HOST]",
)
@token_option
@click.pass_context
def command(
    ctx: click.Context,
    where: str,
    script: Path,
    args: tuple[str, ...],
    address: str | None,
    token_file: Path | None,
) -> None:
    """Start SCRIPT ARGS here as a worker of the run at HOST:PORT (or in a run's folder).

    Options of join go before SCRIPT. Ctrl-C or SIGTERM lets the worker leave at a step's end; a
    second one ends it. The exit code is the script's.
    """
    there = locate(where, token_file)
    mine = own_address(there)  # a wrong token is told here, not in a traceback of the script
    env = worker_environment(
        os.environ, coordinator=str(there), address=address or mine, tls_ca=there.tls_ca
    )
    env["EVENSTEP_TOKEN"] = there.token  # the environment is only ours to read
    env.pop("EVENSTEP_WORKER", None)
    worker = subprocess.Popen(
        die_with_parent([sys.executable, str(script), *args]),
        env=env,
        start_new_session=True,
    )
    requests = Requests()

    def leave(number: int, _: FrameType | None) -> None:
        if not requests.count_signal():
            return
        again = requests.num > 1
        does = "killed" if again else "leaving at the step's end; again to kill"
        click.echo(f"evenstep: {signal.Signals(number).name}: {does}", err=True)
        os.killpg(worker.pid, signal.SIGKILL) if again else worker.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    code = worker.wait()
    ctx.exit(128 - code if code < 0 else code)
