"""Ranks from the environments that launchers make; as `env` showed them, shortened."""

from __future__ import annotations

import pytest

from evenstep.errors import ConfigError
from evenstep.launch.environment import CoordinatorAddress, read_environment
from evenstep.launch.ranks import (
    FIRST_PORT,
    NUM_PORTS,
    StaticRank,
    find_rank,
    first_host,
    without_rank,
)

Environment = dict[str, str]

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM_BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[03-05,9],cpu1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",  # of the script itself
}
SRUN = {
    **SLURM_BATCH,
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[04-05]",
    "SLURM_STEP_NUM_TASKS": "4",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_TASK_ID": "sky-2026-11-18-20-00-00-000000_train_1",
}
DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
    "DSTACK_RUN_NAME": "train",
}
NAMES = {
    "srun": (SRUN, "SLURM_PROCID"),
    "mpirun": (MPIRUN, "OMPI_COMM_WORLD_RANK"),
    "SkyPilot": (SKYPILOT, "SKYPILOT_NODE_RANK"),
    "dstack": (DSTACK, "DSTACK_NODE_RANK"),
}


@pytest.mark.parametrize(
    ("environment", "rank", "world", "address"),
    [
        (TORCHRUN, 2, 4, "10.0.0.1"),
        (SRUN, 3, 4, "gpu04"),
        (MPIRUN, 1, 2, "127.0.0.1"),
        (SKYPILOT, 1, 2, "10.0.0.1"),
        (DSTACK, 1, 2, "10.0.0.1"),
        ({**SRUN, "MASTER_ADDR": "gpu9"}, 3, 4, "gpu9"),
        ({**SKYPILOT, **TORCHRUN}, 2, 4, "10.0.0.1"),  # torchrun on each node of a cluster
        ({**SLURM_BATCH, **MPIRUN}, 1, 2, "127.0.0.1"),  # mpirun in a batch script
    ],
)
def test_each_launcher_tells_a_process_its_rank(
    environment: Environment, rank: int, world: int, address: str
) -> None:
    found = find_rank(environment)
    assert (found.rank, found.world, found.address) == (rank, world, address)
    assert found.hosts_store == (rank == 0)


@pytest.mark.parametrize("launcher", NAMES)
def test_all_ranks_of_a_job_derive_the_same_address_and_port(launcher: str) -> None:
    environment, name = NAMES[launcher]
    places = [find_rank({**environment, name: str(rank)}) for rank in range(2)]
    assert [place.rank for place in places] == [0, 1]
    assert len({(place.address, place.port) for place in places}) == 1
    assert FIRST_PORT <= places[0].port < FIRST_PORT + NUM_PORTS
    given = find_rank({**environment, "MASTER_PORT": "4242"})
    assert given.port == 4242


def test_two_jobs_on_one_host_have_ports_of_their_own() -> None:
    ports = {find_rank({**SRUN, "SLURM_JOB_ID": str(job)}).port for job in range(100)}
    assert len(ports) > 90


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM_BATCH,  # only srun starts several
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
        {"DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0"},
        {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},  # as a user may ask for
    ],
)
def test_a_process_without_others_is_alone(environment: Environment) -> None:
    assert find_rank(environment) == StaticRank()


def test_a_coordinator_counts_for_more_than_any_launcher() -> None:
    run = {"EVENSTEP_COORDINATOR": "10.0.0.9:29400", "EVENSTEP_TOKEN": "51c0" * 8}
    for environment, _ in NAMES.values():
        found = read_environment({**environment, **run, "EVENSTEP_WAIT": "600"})
        assert isinstance(found, CoordinatorAddress)
        assert (found.wait_s, found.notice) == (600.0, "")


def test_without_what_tells_its_rank_a_process_is_alone() -> None:
    for environment in (TORCHRUN, SRUN, MPIRUN, SKYPILOT, DSTACK):
        assert find_rank(without_rank(environment)) == StaticRank()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**SRUN, "SLURM_PROCID": "4"}, "SLURM_PROCID: must be below SLURM_STEP_NUM_TASKS, 4"),
        ({**SRUN, "SLURM_PROCID": "x"}, 'SLURM_PROCID: expected a number, got "x"'),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID: is missing; srun sets it"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "srun does not tell where rank 0"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR="),
        ({**DSTACK, "DSTACK_MASTER_NODE_IP": ""}, "dstack does not tell where rank 0 runs"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: is missing; torchrun sets it"),
        ({"WORLD_SIZE": "2"}, "RANK: is missing; torchrun sets it"),
    ],
)
def test_what_a_launcher_leaves_out_is_named(environment: Environment, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_rank(environment)
    assert message in str(error.value)


def test_a_wait_that_is_no_number_is_refused() -> None:
    run = {"EVENSTEP_COORDINATOR": "h:1", "EVENSTEP_TOKEN": "51c0" * 8, "EVENSTEP_WAIT": "10m"}
    with pytest.raises(
        ConfigError, match=r'EVENSTEP_WAIT: expected a number of seconds, got "10m"'
    ):
        read_environment(run)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]node[3,4]", "rack1node3"),
        ("", ""),
    ],
)
def test_the_first_of_slurms_list_of_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
