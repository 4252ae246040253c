"""What a worker must share with the run to be taken in."""

from __future__ import annotations

import re

from evenstep.messages import Refused, Welcome
from tests.coordinate.situations import Make, heard, roster, training


def test_a_worker_with_a_disabled_scaler_is_refused_where_the_run_has_it_enabled(
    make: Make,
) -> None:
    world = make()
    a, b = training(world, 2)
    (refused,) = heard(world.join(disabled_scalers="GradScaler-1"), Refused)
    assert refused.why.startswith(
        "disabled_scalers is GradScaler-1 here, none in the run; enable GradScaler"
    )
    assert roster(world) == (a.id, b.id)


def test_what_an_older_journal_does_not_know_of_is_as_the_first_worker_has_it(make: Make) -> None:
    world = make()
    training(world, 2)
    path = world.folder / "journal.jsonl"
    text = path.read_text(encoding="utf-8")
    older = re.sub(r',"crc":\d+}\n', "}\n", text.replace('"disabled_scalers":"",', "", 1))
    path.write_text(older, encoding="utf-8")
    assert "disabled_scalers" not in older
    world.restart()
    assert not heard(world.join(disabled_scalers="GradScaler-1"), Refused)
    (refused,) = heard(world.join(), Refused)
    assert refused.why.startswith("disabled_scalers is none here, GradScaler-1 in")


def test_a_worker_that_connects_again_before_the_old_connection_is_known_to_be_gone_keeps_its_name(
    make: Make,
) -> None:
    world = make()
    (a,) = training(world, 1)
    b = world.connect()
    assert b is not None
    b.connected = False  # it has noticed; the coordinator has not
    again = world.join(b.id)
    world.settle(8)
    assert roster(world) == (a.id, again.id) == (a.id, b.id)


def test_a_worker_lost_before_it_heard_of_its_generation_gets_no_other_name(
    make: Make,
) -> None:
    """It may hear of it later, and would wait there for ever, as a worker that starts up here."""
    world = make()
    training(world, 1)
    b = world.join()
    assert b.id in roster(world)  # its first generation is announced
    world.cut(b)
    answer = world.hello(b.id)
    assert isinstance(answer, Refused)
    assert answer.why.startswith(f"{b.id} was lost before it had joined")
    assert isinstance(world.hello(), Welcome)
