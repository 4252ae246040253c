"""Addresses of this machine, and how to write them."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain

import psutil

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses to listen at, and the loopback address to connect to instead."""

_OUTSIDE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # reserved: no host has them


def spell(host: str, port: int | str) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def outward_address(everywhere: str) -> str:
    """This machine's address on its route to other hosts; empty if there is none."""
    family = socket.AF_INET6 if ":" in everywhere else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((_OUTSIDE[everywhere], 9))  # sends nothing: only looks up the route
        return str(probe.getsockname()[0])
    # No route to the outside: the first address that other hosts may know.
    for found in chain.from_iterable(psutil.net_if_addrs().values()):
        if found.family == family:
            address = ip_address(found.address)
            if not (address.is_loopback or address.is_link_local):
                return found.address
    return ""


def interface_of(host: str) -> str:
    """The network interface of this machine that has an address, in words."""
    if host in EVERYWHERE:
        return "all interfaces"
    with suppress(OSError):
        host = str(socket.getaddrinfo(host, 0)[0][4][0])
        if ip_address(host).is_loopback:
            return "loopback"
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == host for each in found):
            return f"interface {name}"
    return "an interface unknown here"


def is_here(host: str) -> bool:
    """Whether a host name or address is this machine's. OSError: the name is unknown."""
    for family, kind, proto, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.bind(address)
            return True
    return False
