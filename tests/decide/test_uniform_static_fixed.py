"""`uniform`, `static` and `fixed`: shares that do not depend on measurements."""

from __future__ import annotations

import numpy as np
import pytest

from evenstep.decide.batching.fixed import Fixed
from evenstep.decide.batching.static import Static
from evenstep.decide.batching.uniform import Uniform
from evenstep.errors import BatchBoundsError, ConfigError
from evenstep.ports import BatchPolicy
from evenstep.strict import build
from evenstep.types import Fleet, Outcome, Worker


def fleet_of(*workers: Worker, batch: int) -> Fleet:
    return Fleet.of(workers, batch=batch)


def silence(num_workers: int) -> Outcome:
    nothing = np.full(num_workers, np.nan)
    return Outcome(
        step=0,
        samples=np.zeros(num_workers, dtype=np.int64),
        compute_s=nothing,
        forecast_samples_per_s=nothing,
    )


def test_uniform_gives_the_odd_samples_to_the_first_and_respects_caps() -> None:
    workers = [Worker(id="a"), Worker(id="b", cap=5), Worker(id="c")]
    _, (shares, _) = Uniform().first_shares(None, fleet_of(*workers, batch=32), 32)
    assert shares.tolist() == [14, 5, 13]


def test_uniform_refuses_a_batch_that_does_not_fit() -> None:
    with pytest.raises(BatchBoundsError, match="hold 8 in total"):
        Uniform().first_shares(None, fleet_of(Worker(id="a", cap=8), batch=9), 9)


def test_static_splits_by_cores_as_in_the_paper() -> None:
    workers = [Worker(id=f"w{i}", cores=cores) for i, cores in enumerate((12, 9, 18))]
    _, (shares, reason) = Static().first_shares(None, fleet_of(*workers, batch=192), 192)
    assert shares.tolist() == [59, 44, 89]
    assert "cores" in reason


def test_static_splits_by_flops_where_all_are_known() -> None:
    gpu = Worker(id="gpu", cores=8, flops=0.813e13)
    cpu = Worker(id="cpu", cores=48, flops=0.187e13)
    _, (shares, reason) = Static().first_shares(None, fleet_of(gpu, cpu, batch=1000), 1000)
    assert dict(zip(("cpu", "gpu"), shares.tolist(), strict=True)) == {"cpu": 187, "gpu": 813}
    assert "FLOPS" in reason
    unrated = Worker(id="cpu", cores=48)
    _, (shares, reason) = Static().first_shares(None, fleet_of(gpu, unrated, batch=56), 56)
    assert shares.tolist() == [48, 8]
    assert "cores" in reason


@pytest.mark.parametrize("policy", [Uniform(), Static(), Fixed(shares=(20, 12))])
def test_wrong_shares_are_corrected_and_right_ones_kept(policy: BatchPolicy) -> None:
    fleet = fleet_of(Worker(id="a", cores=2), Worker(id="b"), batch=32)
    memory, (shares, _) = policy.first_shares(None, fleet, 32)
    assert policy.next(memory, fleet, 32, shares, silence(2))[1] is None
    others = np.array([31, 1], dtype=np.int64)
    move = policy.next(memory, fleet, 32, others, silence(2))[1]
    assert move is not None
    assert move[0].tolist() == shares.tolist()


@pytest.mark.parametrize(
    "given",
    ["2,2,2,15", [2, 2, 2, 15], {"w0": 2, "w1": 2, "w2": 2, "w3": 15}, {"small": 2, "w3": 15}],
)
def test_fixed_keeps_the_given_shares(given: object) -> None:
    workers = [Worker(id=f"w{i}", kind="small" if i < 3 else "big") for i in range(4)]
    policy = build(Fixed, {"shares": given})
    _, (shares, reason) = policy.first_shares(None, fleet_of(*workers, batch=21), 21)
    assert shares.tolist() == [2, 2, 2, 15]
    assert reason == "as given"


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ((8, 8), "2 for 3 workers"),
        ((8, 8, 8), "add up to 24, but the batch is 32"),
        ((8, 4, 20), "20 for w2, which allows 0 to 16"),
        ({"w0": 8, "w1": 24}, "no share for w2 or its kind, cpu"),
    ],
)
def test_fixed_refuses_shares_that_do_not_fit(
    shares: tuple[int, ...] | dict[str, int], problem: str
) -> None:
    fleet = fleet_of(Worker(id="w0"), Worker(id="w1"), Worker(id="w2", cap=16), batch=32)
    with pytest.raises(ConfigError, match=problem):
        Fixed(shares=shares).first_shares(None, fleet, 32)


def test_fixed_shares_become_proportions_while_the_fleet_differs() -> None:
    a, b, c = (Worker(id=name, kind=name) for name in "abc")
    policy = Fixed(shares=(4, 4, 24))
    memory, _ = policy.first_shares(None, fleet_of(a, b, c, batch=32), 32)
    memory, (shares, reason) = policy.first_shares(memory, fleet_of(a, c, batch=32), 32)
    assert shares.tolist() == [4, 28]
    assert "proportions" in reason
    memory, (shares, reason) = policy.first_shares(memory, fleet_of(a, b, c, batch=32), 32)
    assert shares.tolist() == [4, 4, 24]
    assert reason == "as given"


def test_a_worker_without_a_fixed_share_counts_as_its_kind() -> None:
    policy = Fixed(shares=(10, 30))
    slow, fast = Worker(id="a", kind="slow"), Worker(id="b", kind="fast")
    memory, _ = policy.first_shares(None, fleet_of(slow, fast, batch=40), 40)
    another, stranger = Worker(id="c", kind="fast"), Worker(id="d", kind="else")
    _, (shares, _) = policy.first_shares(
        memory, fleet_of(slow, fast, another, stranger, batch=90), 90
    )
    assert shares.tolist() == [10, 30, 30, 20]


def test_a_share_of_zero_stays_zero_if_others_have_capacity() -> None:
    policy = Fixed(shares=(0, 16, 16))
    workers = [Worker(id=name) for name in "abc"]
    memory, _ = policy.first_shares(None, fleet_of(*workers, batch=32), 32)
    _, (shares, _) = policy.first_shares(memory, fleet_of(*workers[:2], batch=32), 32)
    assert shares.tolist() == [0, 32]
