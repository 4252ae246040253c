"""Recovers what it can of a run whose journal is damaged or gone.

A resume goes on from the last whole record before the damage or, if no journal can be used, from
checkpoints alone. Nothing is deleted, and the log says what was given up.
"""

from __future__ import annotations

import logging
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.coordinate.brain import Brain
from evenstep.coordinate.events import Opened, TookOver
from evenstep.coordinate.record import read_record
from evenstep.coordinate.run_folder import RunFolder
from evenstep.coordinate.term import Term
from evenstep.errors import JournalError, JournalFormatError
from evenstep.journal import Header, read, set_aside
from evenstep.messages import MOST
from evenstep.types import Steps

log = logging.getLogger("evenstep")

MIN_RECORD_BYTES = 64  # of a record with a new generation


class Restored(NamedTuple):
    """Where a run goes on."""

    clock_s: float = 0.0
    took_over: TookOver | None = None  # None: there is no journal to go on with
    generation: int = 0  # up to it, numbers may have been used
    untold: Steps = Steps()  # that are in the newest checkpoint, and not in the journal


def read_header(path: Path) -> Header | None:
    """The header of a journal; None if there is none that can be used."""
    try:
        return read(path)[0] if path.exists() else None
    except JournalError as e:
        if isinstance(e, JournalFormatError) or not e.line:  # not damage
            raise
        return None


def restore(brain: Brain, folder: RunFolder) -> Restored:
    """Go on with what is left in the run folder."""
    path, newest = folder.journal, folder.newest_checkpoint()
    generation = checkpoint_position(Path(newest))[1] if newest else 0
    saved = f"newest checkpoint: {Path(newest).name if newest else 'none'}"
    if read_header(path) is not None:
        clock_s, took_over, damage = brain.restore(path)
        if damage is not None:
            cluster, num_bytes = brain.cluster, damage.num_bytes
            generation = max(generation, cluster.generation + num_bytes // MIN_RECORD_BYTES + 1)
            log.error(
                "%s; %d lines from there on (%d bytes) are given up, the damaged file is %s. The "
                "run goes on from generation %d and step %d; %s",
                *(damage.problem, damage.num_lines, num_bytes, damage.aside.name),
                *(cluster.generation, cluster.step, saved),
            )
            _set_aside_record(folder)
        _check_record(folder)
        untold = untold_steps(brain, Path(newest)) if newest else Steps()
        return Restored(clock_s, took_over, generation, untold)
    if path.exists():
        num_bytes, problem = path.stat().st_size, f"{path}: has no complete header"
        aside = set_aside(path)
        generation += num_bytes // MIN_RECORD_BYTES + 1
        given_up = f"all of it is given up, the damaged file is {aside.name}"
    elif newest or folder.launched():
        problem, given_up = f"{path}: is missing", "all of it is given up"
    else:
        return Restored()  # the run never began
    log.error(
        "%s; %s. The run goes on from checkpoints alone, with the settings of the command line; %s",
        *(problem, given_up, saved),
    )
    _set_aside_record(folder)
    return Restored(generation=generation)


def _set_aside_record(folder: RunFolder) -> None:
    """The membership record counts the journal's records, which are fewer now."""
    if folder.membership.exists():
        set_aside(folder.membership)


def _check_record(folder: RunFolder) -> None:
    """Set a damaged membership record aside: lines after the damage could not be replayed."""
    if not folder.membership.exists():
        return
    try:
        for _ in read_record(folder.membership):
            pass
    except JournalError as e:
        log.error(
            "%s; the damaged file is %s. Nothing that the run needs is lost: a new record begins, "
            "and `evenstep replay` shows membership from here on",
            *(e, set_aside(folder.membership).name),
        )


def last_term(folder: RunFolder) -> Term:
    """The last term that checkpoints and the membership record know of, at least."""
    newest = folder.newest_checkpoint()
    fence = checkpoint_position(Path(newest)) if newest else (0, 0)
    number, lease_s = fence[0], 0.0
    with suppress(JournalError):  # its records up to a damage tell something, too
        for record in read_record(folder.membership):
            if isinstance(record.event, Opened):
                number = max(number, record.event.terms.term)
                lease_s = max(lease_s, record.event.terms.lease_s)
    return Term(number=number, lease_s=lease_s, fence=fence)


def checkpoint_position(path: Path) -> tuple[int, int]:
    """The term and the generation that wrote a checkpoint; 0 where that is not known."""
    content = _content(path)
    return _number(content.get("term")), _number(content.get("generation"))


def untold_steps(brain: Brain, path: Path) -> Steps:
    """Steps up to a checkpoint that no coordinator was told of. Nobody knows how long they took."""
    cluster, plain = brain.cluster, _content(path)
    for name in ("state", "plain"):
        found = plain.get(name)
        plain = found if isinstance(found, dict) else {}
    order = plain.get("order")
    order = order if isinstance(order, dict) else {}
    position = _number(order.get("before")) + _number(order.get("cursor"))
    return Steps(
        num=max(0, _number(plain.get("step")) - 1 - max(cluster.step, cluster.furthest_step)),
        samples=max(0, position - max(cluster.samples, brain.tally.position)),
    )


def _content(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint; none if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as file:
            (name,) = [n for n in file.namelist() if n.endswith("/data.pkl")]
            with file.open(name) as content:
                found = _Plain(content).load()
        return found if isinstance(found, dict) else {}
    except Exception:  # damage shows as almost any error; the worker that loads it names it
        return {}


def _number(found: object) -> int:
    return found if isinstance(found, int) and 0 <= found <= MOST else 0


class _Anything:
    """Stands for a tensor or any other object of a pickle."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setitem__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


class _Plain(pickle.Unpickler):
    """Reads the plain values of a pickle, without torch; runs no code of it."""

    def find_class(self, module: str, name: str) -> Any:
        return _Anything

    def persistent_load(self, pid: Any) -> Any:
        return _Anything()
