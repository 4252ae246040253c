"""The page of `evenstep run --page`: a process of its own, which lives as long as the run."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from evenstep.errors import ConfigError
from evenstep.launch.die_with_parent import die_with_parent

log = logging.getLogger("evenstep")

NEEDS = 'the page needs: pip install "evenstep[ui]"'
NICENESS = 10  # training comes first
END_S = 5.0


def check_page() -> None:
    """A ConfigError if the packages that the page needs are not installed."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError("", NEEDS)


@asynccontextmanager
async def page_beside(run: Path) -> AsyncIterator[None]:
    """Serve a page of this run meanwhile, and log its URL. If it fails, the run goes on."""
    process = await _start(run)
    if process is None:
        yield
        return
    watching = asyncio.create_task(_watch(process, run))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        if process.returncode is None:
            await _end(process)
            log.info("the page ended with the run; `evenstep page %s` opens it again", run)


async def _start(run: Path) -> asyncio.subprocess.Process | None:
    """The page's process; None if the system has no room for it."""
    command = die_with_parent([sys.executable, "-m", "evenstep", "page", str(run)])
    # A session of its own: Ctrl-C means the run, whose last steps the page still shows.
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    except OSError as e:
        log.warning("there is no page: %s; `evenstep page %s` opens one", e, run)
        return None
    with suppress(psutil.Error):
        psutil.Process(process.pid).nice(NICENESS)
    return process


async def _watch(process: asyncio.subprocess.Process, run: Path) -> None:
    """Log the URL, what goes wrong, and an early end."""
    assert process.stdout is not None
    assert process.stderr is not None
    if url := (await process.stdout.readline()).decode(errors="replace").strip():
        log.info("page: %s", url)
    said = ""
    async for line in _lines(process.stderr):
        said = line.partition("evenstep: ")[2] or line  # without the time of day
        if url:
            log.info("page: %s", said)
    text = "there is no page any more (exit code %s): %s; `evenstep page %s` opens it again"
    log.warning(text, await process.wait(), said or "it said nothing", run)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """What is said, without empty lines. One that is too long to be kept is passed over."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        if text := line.decode(errors="replace").strip():
            yield text


async def _end(process: asyncio.subprocess.Process) -> None:
    """Its output is read to the end: with pipes that are full, `wait` would wait for ever."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.communicate(), END_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
