"""A world's membership, handled again from what was recorded of it."""

from __future__ import annotations

from pathlib import Path

from evenstep.coordinate.events import Send
from evenstep.coordinate.record import (
    MembershipRecord,
    RecordedBrain,
    read_record,
    replay_membership,
)
from evenstep.journal import read
from evenstep.messages import Generation


def replayed(folder: Path) -> list[MembershipRecord]:
    """All records of a run, each of which has the same effects again."""
    records, brain = [], RecordedBrain()
    if (folder / "journal.jsonl").exists():
        header, decided = read(folder / "journal.jsonl")
        brain = RecordedBrain(header.settings, decided)
    for record, effects in replay_membership(read_record(folder / "membership.jsonl"), brain):
        assert effects == record.effects, record
        records.append(record)
    return records


def announced(records: list[MembershipRecord]) -> list[int]:
    """Numbers of the generations that were announced."""
    sent = [e.message for r in records for e in r.effects if isinstance(e, Send)]
    return list(dict.fromkeys(m.number for m in sent if isinstance(m, Generation)))
