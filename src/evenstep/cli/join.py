"""`evenstep join`: add a worker on this machine to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import click

from evenstep.cli.endpoint import find_coordinator, reachable_address, token_option
from evenstep.cli.ports import data_ports
from evenstep.cli.signals import StopRequests, echo, stop_signals
from evenstep.coordinate.client import UnreachableError, await_coordinator
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.launch.local import worker_environment


@click.command("join", context_settings={"allow_interspersed_args": False})
@click.argument("run", metavar="HOST:PORT")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--address",
    help="Where other workers reach this one.  [default: the local address towards HOST]",
)
@token_option
@click.pass_context
def join_command(
    ctx: click.Context,
    run: str,
    script: Path,
    args: tuple[str, ...],
    address: str | None,
    token_file: Path | None,
) -> None:
    """Start SCRIPT ARGS here as a worker of the run at HOST:PORT (or in a run's folder).

    Options of join go before SCRIPT. On Ctrl-C, SIGTERM or SIGHUP the worker leaves at the end of
    a step; a second one kills it. The exit code is the script's, or 75 if no coordinator answers
    for two minutes.
    """
    coordinator = find_coordinator(run, token_file)
    # Even with --address: it checks the token.
    try:
        reachable = await_coordinator(lambda: reachable_address(coordinator))
    except UnreachableError as e:
        echo(f"evenstep: {e}")
        ctx.exit(os.EX_TEMPFAIL)
    env = worker_environment(
        os.environ,
        coordinator=str(coordinator),
        token_file=coordinator.folder and coordinator.folder / "token",
        address=address or reachable,
    )
    if coordinator.folder is None:  # other users cannot read the environment
        env["EVENSTEP_TOKEN"] = f"{coordinator.token} {coordinator.fingerprint}".rstrip()
    env.pop("EVENSTEP_WORKER", None)
    echo(f"evenstep: {data_ports(env.get('EVENSTEP_ADDRESS', '127.0.0.1'))}")
    command = die_with_parent([sys.executable, str(script), *args])
    worker = subprocess.Popen(command, env=env, start_new_session=True)
    requests = StopRequests()

    def leave(number: int, _: FrameType | None) -> None:
        if not requests.count_signal():
            return
        kill = requests.num > 1
        action = "killed" if kill else "leaving at the end of the step; send it again to kill"
        echo(f"evenstep: {signal.Signals(number).name}: {action}")
        os.killpg(worker.pid, signal.SIGKILL) if kill else worker.terminate()

    for number in stop_signals():
        signal.signal(number, leave)
    code = worker.wait()
    ctx.exit(128 - code if code < 0 else code)
