"""A run folder: token, journal, membership record, address, logs and checkpoints of one run."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from evenstep.coordinate.addresses import is_here
from evenstep.coordinate.events import CHECKPOINT
from evenstep.coordinate.term import TERM
from evenstep.errors import ConfigError
from evenstep.identity import TOKEN_BYTES, parse_credentials
from evenstep.lines import private, sync_folder
from evenstep.processes import Liveness, ProcessIdentity
from evenstep.types import WorkerId

JOURNAL, STOPPING = "journal.jsonl", "stopping"
"""In a run folder: what the brain decided."""

MEMBERSHIP = "membership.jsonl"
"""In a run folder: what happened to membership."""

TLS = "tls.pem"
"""In a run folder: certificate and key that `--tls` made for the run."""

PRIVATE = 0o700  # folders: their owner's alone

log = logging.getLogger("evenstep")


class RunFolder:
    """The folder of a run, held by one coordinator at a time. See `make` and `open`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        content = os.pread(lock, 4096, 0).decode(errors="replace")
        self.token, self.fingerprint = parse_credentials(content, f"{path}/token")
        self._newest = ""  # path of the newest checkpoint, as last seen
        self._unwritten = b""  # the address, while it cannot be written
        self.problem = ""  # why the address cannot be written
        self._unread = ""  # why the checkpoints cannot be listed, as last logged

    @classmethod
    def make(cls, path: Path, fingerprint: str = "", tls: bytes = b"", *, token: str = "") -> Self:
        """A new run, with a token that only this user can read: the given one, or a new one.

        With TLS, the token file also has the certificate's fingerprint, once and for all: workers
        and operators keep a copy. `tls` is a certificate of the run's own, with its key.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=PRIVATE, exist_ok=True)
            if (path / "token").exists():
                raise FileExistsError
            if not any(path.iterdir()):
                with suppress(PermissionError):  # a volume of somebody else's, say
                    path.chmod(PRIVATE)
            if (path / "checkpoints").exists() and (found := _newest_in(path / "checkpoints")):
                raise ConfigError(
                    str(path), f"holds checkpoints of another run, {found}; name another folder"
                )
            lock = os.open(
                path / "token", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode=0o600
            )
        except FileExistsError:
            raise ConfigError(
                str(path), "holds a run already; go on with it by --resume, or name another folder"
            ) from None
        except OSError as e:
            raise ConfigError(str(path), f"cannot be made: {e.strerror}") from None
        try:
            if tls:
                _write_private(path / TLS, tls)
            lines = [token or secrets.token_hex(TOKEN_BYTES)]
            content = "".join(f"{line}\n" for line in (*lines, fingerprint) if line).encode()
            if os.write(lock, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(lock)
            sync_folder(path)
            sync_folder(path.parent)
        except OSError as e:
            for name in (TLS, "token"):
                (path / name).unlink(missing_ok=True)
            os.close(lock)
            raise ConfigError(str(path), f"cannot be made: {e.strerror}") from None
        return cls._held(path, lock)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The folder of a run that is resumed."""
        try:
            lock = os.open(path / "token", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise ConfigError(str(path), f"is not the folder of a run: {e.strerror}") from None
        return cls._held(path, lock)

    @classmethod
    def _held(cls, path: Path, lock: int) -> Self:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(str(path), "has a coordinator already") from None
        try:
            held = cls(path.absolute(), lock)
        except ConfigError:
            os.close(lock)
            raise
        try:
            held.logs.mkdir(mode=PRIVATE, exist_ok=True)
            (held.path / "checkpoints").mkdir(mode=PRIVATE, exist_ok=True)
            held._newest = _newest_in(held.path / "checkpoints")
        except OSError as e:  # a run resumed without its checkpoints would start over
            held.close()
            raise ConfigError(str(e.filename), f"cannot be read: {e.strerror}") from None
        if mode := stat.S_IMODE(path.stat().st_mode) & ~PRIVATE:
            log.warning(
                "%s: other users of this host may %s; its token stays private. To keep all of it "
                "to yourself: chmod 700 %s",
                *(path, "list or change its files" if mode & 0o022 else "list its files", path),
            )
        return held

    def close(self) -> None:
        """Release the folder for another coordinator."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def discard(self) -> None:
        """Remove the folder of a run that never began, so that its name can be used again.

        Removes what a coordinator wrote before it listened, and the folder if it is empty then.
        """
        for name in (TLS, MEMBERSHIP, TERM, "token"):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.logs, self.path / "checkpoints", self.path):
            with suppress(OSError):  # it holds something that is not ours
                folder.rmdir()
        self.close()

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def membership(self) -> Path:
        """The membership record."""
        return self.path / MEMBERSHIP

    @property
    def logs(self) -> Path:
        """The folder with the output of workers that were launched here."""
        return self.path / "logs"

    def launched(self) -> set[WorkerId]:
        """Every worker that was ever launched here: each has a log."""
        return {log.stem for log in self.logs.glob("*.log")}

    def outlived(self) -> dict[WorkerId, int]:
        """Workers that outlived the coordinator that launched them here, and their pids."""
        found = self._processes()
        return {w: p.pid for w, p in found.items() if p.liveness() is Liveness.ALIVE}

    def ended(self) -> set[WorkerId]:
        """Launched workers that surely have ended; of others this host may not be able to tell."""
        return {w for w, p in self._processes().items() if p.liveness() is Liveness.ENDED}

    def _processes(self) -> dict[WorkerId, ProcessIdentity]:
        """Launched workers' processes, except those without a readable pid file."""
        found = {}
        for worker in self.launched():
            with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                content = (self.logs / f"{worker}.pid").read_bytes()
                found[worker] = msgspec.json.decode(content, type=ProcessIdentity)
        return found

    def newest_checkpoint(self) -> str:
        """The path of the newest checkpoint, empty if there is none.

        If the folder cannot be read, the one last seen: a run that starts over would overwrite it.
        """
        folder, problem = self.path / "checkpoints", ""
        try:
            self._newest = _newest_in(folder)
        except OSError as e:
            problem = str(e.strerror)
            if isinstance(e, FileNotFoundError):  # the checkpoints are gone with it
                self._newest = ""
        if problem and problem != self._unread:
            log.warning("%s cannot be read: %s; the run goes on", folder, problem)
        self._unread = problem
        return self._newest

    def address(self) -> str:
        """The address where the coordinator listens or last listened; empty if it never did."""
        return read_addresses(self.path)[0]

    def write_address(self, address: str, elsewhere: str = "") -> None:
        """Save the coordinator's address, and the one for other hosts if that differs."""
        self._unwritten = "".join(f"{a}\n" for a in (address, elsewhere) if a).encode()
        self.flush()

    def flush(self) -> None:
        """Write the address, if that was not possible before."""
        problem = ""
        if self._unwritten:
            try:
                self._replace("address", self._unwritten)
                self._unwritten = b""
            except OSError as e:
                problem = f"{self.path / 'address'}: cannot be written: {e.strerror}"
        if problem and not self.problem:
            log.error("%s; the run goes on, but commands do not find it", problem)
        elif self.problem and not problem:
            log.warning("%s: is written now", self.path / "address")
        self.problem = problem

    def mark_stopping(self, stopping: bool = True) -> None:
        """Note for a coordinator that takes over that the workers leave; or remove that note."""
        if stopping:
            (self.path / STOPPING).touch()
        else:
            (self.path / STOPPING).unlink(missing_ok=True)

    def take_stopping_mark(self) -> bool:
        """Whether an earlier coordinator left that note; removes it."""
        found = (self.path / STOPPING).exists()
        (self.path / STOPPING).unlink(missing_ok=True)
        return found

    def _replace(self, name: str, data: bytes) -> None:
        fresh = self.path / f".{name}"
        with open(fresh, "wb", opener=private) as file:
            file.write(data)
        fresh.rename(self.path / name)  # atomic: nobody reads half of it


def _write_private(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # others might be allowed to read it
    with open(path, "xb", opener=private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_addresses(path: Path) -> tuple[str, str]:
    """The coordinator's address, and the one for other hosts; empty if there is none."""
    try:
        found = (path / "address").read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return "", ""
    address, elsewhere, *_ = [*found, "", ""]
    return address, elsewhere


def address_from_here(path: Path) -> str:
    """Where this host reaches the coordinator; empty if there is none.

    OSError: the coordinator's host has a name that this machine cannot resolve.
    """
    local, remote = read_addresses(path)
    host = remote.rpartition(":")[0].strip("[]")
    if not remote or host == socket.gethostname() or is_here(host):
        return local
    return remote


def _newest_in(folder: Path) -> str:
    found = [
        (int(match[1]), str(entry))
        for entry in folder.iterdir()
        if (match := CHECKPOINT.fullmatch(entry.name))
    ]
    return max(found, default=(0, ""))[1]
