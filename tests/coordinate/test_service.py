"""A coordinator and workers that speak the protocol over real sockets, from first to last."""

from __future__ import annotations

import errno
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evenstep.coordinate.addresses import is_here
from evenstep.coordinate.client import NoAnswerError
from evenstep.coordinate.events import Terms
from evenstep.coordinate.run_folder import RunFolder
from evenstep.decide.batching import POLICIES
from evenstep.errors import ConfigError
from evenstep.journal import read
from evenstep.messages import (
    WAY_OUT,
    Alive,
    Done,
    Failed,
    Generation,
    Goodbye,
    Hello,
    Lease,
    Leaving,
    NewPlan,
    Publish,
    Published,
    Refused,
    Stuck,
    proof,
)
from evenstep.simulate.replay import replay
from evenstep.types import Joined, Left, Lost, Regroup, StepDone
from tests.coordinate.fake import FakeWorker, Line
from tests.coordinate.hosted import Hosted, hosted
from tests.decide.uncapped import Uncapped


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Hosted]:
    with hosted(tmp_path / "run") as there:
        yield there


def together(run: Hosted, num: int) -> list[FakeWorker]:
    """Workers that train in one generation."""
    workers = [run.worker()]
    workers[0].enter()
    for _ in range(num - 1):
        workers.append(run.worker())
        told = workers[-1].hear(Generation)
        for worker in workers[:-1]:
            worker.enter(told.number)
        workers[-1].generation = told
    return workers


def test_workers_join_while_others_train(run: Hosted) -> None:
    a, b, c = together(run, 3)
    assert c.generation is not None
    assert c.generation.number == 3
    assert c.generation.roster == ("w0", "w1", "w2")
    assert not c.generation.planned  # for it there is no step to wait for
    assert sum(c.generation.shares) == 64
    a.step(1)
    told = run.ask("status")
    assert (told["state"], told["generation"]) == ("training", 3)
    assert [row["rank"] for row in told["workers"]] == [0, 1, 2]
    planned = msgspec.structs.replace(c.generation, planned=True)
    assert a.generation == b.generation == planned


def test_published_values_reach_the_other_workers_of_the_generation(run: Hosted) -> None:
    a, b, c = together(run, 3)
    a.say(Publish(generation=3, key="here/0", value=b"\x00\xff"))
    a.say(Publish(generation=2, key="late", value=b""))  # replaced: nobody waits for it
    published = Published(generation=3, key="here/0", value=b"\x00\xff")
    assert b.hear(Published) == published
    b.say(Publish(generation=3, key="here/1", value=b""))
    assert [c.hear(Published) for _ in range(2)] == [
        published,
        Published(generation=3, key="here/1", value=b""),
    ]
    assert a.hear(Published).key == "here/1"


def test_a_worker_that_floods_the_rendezvous_is_evicted(run: Hosted) -> None:
    a, b = together(run, 2)
    for i in range(100):
        b.say(Publish(generation=2, key=str(i), value=b""))
    assert "publishes more" in b.hear(Goodbye).why
    assert a.hear(Generation).roster == ("w0",)


def test_after_a_takeover_workers_get_what_was_published_before_they_are_back(
    tmp_path: Path,
) -> None:
    with hosted(tmp_path / "run") as run:
        workers = together(run, 2)
    with hosted(tmp_path / "run", port=run.port) as again:
        first = again.worker(workers[0].id, generation=2)
        first.say(Publish(generation=2, key="here/0", value=b"first"))
        first.beat()  # answered after the message before it was handled
        second = again.worker(workers[1].id, generation=2)
        assert second.hear(Published).value == b"first"


def test_those_who_are_ready_meanwhile_join_in_one_change(run: Hosted) -> None:
    with run.worker() as a:
        first = a.hear(Generation)  # announced, and not begun
        others = [run.worker() for _ in range(3)]
        assert [w.poll(0.2) for w in others] == [None, None, None]
        a.begin(first)
        assert a.hear(Generation).roster == ("w0", "w1", "w2", "w3")
        assert others[2].hear(Generation).number == 2


def test_a_policy_without_valid_first_shares_ends_the_run_by_name(
    run: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "uncapped", Uncapped)
    with run.worker(cap=8, settings={"policy": "uncapped"}) as worker:
        told = worker.hear(Goodbye).why
    assert told.startswith("policy uncapped gave worker w0 64 samples, more than its cap of 8")
    assert (run.ending().why, run.ending().told) == (told, "")  # and no traceback


def test_a_closed_connection_is_a_loss_at_once(run: Hosted) -> None:
    a, b, c = together(run, 3)
    b.close()
    for worker in (a, c):
        told = worker.hear(Generation)
        assert (told.number, told.roster, told.planned) == (4, ("w0", "w2"), False)
    assert "w1 lost" in told.reason


def test_a_loss_does_not_wait_for_a_planned_change(run: Hosted) -> None:
    a, b = together(run, 2)
    c = run.worker()
    planned = a.hear(Generation)
    assert planned.planned
    b.close()
    told = a.hear(Generation)
    assert not told.planned
    assert told.number > planned.number
    a.begin(told)
    assert c.hear(Generation, lambda g: g.number > told.number).roster == ("w0", "w2")


def test_one_who_leaves_goes_when_the_others_have_begun_without_it(run: Hosted) -> None:
    a, b = together(run, 2)
    b.say(Leaving(why="a spot notice"))
    told = b.hear(Generation)
    assert (told.roster, told.planned) == (("w0",), True)
    b.say(Alive(generation=2, step=0, waiting=False))
    assert isinstance(b.poll(), Lease)  # no goodbye yet: it takes the last step with the others
    a.enter(told.number)
    assert b.hear(Goodbye).why == "a spot notice"
    b.close()
    assert run.ask("status")["generation"] == 3


def test_a_drained_worker_leaves_and_the_last_one_cannot(run: Hosted) -> None:
    a, b = together(run, 2)
    run.ask("drain", worker="w1")
    a.enter(3)
    assert b.hear(Goodbye).why == "requested by an operator"
    with pytest.raises(NoAnswerError, match="0 of at least 1 workers would be left"):
        run.ask("drain", worker="w0")
    with pytest.raises(NoAnswerError, match="no worker w9"):
        run.ask("drain", worker="w9")


def test_shares_follow_what_the_leader_reports(run: Hosted) -> None:
    a, _ = together(run, 2)
    assert a.generation is not None
    for step in range(1, 6):
        a.step_with(step, {"w0": 0.01, "w1": 0.09})
    plan = a.hear(NewPlan)
    assert plan.generation == a.generation.number
    assert plan.shares[0] > plan.shares[1]
    assert sum(plan.shares) == 64


def test_the_run_ends_when_all_are_done(run: Hosted) -> None:
    a, b = together(run, 2)
    a.say(Done(step=9))
    a.say(Alive(generation=2, step=9, waiting=False))
    assert isinstance(a.poll(), Lease)  # it stays for those who may need its state
    b.say(Done(step=9))
    assert a.hear(Goodbye).why == b.hear(Goodbye).why == "trained to the end"
    ending = run.service.state.ending
    assert ending is not None
    assert ending.ok
    _, records = read(run.service.folder.journal)
    assert isinstance([r.event for r in records][-1], Left)


def test_a_failed_script_ends_the_run_with_its_traceback(run: Hosted) -> None:
    a, b = together(run, 2)
    b.say(Failed(told="Traceback: the data is bad"))
    assert "failed on w1" in a.hear(Goodbye).why
    ending = run.service.state.ending
    assert ending is not None
    assert not ending.ok
    assert ending.told == "Traceback: the data is bad"


def test_a_stop_is_a_planned_change_to_nobody(run: Hosted) -> None:
    a, b = together(run, 2)
    run.ask("stop")
    told = a.hear(Generation)
    assert (told.roster, told.planned, told.number) == ((), True, 3)
    assert b.hear(Generation) == told
    a.close()
    b.close()
    assert run.ending().why == "stopped: an operator asked for it"


def test_the_first_in_rank_who_sees_the_runs_folder_writes_checkpoints(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run, run.worker(sees_folder=False) as far:
        assert far.enter().saves == ""
        with run.worker() as near:
            told = near.enter(2)
            assert (told.roster[0], told.saves) == (far.id, near.id)
            assert far.enter(2).saves == near.id
            run.ask("stop")
            assert near.hear(Generation).saves == near.id


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch": 32}, "batch is 32 here, 64 in the run"),
        ({"length": 999}, "length is 999 here, 1000 in the run"),
        ({"order": "with replacement"}, "order is with replacement here, none in the run"),
        ({"prefetched": 2}, "prefetched is 2 here, 0 in the run"),
        ({"processes": 2}, f"processes is 2 here, 1 in the run{WAY_OUT['processes']}"),
        ({"model": "another"}, "model is another here, a model in the run"),
        ({"cores": -1.0}, "worker w1: cores: must be above 0, got -1.0"),
    ],
)
def test_a_worker_that_differs_is_refused_with_both_values(
    run: Hosted, change: dict[str, Any], told: str
) -> None:
    with run.worker() as a:
        a.enter()
        with run.worker(**change) as other:
            assert other.hear(Refused).why == told
            with pytest.raises(EOFError):
                other.poll()
        assert run.ask("status")["generation"] == 1


def test_settings_of_the_script_go_before_defaults_and_after_the_command_line(
    tmp_path: Path,
) -> None:
    terms = Terms(sets=("workers.min=2",))
    own = {"policy": "uniform", "workers": {"min": 1, "max": 7}, "batch": {"min_share": 3}}
    with hosted(tmp_path / "run", terms) as run, run.worker(settings=own):
        settings = run.ask("status")["settings"]
    assert settings["policy"]["name"] == "uniform"
    assert settings["workers"] == {"min": 2, "max": 7}
    assert settings["batch"]["min_share"] == 3
    assert settings["forecaster"]["name"] == "narx"


def test_a_script_with_a_wrong_setting_is_refused_by_its_name(run: Hosted) -> None:
    with run.worker(settings={"polcy": "auto"}) as worker:
        assert "unknown setting polcy; did you mean policy?" in worker.hear(Refused).why


# A coordinator that dies, and the one after it.


def test_a_restarted_coordinator_takes_its_workers_over(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        workers = together(run, 3)
        workers[0].step(1)
    with hosted(tmp_path / "run", port=run.port) as again:
        back = [again.worker(w.id, generation=3) for w in workers]
        assert [w.id for w in back] == ["w0", "w1", "w2"]
        told = again.ask("status")
        assert (told["state"], told["generation"]) == ("training", 3)
        back[0].generation = workers[0].generation
        back[0].step(2)
        back[1].close()
        for worker in (back[0], back[2]):
            regroup = worker.hear(Generation)
            assert (regroup.number, regroup.roster) == (4, ("w0", "w2"))
        back[0].begin(regroup)
        assert again.worker().enter().number == 5
    numbers, clock_s = [], []
    for record in read(tmp_path / "run" / "journal.jsonl")[1]:
        numbers += [a.generation for a in record.actions if isinstance(a, Regroup)]
        clock_s.append(record.at_s)
    assert numbers == [1, 2, 3, 4, 5]
    assert clock_s == sorted(clock_s)
    header, records = read(tmp_path / "run" / "journal.jsonl")
    for record, actions in replay(records, header.settings):
        assert record.actions == actions


def test_members_that_stay_away_are_lost_when_the_lease_is_over(tmp_path: Path) -> None:
    with hosted(tmp_path / "run", Terms(lease_s=1.0)) as run:
        workers = together(run, 2)
    with hosted(tmp_path / "run", Terms(lease_s=1.0)) as again:
        a = again.worker("w0", generation=2)
        told = again.ask("status")
        assert told["state"] == "waiting for workers to come back"
        assert [row["state"] for row in told["workers"]] == ["training", "away"]
        regroup = a.hear(Generation)
        assert (regroup.number, regroup.roster, regroup.planned) == (3, ("w0",), False)
        assert "lease" in regroup.reason
    assert len(workers) == 2


def test_an_operator_may_give_up_a_worker_that_stays_away(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        together(run, 2)
    with hosted(tmp_path / "run") as again:
        a = again.worker("w0", generation=2)
        again.ask("drain", worker="w1")
        assert a.hear(Generation).roster == ("w0",)


def test_nobody_else_gets_the_place_of_one_who_is_away(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        together(run, 2)
    with hosted(tmp_path / "run") as again, again.worker() as new:
        assert new.id not in ("w0", "w1")
        assert new.poll(0.2) is None  # no new generation before all are back
        again.worker("w0", generation=2)
        again.worker("w1", generation=2)
        assert new.hear(Generation).roster == ("w0", "w1", new.id)


def test_a_worker_of_another_generation_is_not_taken_over(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        together(run, 2)
    with hosted(tmp_path / "run") as again:
        for worker, generation in (("w0", 9), ("w7", 2)):
            with Line(again.name, again.port) as line:
                proved = proof(again.token, line.greeting.nonce)
                line.say(Hello(proof=proved, worker=worker, generation=generation))
                assert "join as a new worker" in line.hear(Refused).why


def test_an_announcement_that_nobody_got_is_made_again(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        a, b, _ = together(run, 3)
        b.say(Leaving(why="a spot notice"))
        a.hear(Generation)  # 4 is announced, and the coordinator dies before anyone begins it
    with hosted(tmp_path / "run") as again:
        back = [again.worker(w, generation=3) for w in ("w0", "w2")]
        for worker in back:
            told = worker.hear(Generation)
            assert (told.number, told.roster, told.planned) == (4, ("w0", "w2"), False)
        back[0].begin(told)
        back[0].beat()
        assert again.ask("status")["state"] == "training"


def test_a_newcomer_that_was_announced_before_a_restart_joins_at_a_steps_end(
    tmp_path: Path,
) -> None:
    with hosted(tmp_path / "run") as run:
        together(run, 2)
        run.worker().hear(Generation)  # 3 is announced, and nobody has begun it
    with hosted(tmp_path / "run") as again:
        a, b, c = [again.worker(w, generation=g) for w, g in (("w0", 2), ("w1", 2), ("w2", 3))]
        told = a.hear(Generation)
        assert (told.number, told.roster, told.planned) == (4, ("w0", "w1"), False)
        a.begin(told)
        for worker in (a, b, c):
            told = worker.hear(Generation, lambda g: g.number == 5)
            assert (told.roster, told.planned) == (("w0", "w1", "w2"), worker is not c)


def test_all_of_it_is_in_the_journal(run: Hosted) -> None:
    a, b = together(run, 2)
    a.step(1)
    a.beat()
    b.close()
    a.enter(3)
    kinds = [type(r.event) for r in read(run.service.folder.journal)[1]]
    assert kinds == [Joined, Joined, StepDone, Lost]


def test_a_worker_that_hangs_is_evicted_when_others_wait_for_it(tmp_path: Path) -> None:
    terms = Terms(lease_s=3600.0, silence_s=0.0)
    with hosted(tmp_path / "run", terms) as run:
        a, b, c = together(run, 3)
        b.say(Stuck(generation=3, step=5, waited_s=9.0))
        for _ in range(200):
            for worker in (a, b):
                worker.say(Alive(generation=3, step=5, waiting=True))
            told = next(
                (m for m in iter(lambda: a.poll(0.05), None) if isinstance(m, Generation)), None
            )
            if told is not None:
                break
        assert told is not None
        assert told.roster == ("w0", "w1")
        assert "silent" in c.hear(Goodbye).why


def test_a_full_disk_does_not_prevent_a_stop(run: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder, "mark_stopping", full)
    a, _ = together(run, 2)
    run.ask("stop")
    assert a.hear(Generation).roster == ()


def test_checkpoints_that_cannot_be_written_are_a_problem_until_they_are(run: Hosted) -> None:
    a, b = together(run, 2)
    why = "OSError: No space left on device"
    a.say(Alive(generation=1, step=3, waiting=False, unsaved=why))
    a.hear(Lease)
    assert run.ask("status")["problems"] == [f"{a.id} cannot write checkpoints: {why}"]
    a.say(Alive(generation=1, step=9, waiting=False))
    a.hear(Lease)
    assert run.ask("status")["problems"] == []
    b.close()


# The folder.


def test_the_token_is_for_its_owner_alone_and_in_no_other_file(run: Hosted, tmp_path: Path) -> None:
    with run.worker() as worker:
        worker.enter()
    token = tmp_path / "run" / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(run.token) == 64
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path != token:
            assert run.token not in path.read_text()


def test_a_folder_has_one_coordinator_at_a_time(run: Hosted, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a coordinator already"):
        RunFolder.open(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder.make(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        RunFolder.open(tmp_path)


def test_the_newest_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        folder = tmp_path / "run" / "checkpoints"
        for name in ("step-9.pt", "step-10.pt", ".step-11.pt", "step-12.pt.tmp", "notes.txt"):
            (folder / name).touch()
        with run.worker() as worker:
            assert worker.welcome.resume == str(folder / "step-10.pt")


def test_a_folder_of_checkpoints_that_is_gone_does_not_end_the_run(
    run: Hosted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (a,) = together(run, 1)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-9.pt").touch()
    shutil.rmtree(folder)
    assert [run.worker().welcome.resume for _ in range(2)] == ["", ""]
    a.enter(2)
    assert run.ask("status")["state"] == "training"
    assert caplog.text.count(f"{folder} cannot be read: No such file or directory") == 1
    folder.mkdir()
    (folder / "step-12.pt").touch()
    assert run.worker().welcome.resume == str(folder / "step-12.pt")


def test_checkpoints_that_cannot_be_read_for_a_while_are_not_forgotten(
    run: Hosted, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-9.pt").touch()
    with run.worker() as worker:
        assert worker.welcome.resume == str(folder / "step-9.pt")
    folder.rename(tmp_path / "away")
    folder.touch()  # no folder: it is there, and cannot be listed
    with run.worker() as worker:
        assert worker.welcome.resume == str(folder / "step-9.pt")


def test_a_run_whose_checkpoints_cannot_be_read_does_not_begin_anew(tmp_path: Path) -> None:
    with hosted(tmp_path / "run"):
        pass
    folder = tmp_path / "run" / "checkpoints"
    folder.rename(tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    (tmp_path / "away").rename(tmp_path / "further")  # a link to nowhere, as of a lost mount
    with pytest.raises(ConfigError, match=f"{folder}: cannot be read"):
        RunFolder.open(tmp_path / "run")
    folder.unlink()
    RunFolder.open(tmp_path / "run").close()  # nobody holds it


@pytest.mark.parametrize("at", ["0.0.0.0", "::"])
def test_a_run_that_listens_everywhere_tells_where_others_reach_it(at: str, tmp_path: Path) -> None:
    with hosted(tmp_path / "run", at=at) as run:
        listens, elsewhere = (tmp_path / "run" / "address").read_text().split()
        assert listens == run.address == run.service.folder.address()
        host, _, port = elsewhere.rpartition(":")
        assert int(port) == run.port
        assert is_here(host.strip("[]"))
        assert host != at
