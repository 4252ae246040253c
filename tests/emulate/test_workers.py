"""Uneven workers as processes: their environment, how they end, and that nothing is left."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from evenstep.emulate import (
    Hierarchy,
    NoQuotaError,
    UnevenRunError,
    run_uneven,
    step_change,
    sweep,
)
from tests.emulate.conftest import ends

WAIT = "import sys, time\nwhile True: time.sleep(1000)\n"
OWN_GROUP = """
import os
from evenstep.emulate import Hierarchy, line_up
hierarchy = Hierarchy.find()
rows = [row.split(":", 2) for row in open("/proc/self/cgroup").read().splitlines()]
(name,) = [path for _, kind, path in rows if kind == ("cpu" if hierarchy.version == 1 else "")]
group = hierarchy.root / name.lstrip("/")
limit = group / ("cpu.cfs_quota_us" if hierarchy.version == 1 else "cpu.max")
quota_us = lambda: limit.read_text().split()[0]
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def own_groups() -> list[Path]:
    try:
        return list(Hierarchy.find().root.glob(f"evenstep-{os.getpid()}-*"))
    except NoQuotaError:
        return []


def test_each_worker_gets_torchruns_environment() -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    results = run_uneven(python(code), [1.0, 0.5, 0.5], timeout_s=60, env={"MINE": "yes"})
    seen = [json.loads(r.output) for r in results]
    assert [r.rank for r in results] == [0, 1, 2]
    assert [r.exit_code for r in results] == [0, 0, 0]
    assert [e["RANK"] for e in seen] == [e["LOCAL_RANK"] for e in seen] == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in seen} == {e["LOCAL_WORLD_SIZE"] for e in seen} == {"3"}
    assert {e["MASTER_ADDR"] for e in seen} == {"127.0.0.1"}
    assert len({e["MASTER_PORT"] for e in seen}) == 1
    assert {(e["OMP_NUM_THREADS"], e["MINE"]) for e in seen} == {("1", "yes")}


def test_each_worker_has_its_own_quota_and_none_is_left(hierarchy: Hierarchy) -> None:
    code = OWN_GROUP + "line_up(); print(group, quota_us())"
    results = run_uneven(python(code), [0.5, 0.25], timeout_s=60, line_up=True)
    groups, quotas = zip(*(r.output.split() for r in results), strict=True)
    assert quotas == ("4000", "2000")
    assert len(set(groups)) == 2
    assert [r.method for r in results] == ["quota", "quota"]
    assert not any(Path(g).exists() for g in groups)


def test_no_worker_is_slowed_down_before_all_have_lined_up(hierarchy: Hierarchy) -> None:
    code = OWN_GROUP + "before = quota_us(); line_up(); print(before, quota_us())"
    results = run_uneven(python(code), [0.5, 0.5], timeout_s=60, line_up=True)
    assert [r.output.split() for r in results] in (
        [["-1", "4000"], ["-1", "4000"]],
        [["max", "4000"], ["max", "4000"]],
    )


def test_a_schedule_is_applied_while_they_run(hierarchy: Hierarchy) -> None:
    code = OWN_GROUP + (
        "line_up(); before = quota_us()\n"
        "while (after := quota_us()) == before: pass\n"
        "print(before, after)"
    )
    schedule = step_change((1.0, 0.5), (0.5, 1.0), at=0.3)
    results = run_uneven(python(code), schedule, timeout_s=60, line_up=True)
    assert [r.output.split() for r in results] == [["8000", "4000"], ["4000", "8000"]]


def test_a_failed_worker_ends_all_and_is_shown_first() -> None:
    code = "import os\nif os.environ['RANK'] == '1': raise KeyError('lost in rank one')\n" + WAIT
    with pytest.raises(UnevenRunError, match="worker 1 ended with 1") as caught:
        run_uneven(python(code), [1.0, 1.0, 1.0], timeout_s=60)
    assert str(caught.value).index("lost in rank one") < str(caught.value).index("worker 0")
    assert [r.exit_code for r in caught.value.results] == [-9, 1, -9]
    assert [r.stopped for r in caught.value.results] == [True, False, True]
    assert own_groups() == []


def test_a_timeout_ends_all_workers() -> None:
    code = "import os; print(os.getpid(), flush=True)\n" + WAIT
    results = run_uneven(python(code), [1.0, 1.0], timeout_s=1.0, check=False)
    assert [(r.exit_code, r.stopped) for r in results] == [(-9, True)] * 2
    assert all(gone(int(r.output)) for r in results if r.output)
    with pytest.raises(UnevenRunError, match=r"the workers took over 0\.1 s"):
        run_uneven(python(WAIT), [1.0], timeout_s=0.1)
    assert own_groups() == []


def test_a_worker_that_exits_before_lining_up_does_not_block_the_others() -> None:
    code = "import os\nfrom evenstep.emulate import line_up\n"
    only_first = code + "if os.environ['RANK'] == '0': line_up()\n"
    results = run_uneven(python(only_first), [0.5, 0.5], timeout_s=60, line_up=True)
    assert results[1].method == "none"
    fails = only_first + "else: sys.exit(3)\n"
    results = run_uneven(
        python("import sys\n" + fails), [0.5] * 2, timeout_s=60, line_up=True, check=False
    )
    assert [(r.exit_code, r.method) for r in results] == [(-9, "none"), (3, "none")]


def test_a_workers_children_end_with_it() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    (result,) = run_uneven(python(code), [1.0], timeout_s=60, method="throttle")
    assert ends(int(result.output))


def test_with_a_quota_children_in_another_session_end_too(hierarchy: Hierarchy) -> None:
    left = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    (result,) = run_uneven(python(f"import subprocess; print({left}.pid)"), [1.0], timeout_s=60)
    assert ends(int(result.output))
    assert own_groups() == []


def test_a_killed_run_leaves_no_workers_and_its_quotas_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = f"""
import os
folder = {str(tmp_path)!r}
open(folder + "/" + os.environ["RANK"], "w").write(str(os.getpid()))
open(folder + "/started", "w").write("x")
{WAIT}"""
    code = f"""
import sys
from evenstep.emulate import run_uneven
run_uneven([sys.executable, "-c", {worker!r}], [1.0, 1.0], timeout_s=100)
"""
    os.mkfifo(tmp_path / "started")
    run = subprocess.Popen(python(code), env={**os.environ, "TMPDIR": str(tmp_path)})
    started = ""
    while len(started) < 2:  # one letter from each worker
        started += (tmp_path / "started").read_text()
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert not any(gone(pid) for pid in pids)
    run.kill()
    run.wait()
    assert all(ends(pid) for pid in pids)
    (folder,) = tmp_path.glob("evenstep-*")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_uneven(["true"], [1.0], timeout_s=60)
    assert not folder.exists()
    with suppress(NoQuotaError):
        sweep()
        assert not list(Hierarchy.find().root.glob(f"evenstep-{run.pid}-*"))


def test_without_quotas_workers_throttle_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(mounts: Path = Path()) -> Hierarchy:
        raise NoQuotaError("this is a test")

    monkeypatch.setattr(Hierarchy, "find", none)
    code = (
        "from evenstep.emulate import line_up, own_throttle\n"
        "import os\n"
        "if os.environ['RANK'] != '2': t = own_throttle(); line_up(); print(t.factor)\n"
    )
    with caplog.at_level(logging.WARNING, "evenstep"):
        results = run_uneven(python(code), [0.25, 2.0, 0.5], timeout_s=60, line_up=True)
    assert [r.output.strip() for r in results] == ["4.0", "1.0", ""]
    assert [r.method for r in results] == ["throttle", "throttle", "none"]
    assert "this is a test" in caplog.text
    with pytest.raises(NoQuotaError, match="this is a test"):
        run_uneven(python(code), [1.0], timeout_s=60, method="quota")


def test_outside_run_uneven_a_script_neither_waits_nor_sleeps() -> None:
    code = (
        "from evenstep.emulate import line_up, own_throttle\n"
        "line_up(); assert own_throttle().after(5.0) == 5.0"
    )
    subprocess.run(python(code), check=True, timeout=600)


def test_an_unknown_command_is_named() -> None:
    (result,) = run_uneven(["no-such-program"], [1.0], timeout_s=60, check=False)
    assert result.exit_code == 127
    assert "cannot run no-such-program: No such file" in result.output


@pytest.mark.parametrize("cores", [[], [0.0], [1.0, float("nan")]])
def test_invalid_cores_are_refused_before_anything_starts(cores: list[float]) -> None:
    with pytest.raises(ValueError, match=r"cores|schedule"):
        run_uneven(["true"], cores, timeout_s=60)
    with pytest.raises(ValueError, match="command"):
        run_uneven([], [1.0], timeout_s=60)


def test_emulate_does_not_import_torch() -> None:
    code = "import sys, evenstep.emulate; assert 'torch' not in sys.modules"
    subprocess.run(python(code), check=True, timeout=600)
