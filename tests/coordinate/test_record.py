"""The membership record: what happened to a run can be handled again, and tells of a difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from evenstep.cli.main import main
from evenstep.coordinate import roster as machine
from evenstep.coordinate.events import Crashed, Exited, Heard, Opened, Terms, Tick, TookOver
from evenstep.coordinate.record import read_record
from evenstep.errors import JournalError
from evenstep.messages import Alive, Generation, Goodbye, Stepped, Stuck
from tests.coordinate.hosted import hosted
from tests.coordinate.replayed import announced, replayed
from tests.coordinate.situations import Make, ask, ending, launched, roster, training
from tests.coordinate.world import World


def replay(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["replay", str(folder), *args])


def a_run_with_faults(world: World) -> None:
    """A worker is killed, one hangs, one is drained, the coordinator is restarted."""
    _, b, c, _ = launched(world, 4)
    world.die(b, slowly=True)
    world.settle(20)
    c.frozen = True
    world.settle(60)
    ask(world, "drain", worker=roster(world)[-1])
    world.settle(20)
    world.restart()
    for worker in world.workers.values():
        if worker.generation and worker.launched:
            world.adopt(worker.id)
            world.reconnect(worker)
    world.settle(20)
    world.stop_run("enough")
    world.settle(20)
    assert ending(world).ok


def rewrite(folder: Path, change: Callable[[dict[str, Any]], bool]) -> None:
    """Change the first record that `change` finds something to change in."""
    path = folder / "membership.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        record = json.loads(line)
        record.pop("crc")  # a record of an older version has none
        if i and change(record):
            lines[i] = json.dumps(record)
            break
    else:
        raise AssertionError("nothing was changed")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_run_with_faults_is_handled_again_as_recorded(make: Make) -> None:
    world = make()
    a_run_with_faults(world)
    records = replayed(world.folder)
    assert announced(records) == list(dict.fromkeys(g.number for g in world.announced))
    kinds = {type(record.event) for record in records}
    assert kinds >= {Opened, TookOver, Exited, Tick, Heard}
    told = replay(world.folder)
    assert told.exit_code == 0, told.output
    assert f"{len(records)} membership records with {len(announced(records))} announced" in (
        told.output
    )


def test_a_run_over_real_sockets_is_handled_again_as_recorded(tmp_path: Path) -> None:
    terms = Terms(silence_s=0.0)
    with hosted(tmp_path / "run", terms) as run:
        a, b, c = [run.worker() for _ in range(3)]
        number = 0
        while not (a.generation and set(a.generation.roster) == {a.id, b.id, c.id}):
            number = a.enter(number + 1).number
        a.step(1)
        b.close()
        told = a.hear(Generation, lambda g: b.id not in g.roster)
        a.begin(told)
        a.say(Stuck(generation=told.number, step=1, waited_s=9.0))
        while c.id in told.roster:  # it says nothing any more
            a.say(Alive(generation=told.number, step=1, waiting=True))
            told = next(
                (m for m in iter(lambda: a.poll(0.05), None) if isinstance(m, Generation)), told
            )
        assert "silent" in c.hear(Goodbye).why
        a.begin(told)
        a.beat()
    with hosted(tmp_path / "run", terms) as again:
        again.worker(a.id, generation=told.number).beat()
        again.ask("stop")
    result = replay(tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert announced(replayed(tmp_path / "run"))[-2:] == [told.number, told.number + 1]


# A record that does not tell what happened.


def other_reason(record: dict[str, Any]) -> bool:
    for effect in record.get("effects", ()):
        if effect["type"] == "Send" and effect["message"]["type"] == "Generation":
            effect["message"]["reason"] = "no reason"
            return True
    return False


def other_roster(record: dict[str, Any]) -> bool:
    for effect in record.get("effects", ()):
        if effect["type"] == "Send" and len(effect["message"].get("roster", ())) > 1:
            effect["message"]["roster"].reverse()
            return True
    return False


def other_code(record: dict[str, Any]) -> bool:
    if record["event"]["type"] != "Exited":
        return False
    record["event"]["code"] = 3
    return True


def other_worker(record: dict[str, Any]) -> bool:
    if record["event"]["type"] != "Dying":
        return False
    record["event"]["worker"] = "w0"
    return True


def no_loss(record: dict[str, Any]) -> bool:
    if record["event"]["type"] != "Dying":
        return False
    record["event"] = {"type": "Tick"}
    return True


def other_contact(record: dict[str, Any]) -> bool:
    """The worker that hung is heard from at the end."""
    if "contacts" not in record or "silent" not in json.dumps(record.get("effects")):
        return False
    for contact in record["contacts"].values():
        contact["heard_s"] = record["at"]
    return True


@pytest.mark.parametrize(
    "change", [other_reason, other_roster, other_code, other_worker, no_loss, other_contact]
)
def test_a_record_that_was_tampered_with_is_noticed(
    make: Make, tmp_path: Path, change: Callable[[dict[str, Any]], bool]
) -> None:
    world = make()
    a_run_with_faults(world)
    world.close()
    honest = (tmp_path / "membership.jsonl").read_bytes()
    rewrite(tmp_path, change)
    result = replay(tmp_path)
    assert result.exit_code == 1
    assert "\nmembership record " in result.output
    (tmp_path / "membership.jsonl").write_bytes(honest)


def test_a_difference_is_shown_with_both_announcements(make: Make, tmp_path: Path) -> None:
    world = make()
    training(world, 2)
    world.close()
    honest = (tmp_path / "membership.jsonl").read_bytes()
    rewrite(tmp_path, other_reason)
    shown = replay(tmp_path).output.splitlines()[-3:]
    assert shown[0].startswith("membership record 3, at 0.000 s, Heard Ready of w0:")
    assert shown[1].startswith("  recorded  announce to w0 generation 1 at a step's end: w0 (no re")
    assert shown[2].startswith("  now       announce to w0 generation 1 at a step's end: w0 (")
    (tmp_path / "membership.jsonl").write_bytes(honest)


def test_damage_is_named_by_its_line(make: Make, tmp_path: Path) -> None:
    world = make()
    training(world, 2)
    path = tmp_path / "membership.jsonl"
    honest = path.read_bytes()
    lines = honest.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"nonsense\n", *lines[3:]]))
    with pytest.raises(JournalError, match="line 4"):
        list(read_record(path))
    path.write_bytes(honest.replace(b'"w0"', b'"w8"', 1))  # as valid as before
    (line,) = [n for n, text in enumerate(lines, 1) if b'"w0"' in text][:1]
    with pytest.raises(JournalError, match=f"line {line}.*checksum"):
        list(read_record(path))
    path.write_bytes(honest[:-5])  # as a crash leaves it
    assert len(list(read_record(path))) == len(lines) - 2
    path.write_bytes(honest)


# What it costs, and what it is good for.


def test_heartbeats_and_quiet_steps_are_not_recorded(make: Make) -> None:
    world = make()
    a, b, _ = training(world, 3)
    before = len(replayed(world.folder))
    for _ in range(500):
        world.take_step()
        world.beat()
    assert len(replayed(world.folder)) - before < 10  # plans
    b.frozen = True
    world.settle(60)
    assert b.id not in roster(world)
    told = [r for r in replayed(world.folder) if r.contacts]
    assert told  # when somebody is blamed, by what was last heard
    assert all(len(record.contacts) <= 3 for record in told)
    heard = [r.event.message for r in replayed(world.folder) if isinstance(r.event, Heard)]
    assert not any(isinstance(message, Alive) for message in heard)
    assert sum(isinstance(message, Stepped) for message in heard) < 20
    assert a.connected


def test_what_crashed_the_coordinator_is_the_end_of_its_record(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    _, b = training(world, 2)

    def crash(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    with monkeypatch.context() as patched:
        patched.setattr(machine, "go_on", crash)
        with pytest.raises(ZeroDivisionError):
            world.die(b)
        *_, crashed, last = replayed(world.folder)
    assert (crashed.event.worker, crashed.effects) == (b.id, ())  # type: ignore[union-attr]
    assert isinstance(last.event, Crashed)
    assert ending(world).why == "the coordinator failed: a mistake"
    path = world.folder / "membership.jsonl"
    result = replay(world.folder)  # without the mistake
    assert result.exit_code == 1
    assert "recorded  nothing more" in result.output
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))


def test_the_story_of_one_worker_is_what_it_said_and_was_told(make: Make) -> None:
    world = make()
    _, b, c = training(world, 3)
    world.die(b)
    told = replay(world.folder, "--worker", b.id)
    assert told.exit_code == 0
    first, ready, *_, last = told.output.splitlines()
    assert "Connected: reply Welcome(worker='w1'" in first
    assert ready == ("0.000 s  Heard Ready of w1")
    assert last.endswith("s  Disconnected of w1")
    assert "lost" not in told.output  # the others were told, and are not in its story
    assert "w1 lost: its connection closed" in replay(world.folder, "--worker", c.id).output


def test_a_run_without_a_record_has_no_story(tmp_path: Path) -> None:
    told = replay(tmp_path, "--worker", "w0")
    assert told.exit_code == 2
    assert "membership.jsonl: cannot be read: No such file" in told.stderr
