"""The way to a coordinator: a connection with its certificate checked, and which host it is on."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain

import psutil

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listened at, but nowhere to go to
_BEYOND = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # addresses that nobody has


def dial(host: str, port: int, timeout_s: float, tls_ca: str = "") -> socket.socket:
    """A connection; with `tls_ca`, to one who has a certificate of that file, for that host."""
    name = EVERYWHERE.get(host, host)
    there = socket.create_connection((name, port), timeout_s)
    try:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not tls_ca:
            return there
        context = ssl.create_default_context(cafile=tls_ca)
        # The file may hold the coordinator's own certificate without that of who signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context.wrap_socket(there, server_hostname=name)
    except BaseException:
        there.close()
        raise


def spell(host: str, port: int | str) -> str:
    """An address as people and files have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def way_out(everywhere: str) -> str:
    """This machine's address on its way to other hosts; empty if there is no way."""
    family = socket.AF_INET6 if ":" in everywhere else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((_BEYOND[everywhere], 9))  # sends nothing: the kernel only looks for the way
        return str(probe.getsockname()[0])
    # On a network that has no way out of it: the first address that others may know.
    for found in chain.from_iterable(psutil.net_if_addrs().values()):
        if found.family == family:
            address = ip_address(found.address)
            if not (address.is_loopback or address.is_link_local):
                return found.address
    return ""


def is_here(host: str) -> bool:
    """Whether an address, or a name's, is one of this machine's. OSError: nobody knows the name."""
    for family, kind, proto, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.bind(address)
            return True
    return False
