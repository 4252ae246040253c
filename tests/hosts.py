"""Emulated hosts: network namespaces connected by a switch, with links that can be cut.

The switch is a bridge in its own namespace, so the machine's network is never touched. Namespaces
carry their owner's pid in their names, so the next run removes the leftovers of a killed one.
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

from evenstep.emulate.quota import new_name, orphans

SPACES = Path("/run/netns")  # where `ip netns` keeps names
UNAVAILABLE = ("not permitted", "not supported", "Permission denied", "Unknown device type")
ENDING_S = 600.0


@dataclass(frozen=True, slots=True)
class Host:
    """One host; hosts differ in nothing but their network."""

    space: str
    address: str
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def popen(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this host, like `subprocess.Popen`; it ends with the host."""
        command = [
            _ip(),
            "netns",
            "exec",
            self.space,
            *args,
        ]  # `ip` execs, so the pid is that of the process
        process = subprocess.Popen(command, env=env, **options)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """All processes on this host."""
        return _pids(self.space)


class Hosts(list[Host]):
    """Hosts that reach each other until one is cut off."""

    def __init__(self, switch: str) -> None:
        super().__init__()
        self._switch = switch

    def cut(self, i: int) -> None:
        """Cut a host's link: packets are dropped silently; processes on the host keep running."""
        _run("-n", self._switch, "link", "set", f"port{i}", "down")

    def restore(self, i: int) -> None:
        """Restore a host's link."""
        _run("-n", self._switch, "link", "set", f"port{i}", "up")

    def drop(self, i: int, j: int) -> None:
        """Silently drop all packets from one host to another, and none the other way."""
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        _run("-n", self[i].space, "neigh", "replace", self[j].address, *nobody)


@contextmanager
def make_hosts(num: int) -> Iterator[Hosts]:
    """Create hosts; removed on exit with their processes. Skips the test without rights."""
    for orphan in orphans(SPACES):
        _remove(orphan.name)
    with ExitStack() as stack:
        switch = _new_space(stack)
        _run("-n", switch, "link", "add", "br0", "type", "bridge")
        _run("-n", switch, "link", "set", "br0", "up")
        hosts = Hosts(switch)
        for i in range(num):
            # The addresses are private; they vary by pid to tell runs apart in logs. Above 127.x:
            # Gloo connects to the lower of two addresses, so loopback cannot work by accident.
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
    with suppress(subprocess.CalledProcessError):  # another run may remove it at the same time
        _run("netns", "del", space)


def _end(host: Host) -> None:
    _kill_all(host.space)
    for process in host._started:
        process.kill()  # it may have left the namespace
        with process:  # closes its pipes and waits
            pass


def _kill_all(space: str) -> None:
    deadline = time.monotonic() + ENDING_S
    while pids := _pids(space):  # repeat: they may have started others meanwhile
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
    if any(word in done.stderr for word in UNAVAILABLE):
        pytest.skip(f"cannot emulate hosts: ip {' '.join(args)}: {done.stderr.strip()}")
    done.check_returncode()
    return done.stdout


def _ip() -> str:
    found = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    return found or pytest.skip("cannot emulate hosts: iproute2 is not installed")
