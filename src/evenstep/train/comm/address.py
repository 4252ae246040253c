"""The address under which peers reach this process: that of the interface which reaches the store.

Gloo by itself takes what the host's own name resolves to, which is loopback on many systems.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address

from evenstep.errors import EvenstepError
from evenstep.train.comm.agreement import Meeting


def own_address(meeting: Meeting, host: str, port: int) -> str:
    """This process's address for its peers; all ranks ask. `host` and `port` are the store's."""
    mine, seen = route(host, port)
    meeting.tell("address", seen)
    if ip_address(mine).is_loopback:
        # The store is on this host. Its name may be loopback here alone: others know it better.
        for elsewhere in meeting.hear_all("address"):
            if not ip_address(elsewhere).is_loopback:
                return str(elsewhere)
    return mine


def route(host: str, port: int) -> tuple[str, str]:
    """The address that this machine reaches a host from, and the host's as seen from here."""
    # IPv4 first where there are both: all ranks must choose alike.
    for family, kind, proto, _, target in sorted(
        socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    ):
        with suppress(OSError), socket.socket(family, kind, proto) as s:
            s.connect(target)  # sends nothing: the kernel only looks for the way
            return str(s.getsockname()[0]), str(target[0])
    raise EvenstepError(f"no way from here to the store at {host}:{port}. Check MASTER_ADDR.")
