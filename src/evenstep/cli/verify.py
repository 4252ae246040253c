"""`evenstep verify`: does a script train the same on uneven workers as alone?"""

from __future__ import annotations

from pathlib import Path

import click

from evenstep.verify.run import Script, ScriptFailedError, verify

WORDS = {True: "agree", False: "DIFFER", None: "unknown"}
DIFFERENT, UNKNOWN = 1, 3


@click.command(
    "verify", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--shares", default="5,2,1", show_default=True, help="One number per worker.")
@click.pass_context
def command(
    ctx: click.Context, script: Path, args: tuple[str, ...], steps: int, shares: str
) -> None:
    """Train a few steps of SCRIPT alone and on uneven workers, and compare.

    SCRIPT is started as `python SCRIPT ARGS`; options of verify go before it. The batch is dealt to
    the workers in proportion to --shares, which are handed on from worker to worker every step.
    Exit code 0: data, gradients and parameters agree. 1: they do not, or the script fails. 3: it
    cannot be told, since the script draws at random.
    """
    numbers, run = _numbers(shares), Script(script, args)
    click.echo(f"{script}: {steps} steps alone, and on workers with shares as {shares}")
    agree = []
    try:
        for finding in verify(run, num_steps=steps, shares=numbers):
            click.echo(f"{finding.subject:10}  {WORDS[finding.agrees]:7}  {finding.message}")
            agree.append(finding.agrees)
    except ScriptFailedError as e:
        click.echo(e)  # as it is: a traceback is not one line
        ctx.exit(DIFFERENT)
    ctx.exit(DIFFERENT if False in agree else UNKNOWN if None in agree else 0)


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) < 2 or not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"expected as 5,2,1, got {text!r}", param_hint="--shares")
    numbers = [int(part) for part in parts]
    if not any(numbers):
        raise click.BadParameter("somebody must have a share", param_hint="--shares")
    return numbers
