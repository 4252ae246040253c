"""`evenstep verify`: check that a script trains the same on uneven workers as alone."""

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
def verify_command(
    ctx: click.Context, script: Path, args: tuple[str, ...], steps: int, shares: str
) -> None:
    """Train a few steps of SCRIPT alone and on uneven workers, and compare.

    SCRIPT runs as `python SCRIPT ARGS`; options of verify go before it. The batch is divided in
    proportion to --shares, which rotate among the workers every step. Exit code 0: data, gradients
    and parameters agree. 1: they differ, or the script fails. 3: unknown, because the script draws
    random numbers.
    """
    numbers, run = _parse_shares(shares), Script(script, args)
    click.echo(f"{script}: {steps} steps alone, and on workers with shares as {shares}")
    agree = []
    try:
        for finding in verify(run, num_steps=steps, shares=numbers):
            click.echo(f"{finding.subject:10}  {WORDS[finding.agrees]:7}  {finding.message}")
            agree.append(finding.agrees)
    except ScriptFailedError as e:
        click.echo(e)  # a traceback, with its line breaks
        ctx.exit(DIFFERENT)
    ctx.exit(DIFFERENT if False in agree else UNKNOWN if None in agree else 0)


def _parse_shares(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) < 2 or not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"expected a list like 5,2,1, got {text!r}", param_hint="--shares")
    numbers = [int(part) for part in parts]
    if not any(numbers):
        raise click.BadParameter("at least one share must be above 0", param_hint="--shares")
    return numbers
