"""The demo, shortened, and how its figures are made."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from bench.clusters import Limit
from bench.demo.ending import lines
from bench.demo.phases import Phase, phases
from bench.demo.story import FULL, Outcome

from evenstep.config import BatchSettings, Settings
from evenstep.journal import Journal
from evenstep.types import StepDone, StepReport

ROOT = Path(__file__).parents[2]


def run_demo(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.demo", "--short", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--no-quotas",)])
def test_it_tells_its_story_and_trains_the_same_model(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    demo = run_demo("--keep", str(tmp_path / "kept"), *options)
    output, _ = demo.communicate()
    assert demo.returncode == 0, output
    for event in ("w2 is slowed down", "w0 is killed", "w3 has joined", "speed-up", "idle"):
        assert event in output
    report = re.search(r"^report +(\S+)$", output, re.MULTILINE)
    assert report is not None
    assert Path(report[1]).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (tmp_path / "kept" / "evenstep" / "run" / "journal.jsonl").exists()


@pytest.mark.long
def test_ctrl_c_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    demo = run_demo()
    assert demo.stdout is not None
    for line in demo.stdout:
        if "is slowed down" in line:
            break
    family = psutil.Process(demo.pid).children(recursive=True)
    assert len(family) > 3
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate()
    assert "the demo ended early: SIGINT" in output
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert list(tmp_path.glob("evenstep-*")) == []


def journal(path: Path, steps: list[tuple[float, StepDone]]) -> Path:
    file = Journal.create(path, Settings(batch=BatchSettings(size=4)))
    for at_s, done in steps:
        file.append(at_s, done, ())
    file.close()
    return path


def step(number: int, *, generation: int = 1, shares: tuple[int, ...] = (1, 3)) -> StepDone:
    reports = tuple(
        StepReport(worker=f"w{i}", samples=share, compute_s=0.1) for i, share in enumerate(shares)
    )
    return StepDone(step=number, generation=generation, seconds=0.5, reports=reports)


def test_a_phase_lasts_from_one_change_to_the_next_by_the_clock(tmp_path: Path) -> None:
    steps = [(float(i), step(i)) for i in range(20)]
    steps += [(19.0 + 2.0 * i, step(19 + i, shares=(2, 2))) for i in range(1, 11)]
    steps += [(45.0 + i, step(30 + i, generation=2, shares=(4,))) for i in range(4)]
    first, slowed, lost = phases(journal(tmp_path / "j", steps), (20,), first=1)
    assert (first.num_steps, first.seconds, first.settled_s) == (19, 19.0, 1.0)
    assert (slowed.num_steps, slowed.seconds, slowed.shares) == (10, 20.0, (2, 2))
    assert slowed.settled_s == 2.0
    assert (lost.num_steps, lost.seconds, lost.settled_s) == (4, 9.0, 1.0)


def test_the_part_of_the_limit_counts_settled_steps_and_all_steps_apart() -> None:
    def phase(seconds: float, settled_s: float) -> Phase:
        return Phase(
            shares=(1, 2, 3),
            num_steps=10,
            seconds=seconds,
            settled_s=settled_s,
            compute_s=(),
            idle_s=0.25,
        )

    limit = Limit(shares=(1, 2, 3), compute_s=0.9, exposed_s=0.1, batch=6)
    outcome = Outcome(
        spread=0.04,
        equal=phase(40.0, 4.0),
        phases=(phase(20.0, 1.25),) * 4,
        limits=(limit,) * 4,
        difference=1e-13,
        losses=(0.5, 0.5),
        num_steps=40,
        report=Path("report.html"),
    )
    assert outcome.parts == (0.8,) * 4
    assert (outcome.settled_part, outcome.whole_part) == (0.8, 0.5)
    assert outcome.speedup == 3.2
    text = "\n".join(lines(FULL, outcome))
    assert "80% once shares have settled, 50% with all steps" in text
    assert "0.25 s for the loss, 0.25 s for the join" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "busy" not in text
    busy = lines(FULL, replace(outcome, spread=0.12))
    assert busy[-1] == (
        "This machine is busy (its speed differed by 12% between the turns of the limit): "
        "repeat the demo when it is idle."
    )
