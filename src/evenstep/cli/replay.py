"""`evenstep replay`: a recorded run, decided again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from evenstep.config import Settings
from evenstep.coordinate.events import AnyEffect, Heard, Reply, Send
from evenstep.coordinate.record import (
    DivergedError,
    MembershipRecord,
    RecordedBrain,
    read_record,
    replay_membership,
    story,
)
from evenstep.coordinate.run_folder import JOURNAL, MEMBERSHIP
from evenstep.journal import Records, read
from evenstep.messages import Generation
from evenstep.simulate.replay import replay
from evenstep.strict import build, override
from evenstep.types import AnyAction, Launch, Plan, Regroup, StepDone, listed

SHOWN = 3
"""How many different decisions are shown."""


@click.command("replay")
@click.argument("journal", type=click.Path(path_type=Path))
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change the settings.")
@click.option("--worker", help="Show what happened to one worker of a run's folder instead.")
@click.pass_context
def replay_command(
    ctx: click.Context, journal: Path, sets: tuple[str, ...], worker: str | None
) -> None:
    """Decide the run recorded in JOURNAL again and show where decisions differ.

    JOURNAL is a file, or the folder of a run. Without --set a difference is a fault, and the exit
    code is 1; of a folder, membership is replayed too: who was announced, told and launched. With
    --set a difference is the answer: what would have been decided on the same events.
    """
    membership = journal / MEMBERSHIP
    if worker is not None:
        for told in story(read_record(membership), worker):
            effects = "; ".join(map(_short_effect, told.effects))
            click.echo(f"{told.at_s:.3f} s  {_input(told)}{': ' * bool(effects)}{effects}")
        return
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
            what = type(record.event).__name__
            what += f" {record.event.step}" if isinstance(record.event, StepDone) else ""
            click.echo(f"record {num}, at {record.at_s:.3f} s, {what}:")
            _show(map(_short, record.actions), map(_short, actions), "nothing")
        if not sets:
            ctx.exit(1)
        if not first_plan and _plans(actions) != _plans(record.actions):
            first_plan = f"record {num}"
    if records.torn:
        click.echo("the last line broke off and was left out")
    if not different:
        click.echo(f"{num} records, each decided as recorded")
        if not sets and membership.exists() and not _replay_membership(membership, was, records):
            ctx.exit(1)
        return
    click.echo(
        f"{different} of {num} records are decided differently; first different plan: "
        f"{first_plan or 'none'}"
    )
    for name, kind in (("plans", Plan), ("regroups", Regroup), ("launches", Launch)):
        click.echo(f"{name:9s} {before[kind]} recorded, {after[kind]} now")


def _replay_membership(path: Path, settings: Settings, journal: Records) -> bool:
    """Handle the recorded inputs again; False at the first one with other effects."""
    num, numbers = 0, set()
    try:
        for record, effects in replay_membership(
            read_record(path), RecordedBrain(settings, journal)
        ):
            num += 1
            if effects != record.effects:
                same = [a == b for a, b in zip(record.effects, effects, strict=False)]
                first = [*same, False].index(False)
                before, now = record.effects[first:], effects[first:]
                click.echo(f"membership record {num}, at {record.at_s:.3f} s, {_input(record)}:")
                _show(map(_short_effect, before), map(_short_effect, now), "nothing more")
                return False
            sent = [e.message for e in effects if isinstance(e, Send)]
            numbers |= {m.number for m in sent if isinstance(m, Generation)}
    except DivergedError as e:
        click.echo(f"membership record {num + 1}: {e}")
        return False
    click.echo(
        f"{num} membership records with {len(numbers)} announced generations, each handled as "
        "recorded"
    )
    return True


def _show(recorded: Iterable[str], now: Iterable[str], nothing: str) -> None:
    click.echo(f"  recorded  {'; '.join(recorded) or nothing}")
    click.echo(f"  now       {'; '.join(now) or nothing}")


def _input(record: MembershipRecord) -> str:
    event = record.event
    name = type(event).__name__
    if isinstance(event, Heard):
        name += f" {type(event.message).__name__}"
    worker = getattr(event, "worker", "")
    return f"{name} of {worker}" if worker else name


def _short_effect(effect: AnyEffect) -> str:
    """One effect in one line, the workers of a large roster cut short."""
    match effect:
        case Send(workers=workers, message=Generation() as told):
            how = "at a step's end" if told.planned else "at once"
            shown = f"generation {told.number} {how}: {listed(told.roster)} ({told.reason})"
            return f"announce to {listed(workers)} {shown}"
        case Send(workers=workers, message=message):
            return f"send {listed(workers)} {message}"
        case Reply(message=message):
            return f"reply {message}"
    return str(effect)


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


def _short(action: AnyAction) -> str:
    """One action in one line, the shares of many workers cut short."""
    if isinstance(action, Plan):
        several = [f"{w} {n}" for w, n in action.shares.items()]
        shares = ", ".join(several[:8]) + (", ..." if len(several) > 8 else "")
        return f"Plan from step {action.from_step}: {shares} ({action.reason})"
    return f"{type(action).__name__} ({action.reason})"
