"""GPU assignment to local workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.launch.gpus import GpuPool


def pool_of(visible: str) -> GpuPool:
    return GpuPool.find({"CUDA_VISIBLE_DEVICES": visible})


def gpu(pool: GpuPool, worker: str) -> str | None:
    return pool.assign(worker).get("CUDA_VISIBLE_DEVICES")


def test_each_worker_gets_its_own_gpu_and_a_released_one_is_reused() -> None:
    pool = pool_of("0, 2")
    assert [gpu(pool, w) for w in ("w0", "w1")] == ["0", "2"]
    pool.release("w0")
    assert gpu(pool, "w2") == "0"


def test_more_workers_than_gpus_share_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = pool_of("0,1")
    assert [gpu(pool, f"w{n}") for n in range(5)] == ["0", "1", "0", "1", "0"]
    assert "w4 shares GPU 0 with w0, w2" in caplog.text


@pytest.mark.parametrize("visible", ["", "-1"])
def test_without_visible_gpus_nothing_is_assigned(visible: str) -> None:
    assert pool_of(visible).assign("w0") == {}  # the user's own setting stays


def test_without_the_variable_all_gpus_are_used_by_cudas_numbers(tmp_path: Path) -> None:
    for name in ("nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    pool = GpuPool.find({}, tmp_path)
    assert [gpu(pool, w) for w in ("w0", "w1")] == ["0", "1"]


def test_a_worker_that_outlived_its_coordinator_keeps_its_gpu() -> None:
    pool = pool_of("0,1")
    pool.adopt("w7", {"CUDA_VISIBLE_DEVICES": "0"})
    pool.adopt("w8", {})
    assert gpu(pool, "w9") == "1"
