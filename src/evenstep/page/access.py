"""Who may see the page, and who may command: keys, cookies, and the headers of every response.

The page has two keys. The full one is in the URL that is printed, and may command if the page was
started with `--commands`. The reading one, derived from it, is in the file `page.key` of the run
folder for programs such as Prometheus, and may be passed on to people who should only watch.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

KEY_FILE = "page.key"
"""In a run folder: the key to read its page, mode 0600."""

KEY_BYTES = 16

CSRF_HEADER = "x-evenstep-token"

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""On every response."""


class Role(Enum):
    """What a request may do."""

    READ = "read"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Keys:
    """The page's secrets, all derived from one."""

    full: str

    @property
    def read(self) -> str:
        """The key that only reads."""
        return self._derived("read")

    def cookie(self, role: Role) -> str:
        """The content of a session's cookie."""
        return self._derived(f"cookie {role.value}")

    @property
    def csrf(self) -> str:
        """What a command carries in its header: only scripts of the page itself can know it."""
        return self._derived("csrf")

    def role_of_key(self, key: str) -> Role | None:
        """What the holder of a key may do; None: it is no key of this page."""
        found = None
        for role, known in ((Role.READ, self.read), (Role.FULL, self.full)):
            found = role if same(key, known) else found
        return found

    def role_of_cookie(self, content: str) -> Role | None:
        """The same for a cookie."""
        found = None
        for role in Role:
            found = role if same(content, self.cookie(role)) else found
        return found

    def _derived(self, what: str) -> str:
        digest = hmac.new(self.full.encode(), f"evenstep page {what}".encode(), hashlib.sha256)
        return digest.hexdigest()[: 2 * KEY_BYTES]


def same(one: str, other: str) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def cookie_name(port: int) -> str:
    """Browsers send cookies to all ports of a host: pages on several ports must not share one."""
    return f"evenstep-{port}"


def role_of(headers: Mapping[str, str], keys: Keys, port: int) -> Role | None:
    """What a request may do, by its cookie or its `Authorization: Bearer KEY`.

    A bearer never commands: commands need the page's own cookie and header.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return Role.READ if keys.role_of_key(key.strip()) else None
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return None
    morsel = cookies.get(cookie_name(port))
    return keys.role_of_cookie(morsel.value) if morsel else None


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Whether a Host header means this server.

    DNS rebinding makes a browser believe that a stranger's name is this host, so names are only
    those known. An address cannot be rebound.
    """
    try:
        host = urlsplit(f"//{header}").hostname or ""
        if host in names or host == "localhost":
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def problem_of_command(headers: Mapping[str, str], role: Role, keys: Keys) -> str:
    """Why a request may not command; empty if it may."""
    if role is not Role.FULL:
        return "this key only reads; open the URL that `evenstep page` printed"
    if not same(headers.get(CSRF_HEADER, ""), keys.csrf):
        return "the request has no valid token of this page; reload the page"
    host = headers.get("host", "")
    if urlsplit(headers.get("origin", "")).netloc != host:
        return "the request comes from another site"
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "the request comes from another site"
    return ""


def write_key(folder: Path, key: str) -> Path:
    """Save a key for programs that may read it; returns the file's path. May raise OSError."""
    path, fresh = folder / KEY_FILE, folder / f".{KEY_FILE}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode=0o600)
    try:
        os.write(file, f"{key}\n".encode())
    finally:
        os.close(file)
    fresh.rename(path)
    return path
