"""Which coordinator a run obeys, and which workers may write its checkpoints: the file `term`.

A lock keeps two coordinators on one host apart, but hosts that share a folder need not share locks.
So each coordinator claims a term, one above the last. It checks its claim before it acts, ends as
soon as another one has claimed a later term, and renews no lease while it cannot tell. When the
last lease is over, no worker of an earlier term trains any more.

The fence is the newest generation that was announced, with its term. Workers that have heard of no
generation so new write no checkpoints.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from evenstep.errors import ConfigError, EvenstepError
from evenstep.journal import set_aside
from evenstep.lines import private, sync_folder
from evenstep.processes import Liveness, ProcessIdentity

log = logging.getLogger("evenstep")

TERM = "term"
"""In a run folder: the current term."""

NOTICE_S = 1.0  # for a coordinator elsewhere to notice a claim; it checks several times a second
RETRY_S = 1.0  # between attempts to claim a term on a full disk

_PART = f".{TERM}"


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    number: int = 0
    coordinator: ProcessIdentity | None = None
    lease_s: float = 0.0  # the longest that was granted in this or an earlier term
    fence: tuple[int, int] = (0, 0)  # a term, and a generation that was announced in it


class TermOverError(EvenstepError, RuntimeError):
    """Another coordinator has taken over the run."""


def read_term(folder: Path) -> Term:
    """The newest term. Raises OSError if the file cannot be read."""
    content = (folder / TERM).read_bytes()
    try:
        return msgspec.json.decode(content, type=Term)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise OSError(errno.EBADMSG, f"it is damaged ({e})") from None


class Claim:
    """One coordinator's term. Taking it ends the term of the coordinator before.

    If the disk is full, taking over a run waits for room: its workers train on meanwhile. A damaged
    file is set aside, and `recover` tells of the last term from other files of the run.
    """

    def __init__(
        self, folder: Path, lease_s: float, recover: Callable[[], Term] = lambda: Term()
    ) -> None:
        self._folder, self._mine, self._recover = folder, Term(), recover
        self._damage = ""  # of the file as it was found
        try:
            before = self._take(lease_s)
            self.lease_before_s = before.lease_s
            # On this host the folder's lock says that it has ended.
            if before.coordinator and before.coordinator.liveness() is Liveness.UNKNOWN:
                log.warning(
                    "cannot tell whether the coordinator before, pid %d on %s, has ended: taking "
                    "the run over from it",
                    *(before.coordinator.pid, before.coordinator.host),
                )
                time.sleep(NOTICE_S)
                self.check()
        except OSError as e:
            raise ConfigError(str(folder / TERM), f"cannot be claimed: {e.strerror}") from None

    def _take(self, lease_s: float) -> Term:
        """Claim a term, and return the one before."""
        is_waiting = False
        while True:
            before = self._before()
            self._mine = Term(
                number=before.number + 1,
                coordinator=ProcessIdentity.of(os.getpid()),
                lease_s=max(lease_s, before.lease_s),
                fence=before.fence,
            )
            try:
                self._write(self._mine)
                return before
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not before.number:
                    raise
                if not is_waiting:
                    log.warning(
                        "%s: no room to claim the run (%s). Trying again every %g s; workers that "
                        "outlived the coordinator before train on until their lease is over",
                        *(self._folder / TERM, e.strerror, RETRY_S),
                    )
                is_waiting = True
            time.sleep(RETRY_S)

    def _before(self) -> Term:
        """The term before, as far as it is known."""
        path = self._folder / TERM
        try:
            return read_term(self._folder)
        except FileNotFoundError:  # a new run, or one made by an older evenstep
            return self._recover() if self._damage else Term()
        except OSError as e:
            if e.errno != errno.EBADMSG:
                raise
            self._damage = str(e.strerror)
        before, aside = self._recover(), set_aside(path)
        log.error(
            "%s: %s; the damaged file is %s. The run goes on with term %d, above all that "
            "checkpoints and the membership record know of; the longest lease that they know of is "
            "%g s. A coordinator on another host that still runs will end",
            *(path, self._damage, aside.name, before.number + 1, before.lease_s),
        )
        return before

    @property
    def number(self) -> int:
        return self._mine.number

    def check(self) -> None:
        """Raise TermOverError if another coordinator has the run; OSError: cannot tell."""
        try:
            found = read_term(self._folder)
        except OSError as e:
            if e.errno != errno.EBADMSG:
                raise
            found = Term()  # another coordinator would have replaced it as a whole
        if found == self._mine:
            return
        if found.number < self._mine.number:  # damaged, or written late by a coordinator before
            self._write(self._mine)
            return
        who = found.coordinator
        where = f"process {who.pid} on {who.host}" if who else "it"
        raise TermOverError(
            f"another coordinator has taken the run over: {where} has term {found.number}, this "
            f"one had {self._mine.number}"
        )

    def move_fence(self, generation: int) -> None:
        """From now on, workers that have not heard of this generation write no checkpoints."""
        if (fence := (self._mine.number, generation)) > self._mine.fence:
            self.check()
            self._write(replace(self._mine, fence=fence))

    def _write(self, term: Term) -> None:
        with open(self._folder / _PART, "wb", opener=private) as file:
            file.write(msgspec.json.encode(term))
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave it empty
        (self._folder / _PART).rename(self._folder / TERM)
        if term.fence == self._mine.fence:  # a claim; after a power failure an older fence will do
            sync_folder(self._folder)
        self._mine = term
