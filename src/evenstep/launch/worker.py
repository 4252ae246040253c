"""What an engine starts: `python -m evenstep.launch.worker SCRIPT ARGS` becomes the script.

The launcher has set the variables of `ports.EngineJob`. What only this host knows is added here:
the address where other workers reach it, and a number of threads.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from evenstep.launch.environment import host_and_port
from evenstep.launch.ranks import without_rank

LOOPBACK = "127.0.0.1"


def worker_variables(environment: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """The environment of the script."""
    host, port = host_and_port(environment["EVENSTEP_COORDINATOR"]) or ("", 0)
    given = environment.get("EVENSTEP_CORES", "")
    num_threads = min(num_cores, int(given)) if given.isdecimal() and int(given) else num_cores
    own = {
        "OMP_NUM_THREADS": str(max(1, num_threads)),
        "PYTHONUNBUFFERED": "1",
        "EVENSTEP_ADDRESS": address_towards(host, port),
    }
    kept = without_rank(environment)
    if readable(kept.get("EVENSTEP_TOKEN_FILE", "")):
        # The file's folder also tells where a later coordinator listens.
        kept.pop("EVENSTEP_TOKEN", None)
    return {**own, **kept}


def address_towards(host: str, port: int) -> str:
    """This host's address on its route to the coordinator; loopback if that is there or unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: only looks up the route
            local = str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
    return LOOPBACK if ip_address(local.partition("%")[0]).is_loopback else local


def readable(path: str) -> bool:
    """Whether this host has the file."""
    return bool(path) and os.access(Path(path), os.R_OK)


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the script: signals and the exit code are then its own."""
    env = worker_variables(os.environ, len(os.sched_getaffinity(0)))
    os.execve(sys.executable, [sys.executable, *arguments], env)


if __name__ == "__main__":
    main(sys.argv[1:])
