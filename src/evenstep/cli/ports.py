"""Which ports a run opens, on which interface and to whom, in words."""

from __future__ import annotations

import os
from collections.abc import Iterable

from evenstep.coordinate.addresses import interface_of, spell
from evenstep.coordinate.tls import shortened


def control_port(sockets: Iterable[tuple[str, int]], fingerprint: str) -> str:
    """Of the coordinator."""
    where = " and ".join(f"{spell(host, port)} on {interface_of(host)}" for host, port in sockets)
    kind = f"TLS, certificate {shortened(fingerprint)}" if fingerprint else "not encrypted"
    return f"control port {where}: open to those who prove the run's token; {kind}"


def data_ports(address: str) -> str:
    """Of the workers on this host, for gradients."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    where = f"{chosen} (GLOO_SOCKET_IFNAME)" if chosen else f"{interface_of(address)}, {address}"
    return (
        f"data ports on {where}: one a worker, chosen by Gloo; open to anyone who reaches them; "
        "not encrypted"
    )
