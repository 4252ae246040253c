"""HSDP: a host whose processes shard one model with FSDP2 is one worker of the run.

    with fsdp.join(processes=4) as session:
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = session.prepare(model, optimizer)

The process that `evenstep run` or `evenstep join` starts runs the same command as often as needed:
all of them run the whole script, as under torchrun, with a session each.

A host, not a process, is the worker because FSDP cannot lose a process: so membership, plans and
the brain stay as they are, and rollback and handover are those of any worker, on a shard. All that
is added: the processes agree before they act on what happens outside (`train/comm/host.py`), and
end together. More in docs/explanation/hsdp.md.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import FileStore

from evenstep.errors import ConfigError
from evenstep.launch.die_with_parent import die_with_parent
from evenstep.launch.environment import read_environment
from evenstep.launch.logs import show_log_by_default
from evenstep.launch.ranks import StaticRank
from evenstep.strict import whole
from evenstep.train.comm.host import Host, OtherProcesses
from evenstep.train.join import elastic_session, read_options
from evenstep.train.session import Session

log = logging.getLogger("evenstep")

PLACE = "EVENSTEP_HOST_PROCESS"  # of a process that the first one has started
FOREVER = timedelta(days=365)  # processes of a host end together: none waits in vain
GOODBYE_S = 60.0  # for the other processes of the host to end after the first
MAX_PROCESSES = 16


def join(
    processes: int,
    *,
    policy: str | dict[str, Any] = "auto",
    cap: int | None = None,
    min_share: int = 1,
    seed: int = 0,
    kind: str = "",
    **settings: Any,
) -> Session:
    """Take part in a run as a host of so many processes; they share one share of each step.

    Call it first in the script: it starts the other processes, with the same command, and makes the
    default process group of `torch.distributed`, which `fully_shard(model)` uses. The arguments
    are those of `evenstep.join`; `cap` and `min_share` are of the host. All hosts of a run need as
    many processes.
    """
    num = whole("processes", processes, 2)
    if num > MAX_PROCESSES:
        raise ConfigError("processes", f"at most {MAX_PROCESSES} on a host, got {num}")
    options = read_options(policy, cap, min_share, seed, kind, settings)
    where = read_environment(os.environ)
    if isinstance(where, StaticRank):
        raise ConfigError(
            "fsdp.join",
            "needs a coordinator, on one host too: start the script with `evenstep run --workers 1 "
            "SCRIPT`. Alone or under torchrun, use FSDP by itself",
        )
    if distributed.is_initialized():
        raise ConfigError(
            "fsdp.join", "makes the host's process group: do not call init_process_group before"
        )
    show_log_by_default()
    host = _follow(num) if PLACE in os.environ else _lead(num)
    return elastic_session(where, options, host)


def _lead(num: int) -> Host:
    """Start the other processes of this host."""
    folder = tempfile.TemporaryDirectory(prefix="evenstep-host-")
    pairs = [socket.socketpair() for _ in range(1, num)]
    others = []
    for rank, (_, there) in enumerate(pairs, start=1):
        place = f"{rank} {there.fileno()} {folder.name}"
        # Each one is killed by the kernel when this process ends, in whatever way.
        others.append(
            subprocess.Popen(
                die_with_parent(_own_command()),
                env={**os.environ, PLACE: place},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        )
        there.close()
    host_processes = OtherProcesses(others)
    atexit.register(_end, host_processes, folder)
    _meet(folder.name, 0, num)
    host_processes.have_met()
    links = tuple(here for here, _ in pairs)
    return Host(rank=0, size=num, links=links, others=host_processes)


def _follow(num: int) -> Host:
    """Be one of the other processes."""
    rank, fd, folder = os.environ.pop(PLACE).split(" ", 2)
    link = socket.socket(fileno=int(fd))
    log.setLevel(logging.WARNING)  # the first process tells what concerns the worker
    _meet(folder, int(rank), num)
    return Host(rank=int(rank), size=num, links=(link,))


def _own_command() -> list[str]:
    """What started this process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = sys.argv[:1] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, *script, *sys.argv[1:]]


def _end(others: OtherProcesses, folder: tempfile.TemporaryDirectory[str]) -> None:
    """At exit: wait for the other processes, so that the host leaves as a whole."""
    others.see_off(GOODBYE_S)
    folder.cleanup()


def _meet(folder: str, rank: int, num: int) -> None:
    """Make the host's process group, which no other host can reach."""
    with _loopback():
        distributed.init_process_group(
            "gloo",
            store=FileStore(f"{folder}/store", num),
            rank=rank,
            world_size=num,
            timeout=FOREVER,
        )


@contextmanager
def _loopback() -> Iterator[None]:
    """Gloo listens for processes of this machine only."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = "lo"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
