"""`evenstep replay`: a recorded run, decided again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from evenstep.config import Settings
from evenstep.coordinate.run import JOURNAL
from evenstep.journal import Record, read
from evenstep.simulate.replay import replay
from evenstep.strict import build, override
from evenstep.types import AnyAction, Launch, Plan, Regroup, StepDone

SHOWN = 3
"""How many different decisions are shown."""


@click.command("replay")
@click.argument("journal", type=click.Path(path_type=Path))
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change the settings.")
@click.pass_context
def replay_command(ctx: click.Context, journal: Path, sets: tuple[str, ...]) -> None:
    """Decide the run recorded in JOURNAL again and show where decisions differ.

    JOURNAL is a file, or the folder of a run. Without --set a difference is a fault, and the exit
    code is 1. With --set it is the answer: what would have been decided on the same events.
    """
    header, records = read(journal / JOURNAL if journal.is_dir() else journal)
    settings = build(Settings, override(_plain(header.settings), sets), source="--set")
    was = header.settings
    # A forecast is of the pace that its policy asked for, by the forecaster it had.
    anew = (settings.policy, settings.forecaster) != (was.policy, was.forecaster)
    num, different, first_plan = 0, 0, ""
    before: Counter[type[AnyAction]] = Counter()
    after: Counter[type[AnyAction]] = Counter()
    for record, actions in replay(records, settings, forecast_anew=anew):
        num += 1
        before.update(map(type, record.actions))
        after.update(map(type, actions))
        if actions == record.actions:
            continue
        different += 1
        if different <= SHOWN:
            click.echo(_difference(num, record, actions))
        if not sets:
            ctx.exit(1)
        if not first_plan and _plans(actions) != _plans(record.actions):
            first_plan = f"record {num}"
    if records.torn:
        click.echo("the last line broke off and was left out")
    if not different:
        click.echo(f"{num} records, each decided as recorded")
        return
    click.echo(
        f"{different} of {num} records are decided differently; first different plan: "
        f"{first_plan or 'none'}"
    )
    for name, kind in (("plans", Plan), ("regroups", Regroup), ("launches", Launch)):
        click.echo(f"{name:9s} {before[kind]} recorded, {after[kind]} now")


def _plain(settings: Settings) -> dict[str, Any]:
    """The settings as a user writes them: a plug's options beside its name."""

    def flat(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.keys() == {"name", "options"}:
            return {"name": data["name"], **data["options"]}
        return {key: flat(value) for key, value in data.items()}

    plain: dict[str, Any] = flat(msgspec.to_builtins(settings))
    return plain


def _plans(actions: tuple[AnyAction, ...]) -> list[dict[str, int]]:
    return [a.shares for a in actions if isinstance(a, Plan)]


def _difference(num: int, record: Record, actions: tuple[AnyAction, ...]) -> str:
    event = record.event
    what = type(event).__name__
    what += f" {event.step}" if isinstance(event, StepDone) else ""
    return (
        f"record {num}, at {record.at_s:.3f} s, {what}:\n"
        f"  recorded  {_list(record.actions)}\n"
        f"  now       {_list(actions)}"
    )


def _list(actions: tuple[AnyAction, ...]) -> str:
    return "; ".join(map(_short, actions)) or "nothing"


def _short(action: AnyAction) -> str:
    """One action in one line, the shares of many workers cut short."""
    if isinstance(action, Plan):
        several = [f"{w} {n}" for w, n in action.shares.items()]
        shares = ", ".join(several[:8]) + (", ..." if len(several) > 8 else "")
        return f"Plan from step {action.from_step}: {shares} ({action.reason})"
    return f"{type(action).__name__} ({action.reason})"
