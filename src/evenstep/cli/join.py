"""`evenstep join`: add a worker on this machine to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from evenstep.cli.duration import duration
from evenstep.cli.endpoint import ask_status, find_coordinator, token_option
from evenstep.cli.ports import data_ports
from evenstep.cli.signals import StopRequests, echo, on_stop_signals
from evenstep.coordinate.client import UnreachableError, await_coordinator
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.launch.environment import CoordinatorAddress
from evenstep.launch.local import worker_environment
from evenstep.launch.logs import show_log
from evenstep.strict import require_name

ENDING = ("finishing", "stopping", "ended")  # states in which a run admits no workers


@click.command("join", context_settings={"allow_interspersed_args": False})
@click.argument("run", metavar="HOST:PORT")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--address",
    help="Where other workers reach this one.  [default: the local address towards HOST]",
)
@click.option(
    "--wait",
    "wait_s",
    default="2m",
    show_default=True,
    type=duration,
    metavar="DURATION",
    help="How long to wait for a coordinator that does not answer: 90s, 10m, 1h.",
)
@click.option(
    "--notice",
    metavar="NAME[:KEY=VALUE]",
    help="Leave when the cloud says that it takes this machine away: aws, gcp, azure or your own.",
)
@token_option
@click.pass_context
def join_command(
    ctx: click.Context,
    run: str,
    script: Path,
    args: tuple[str, ...],
    address: str | None,
    wait_s: float,
    notice: str | None,
    token_file: Path | None,
) -> None:
    """Start SCRIPT ARGS here as a worker of the run at HOST:PORT (or in a run's folder).

    Options of join go before SCRIPT. On Ctrl-C, SIGTERM or SIGHUP the worker leaves at the end of
    a step; a second one kills it.

    \b
    Exit codes:
      0    the run has been trained to the end
      75   this worker's part ended before: it was asked to leave, was refused or lost its
           place, the run stopped, or no coordinator answered within --wait. The run may go
           on: join again
      2    a wrong option, token or script path
      else the script's own; 128 + N if signal N killed it
    """
    show_log()
    on_stop_signals(ctx, _stop_waiting)
    if notice is not None:
        # Imported here: it imports HTTP, for which --help need not wait.
        from evenstep.launch.notices.watch import make_notice

        make_notice(require_name("--notice", notice))  # the worker makes its own
    try:
        coordinator, told, reachable = await_coordinator(lambda: _reach(run, token_file), wait_s)
    except UnreachableError as e:
        echo(f"evenstep: {e}")
        ctx.exit(os.EX_TEMPFAIL)
    if told["trained_to_end"]:
        echo(f"evenstep: the run at {coordinator} has been trained to the end")
        return
    env = worker_environment(
        os.environ,
        coordinator=str(coordinator),
        token_file=coordinator.folder and coordinator.folder / "token",
        address=address or reachable,
    )
    if coordinator.folder is None:  # other users cannot read the environment
        env["EVENSTEP_TOKEN"] = f"{coordinator.token} {coordinator.fingerprint}".rstrip()
    if notice is not None:
        env["EVENSTEP_NOTICE"] = notice
    env["EVENSTEP_WAIT"] = f"{wait_s:g}"
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

    on_stop_signals(ctx, leave)
    code = worker.wait()
    if requests.num == 1 and code == -signal.SIGTERM:
        ctx.exit(os.EX_TEMPFAIL)  # asked to leave before its script had joined
    ctx.exit(128 - code if code < 0 else code)


def _reach(run: str, token_file: Path | None) -> tuple[CoordinatorAddress, dict[str, Any], str]:
    """The coordinator, its status, and this host's address. Checks the token, too."""
    coordinator = find_coordinator(run, token_file)
    told, reachable = ask_status(coordinator)
    if told["state"] in ENDING and not told["trained_to_end"]:
        state = f"its state is `{told['state']}`"
        raise UnreachableError(f"the run at {coordinator} takes no workers: {state}.")
    return coordinator, told, reachable


def _stop_waiting(number: int, _: FrameType | None) -> NoReturn:
    """There is no worker yet that could leave."""
    echo(f"evenstep: {signal.Signals(number).name}: waiting no longer")
    raise SystemExit(os.EX_TEMPFAIL)
