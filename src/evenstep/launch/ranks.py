"""Ranks of a fixed roster, as launchers tell them by environment variables.

Without this, `srun -n 4 python train.py` would train the same model four times, each alone. All
ranks must derive the same address and port for the rendezvous from what they are told.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from evenstep.errors import ConfigError

Environment = Mapping[str, str]

FIRST_PORT, NUM_PORTS = 10_000, 20_000  # below those that systems give out by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRank:
    """A process's rank in a fixed roster."""

    rank: int = 0
    world: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = True  # rank 0, unless torchrun hosts the store


def find_rank(environment: Environment) -> StaticRank:
    """This process's rank; alone if no launcher says otherwise.

    torchrun's variables come first: it may run on each node of any of the others. Setting
    WORLD_SIZE=1 RANK=0 lets a process train alone whatever started it.
    """
    for name, read in LAUNCHERS:
        if name in environment:
            found = read(environment)
            if found.world > 1:
                return found
            break
    return StaticRank()


def without_rank(environment: Environment) -> dict[str, str]:
    """The environment of a process that is alone, whatever launcher started this one."""
    telling = {name for name, _ in LAUNCHERS} | {"MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"}
    return {name: value for name, value in environment.items() if name not in telling}


def _torchrun(environment: Environment) -> StaticRank:
    world = read_number(environment, "WORLD_SIZE", "torchrun")
    rank = _rank(environment, "RANK", "WORLD_SIZE", world, "torchrun")
    if world == 1 and "MASTER_ADDR" not in environment:
        return StaticRank()
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    return StaticRank(
        rank=rank,
        world=world,
        address=_text(environment, "MASTER_ADDR", "torchrun"),
        port=read_number(environment, "MASTER_PORT", "torchrun"),
        hosts_store=rank == 0 and not shared,
    )


def _open_mpi(environment: Environment) -> StaticRank:
    world = read_number(environment, "OMPI_COMM_WORLD_SIZE", "mpirun")
    on_one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world)
    if not on_one_host and world > 1 and "MASTER_ADDR" not in environment:
        raise ConfigError(
            "MASTER_ADDR",
            "is missing: mpirun does not tell where rank 0 runs. Give the address of its host by "
            "mpirun -x MASTER_ADDR=... -x MASTER_PORT=...",
            "environment",
        )
    job = environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_ess_base_jobid", ""))
    return _ranked(
        environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun", "127.0.0.1", job
    )


def _slurm(environment: Environment) -> StaticRank:
    """Tasks of a step. A batch script is told the tasks of its job, too, but not of a step."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    step = f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    address = first_host(hosts)
    return _ranked(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun", address, step)


def _skypilot(environment: Environment) -> StaticRank:
    address = (environment.get("SKYPILOT_NODE_IPS", "").split() or [""])[0]
    task = environment.get("SKYPILOT_TASK_ID", "")
    names = "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SkyPilot"
    return _ranked(environment, *names, address, task)


def _dstack(environment: Environment) -> StaticRank:
    address = environment.get("DSTACK_MASTER_NODE_IP", "")
    run = environment.get("DSTACK_RUN_ID", environment.get("DSTACK_RUN_NAME", ""))
    names = "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "dstack"
    return _ranked(environment, *names, address, run)


LAUNCHERS: tuple[tuple[str, Callable[[Environment], StaticRank]], ...] = (
    ("RANK", _torchrun),
    ("WORLD_SIZE", _torchrun),
    ("OMPI_COMM_WORLD_SIZE", _open_mpi),
    ("SLURM_STEP_NUM_TASKS", _slurm),
    ("SKYPILOT_NUM_NODES", _skypilot),
    ("DSTACK_NODES_NUM", _dstack),
)
"""By the variable that only this launcher sets; inner ones first, as they may run in each other."""


def _ranked(
    environment: Environment, rank_name: str, world_name: str, launcher: str, address: str, job: str
) -> StaticRank:
    """A rank whose launcher names no port: all ranks of a job derive the same one."""
    world = read_number(environment, world_name, launcher)
    rank = _rank(environment, rank_name, world_name, world, launcher)
    address = environment.get("MASTER_ADDR", address)
    if world > 1 and not address:
        raise ConfigError(
            "MASTER_ADDR",
            f"is missing, and {launcher} does not tell where rank 0 runs: set it to the address of "
            "that host",
            "environment",
        )
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    if "MASTER_PORT" in environment:
        port = read_number(environment, "MASTER_PORT", launcher)
    return StaticRank(rank=rank, world=world, address=address, port=port, hosts_store=rank == 0)


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: gpu03 of "gpu[03-05,9],cpu1"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", hosts)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _rank(environment: Environment, name: str, world_name: str, world: int, launcher: str) -> int:
    rank = read_number(environment, name, launcher)
    if not rank < world:
        raise ConfigError(name, f"must be below {world_name}, {world}: got {rank}", "environment")
    return rank


def _text(environment: Environment, name: str, launcher: str) -> str:
    if name not in environment:
        raise ConfigError(name, f"is missing; {launcher} sets it", "environment")
    return environment[name]


def read_number(environment: Environment, name: str, launcher: str) -> int:
    """A variable that a launcher sets to a number."""
    text = _text(environment, name, launcher)
    if not text.isdecimal():
        raise ConfigError(name, f'expected a number, got "{text}"', "environment")
    return int(text)
