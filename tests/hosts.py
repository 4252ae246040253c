"""Hosts on one machine: network namespaces joined by a switch, with links that can be cut.

The switch is a bridge in a namespace of its own, so the machine's own network is never touched.
Namespaces carry their owner's pid in their names: what a killed run left, the next one removes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from evenstep.emulate.owner import new_name, orphans

SPACES = Path("/run/netns")  # where `ip netns` keeps names
LACKING = ("not permitted", "not supported", "Permission denied", "Unknown device type")
ENDING_S = 600.0


@dataclass(frozen=True, slots=True)
class Host:
    """One of several, alike in everything but its network."""

    space: str
    address: str
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def popen(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process here, as `subprocess.Popen` does; it is ended with the host."""
        command = [_ip(), "netns", "exec", self.space, *args]  # execs: the pid is the process's own
        process = subprocess.Popen(command, env=env, **options)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """All processes that run here, whoever started them."""
        return _pids(self.space)


class Hosts(list[Host]):
    """Hosts that reach each other, until one is cut off."""

    def __init__(self, switch: str) -> None:
        super().__init__()
        self._switch = switch

    def cut(self, i: int) -> None:
        """Pull a host's cable: packets are lost without a word; inside the host all goes on."""
        _run("-n", self._switch, "link", "set", f"port{i}", "down")

    def restore(self, i: int) -> None:
        """Plug the cable in again."""
        _run("-n", self._switch, "link", "set", f"port{i}", "up")


@contextmanager
def make_hosts(num: int) -> Iterator[Hosts]:
    """So many hosts, gone at the end with all that runs in them. Skips the test without rights."""
    for orphan in orphans(SPACES):
        _remove(orphan.name)
    with ExitStack() as stack:
        switch = _new_space(stack)
        _run("-n", switch, "link", "add", "br0", "type", "bridge")
        _run("-n", switch, "link", "set", "br0", "up")
        hosts = Hosts(switch)
        for i in range(num):
            # Nobody else sees these addresses; a run's own are for whoever reads a log. Above 127:
            # Gloo dials the lower of two addresses, so a loopback one cannot happen to work.
            host = Host(_new_space(stack), f"192.168.{os.getpid() % 256}.{i + 1}")
            stack.callback(_end, host)
            port = (f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", host.space)
            _run("-n", switch, "link", "add", *port)
            _run("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
            _run("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("-n", host.space, "link", "set", link, "up")
            hosts.append(host)
        yield hosts


def _new_space(stack: ExitStack) -> str:
    space = new_name()
    stack.callback(_remove, space)
    _run("netns", "add", space)
    return space


def _remove(space: str) -> None:
    _kill_all(space)
    with suppress(subprocess.CalledProcessError):  # another run may sweep at the same time
        _run("netns", "del", space)


def _end(host: Host) -> None:
    _kill_all(host.space)
    for process in host._started:
        process.kill()  # it may have left the namespace
        with process:  # closes its pipes and waits
            pass


def _kill_all(space: str) -> None:
    deadline = time.monotonic() + ENDING_S
    while pids := _pids(space):  # again: they may have started others meanwhile
        assert time.monotonic() < deadline, f"processes {pids} outlive SIGKILL"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids(space: str) -> list[int]:
    with suppress(subprocess.CalledProcessError):  # no such namespace: nothing runs in it
        return [int(pid) for pid in _run("netns", "pids", space).split()]
    return []


def _run(*args: str) -> str:
    done = subprocess.run([_ip(), *args], capture_output=True, text=True, check=False, timeout=600)
    if any(word in done.stderr for word in LACKING):
        pytest.skip(f"no hosts here: ip {' '.join(args)}: {done.stderr.strip()}")
    done.check_returncode()
    return done.stdout


def _ip() -> str:
    found = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    return found or pytest.skip("no hosts here: iproute2's ip is not installed")
