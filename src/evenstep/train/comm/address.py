"""The address at which other ranks reach this process: the interface that routes to the store.

Gloo's default is what the host name resolves to, which is loopback on many systems.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address

from evenstep.errors import EvenstepError
from evenstep.train.comm.shared_store import SharedStore


def reachable_address(shared: SharedStore, host: str, port: int) -> str:
    """This process's address for other ranks, given the store's. All ranks call it."""
    mine, store_seen_from_here = route(host, port)
    shared.publish("address", store_seen_from_here)
    if ip_address(mine).is_loopback:
        # The store is on this host, where its name may resolve to loopback: ask the other ranks.
        for seen in shared.read_all("address"):
            if not ip_address(seen).is_loopback:
                return str(seen)
    return mine


def route(host: str, port: int) -> tuple[str, str]:
    """The local and the remote address of a route from this machine to a host."""
    # Prefer IPv4: all ranks must choose the same family.
    for family, kind, proto, _, target in sorted(
        socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    ):
        with suppress(OSError), socket.socket(family, kind, proto) as s:
            s.connect(target)  # sends nothing: the kernel only picks a route
            return str(s.getsockname()[0]), str(target[0])
    raise EvenstepError(f"no route from here to the store at {host}:{port}. Check MASTER_ADDR.")
