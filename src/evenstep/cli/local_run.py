"""A run: the coordinator, the workers that it starts here or on an engine, and signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from msgspec.structs import replace

from evenstep.cli.endpoint import advertised_address
from evenstep.cli.engine import ChosenEngine
from evenstep.cli.live_view import live_view, log_above
from evenstep.cli.page_beside import page_beside
from evenstep.cli.ports import control_port, data_ports
from evenstep.cli.signals import StopRequests, discard_output, echo, piped_outputs, stop_signals
from evenstep.coordinate.addresses import EVERYWHERE, spell
from evenstep.coordinate.events import (
    MAX_WORKERS,
    Adopted,
    Dying,
    Ending,
    EvictAsked,
    Exited,
    Gone,
    KillAsked,
    StartAsked,
    StopAsked,
    Terms,
)
from evenstep.coordinate.run_folder import RunFolder
from evenstep.coordinate.service import Service
from evenstep.errors import ConfigError
from evenstep.launch.local import LocalLauncher, worker_environment
from evenstep.launch.remote import RemoteWorkers
from evenstep.observe.feed import SinkFeed
from evenstep.observe.tally import Totals
from evenstep.types import WorkerId, listed

log = logging.getLogger("evenstep")

GRACE_S = 10.0  # for the other workers to exit when one has failed
LINGER_S = 5.0  # for workers that join too late to hear that nothing is left to do
LEAVE_S = 60.0  # for the process of a worker that has left the run to exit
POLL_S = 5.0  # between two checks for processes that still run


class LocalRun:
    """Runs a coordinator and the workers that it launches here, until the last process exits.

    `size_asked`: the user asked for exactly `num_workers`; otherwise it is only a start.
    """

    def __init__(
        self,
        folder: RunFolder,
        terms: Terms,
        num_workers: int,
        command: list[str],
        *,
        size_asked: bool,
        with_page: bool = False,
        sinks: SinkFeed | None = None,
        hands_over: bool = False,
        engine: ChosenEngine | None = None,
        clock: Callable[[], float] = time.monotonic,
        leave_s: float = LEAVE_S,
        linger_s: float = LINGER_S,
    ) -> None:
        self._clock, self._leave_s, self._linger_s = clock, leave_s, linger_s
        self._hands_over = hands_over
        self._folder, self._command = folder, command
        self._num_workers, self._size_asked = num_workers, size_asked
        self._with_page = with_page
        self._terms = terms
        bound = f":{terms.max_workers}" if terms.max_workers < MAX_WORKERS else ""
        about = {"script": Path(command[0]).name, "workers": f"{num_workers}{bound}"}
        self._engine = engine
        if engine is not None:
            about["engine"] = engine.name
        self._service = Service(folder, terms, about, sinks)
        self._requests = StopRequests(clock)
        self._workers: LocalLauncher | RemoteWorkers
        self._killed = False
        self._cut_short = ""  # scripts that a signal ended after training

    async def run_to_end(self, host: str, port: int, tls: ssl.SSLContext | None) -> Ending:
        """Train. However the run ends, no process that was started here is left."""
        try:
            address = await self._listen(host, port, tls)
        except BaseException:
            await self._service.close()
            raise
        try:
            self._workers = workers = await self._make_workers(host, address)
        except BaseException:
            await self._service.close()
            raise
        self._service.coordinator.launcher = workers
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self.on_signal, number)
        for fd in piped_outputs():  # the write end of a pipe is never readable: its reader is gone
            loop.add_reader(fd, self._reader_gone, fd)
        with log_above(workers.console):
            try:
                return await self._train(host, address)
            finally:
                await workers.end_all()
                await self._service.close()

    async def _train(self, host: str, address: str) -> Ending:
        service = self._service
        echo(f"evenstep: run {self._folder.path}, coordinator at {address}")
        log.info("%s", control_port(service.server.sockets, self._folder.fingerprint))
        if self._num_workers:
            log.info("%s", data_ports(advertised_address(host, host) or "127.0.0.1"))
        if not self._num_workers:
            log.info("%s", _how_to_join(self._folder.path, address, self._command[0]))
        await self._take_over()
        service.handle(StartAsked(num_workers=self._num_workers, explicit=self._size_asked))
        page = page_beside(self._folder.path) if self._with_page else nullcontext()
        async with page:
            return await self._train_to_end()

    async def _take_over(self) -> None:
        """Go on with the workers of an earlier coordinator."""
        workers, service = self._workers, self._service
        if isinstance(workers, LocalLauncher):
            for worker, pid in self._folder.outlived().items():
                workers.adopt(worker, pid)
                service.handle(Adopted(worker=worker))
            return
        earlier = self._folder.launched()
        if earlier and (shown := await workers.look_first()) is not None:
            workers.adopt(shown)
            service.handle(Gone(workers=tuple(sorted(earlier - workers.running))))

    async def _train_to_end(self) -> Ending:
        workers, service = self._workers, self._service
        async with live_view(service.status, workers.console, sys.stdout):
            ending = await service.ending()
        workers.stop(sorted(service.state.running_processes - service.state.rostered))
        if ending.ok:
            await self._await_processes()
            if self._terms.awaits_joiners and service.status()["trained_to_end"]:
                await asyncio.sleep(self._linger_s)
        await workers.end_all(0.0 if self._killed else GRACE_S)
        ending = await service.ending()  # a script may also fail after training
        if ending.ok and self._cut_short:
            return replace(ending, why=f"{ending.why}; {self._cut_short}")
        return ending

    @property
    def totals(self) -> Totals:
        """Of the run up to now."""
        return self._service.totals

    async def _await_processes(self) -> None:
        """Wait for the workers' processes after the run has ended.

        A script that has trained to the end may run on for as long as it needs. A worker that left
        the run earlier is terminated after `leave_s`.
        """
        workers, service = self._workers, self._service
        deadline_s = self._clock() + self._leave_s
        logged: set[WorkerId] = set()
        while not await workers.wait(min(POLL_S, self._leave_s)):
            if workers.running != logged:
                logged = workers.running
                log.info("waiting for the processes of %s to end", listed(sorted(logged)))
            if self._clock() >= deadline_s:
                overdue = workers.running - service.state.finished.keys() - service.state.evicted
                for worker in sorted(overdue):
                    text = "%s has left the run but is still running after %g s: terminating it"
                    log.warning(text, worker, self._leave_s)
                    service.handle(EvictAsked(workers=(worker,)))

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> str:
        last_port = self._folder.address().rpartition(":")[2]
        if not port and last_port.isdecimal():  # surviving workers reconnect to this port
            with suppress(OSError):
                return await self._service.open(host, int(last_port), tls)
        try:
            return await self._service.open(host, port, tls)
        except OSError as e:
            raise ConfigError("--host, --port", f"cannot listen at {host}:{port}: {e}") from None

    async def _make_workers(self, host: str, address: str) -> LocalLauncher | RemoteWorkers:
        if self._engine is not None:
            service = self._service
            reached = advertised_address(host, host) or host
            workers = await self._engine.workers(
                service, self._command, spell(reached, address.rpartition(":")[2])
            )
            service.problems = lambda: workers.problems
            return workers
        return self._make_launcher(host, address)

    def _make_launcher(self, host: str, address: str) -> LocalLauncher:
        port = address.rpartition(":")[2]
        env = worker_environment(
            os.environ,
            coordinator=f"{EVERYWHERE[host]}:{port}" if host in EVERYWHERE else address,
            token_file=self._folder.path / "token",
            address=advertised_address(host, host),
            num_workers=self._num_workers,
        )
        service = self._service
        return LocalLauncher(
            [sys.executable, *self._command],
            env=env,
            logs=self._folder.logs,
            on_dying=lambda worker, number: service.handle(Dying(worker=worker, signal=number)),
            on_end=lambda worker, code, output: service.handle(
                Exited(worker=worker, code=code, output=output)
            ),
            out=sys.stdout,
        )

    def _reader_gone(self, fd: int) -> None:
        """As in `evenstep run ... | head`: nobody sees the output, so the run stops."""
        asyncio.get_running_loop().remove_reader(fd)
        discard_output(fd)
        if self._service.state.closing is None:
            self._service.handle(StopAsked(why="the reader of its output is gone"))

    def on_signal(self, number: int) -> None:
        """First request: stop gracefully; second: kill. After the run: terminate the scripts."""
        if self._hands_over and number == signal.SIGTERM:
            echo("evenstep: SIGTERM: ending at once; the workers train on without a coordinator")
            os._exit(os.EX_TEMPFAIL)  # as if it had been killed: nothing is announced
        if not self._requests.count_signal():
            return
        name, service = signal.Signals(number).name, self._service
        ending, running = service.state.ending, sorted(service.state.running_processes)
        if ending is None and self._requests.num == 1:
            log.info("%s: stopping after this step, with a checkpoint; send it again to kill", name)
            service.handle(StopAsked(why=name))
        elif ending is not None and ending.ok and not self._cut_short:
            log.info("%s: terminating scripts that still run; send it again to kill", name)
            if running:
                self._cut_short = f"{name} ended scripts that still ran: {listed(running)}"
            service.handle(EvictAsked(workers=tuple(running)))
        else:
            log.info("%s: killing all workers", name)
            why = f"killed by {name} before it could stop gracefully"
            service.handle(KillAsked(why=why))
            self._killed = True
            for worker in running:
                self._workers.kill(worker)


def _how_to_join(folder: Path, address: str, script: str) -> str:
    """What a run that starts no workers waits for."""
    return (
        "no workers are started here: waiting for them to join by `evenstep join --token-file "
        f"{folder / 'token'} {address} {script}`, with a copy of that file"
    )
