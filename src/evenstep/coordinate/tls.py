"""TLS between a coordinator and its clients, who know its certificate by its fingerprint alone.

The fingerprint is in the run's token file. Who signed the certificate, for which host name and
until when does not matter.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import socket
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.errors import ConfigError
from evenstep.identity import FINGERPRINT

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_CERTIFICATE = re.compile(r"-----BEGIN (?:X509 )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
_FETCH_BYTES = 2**16


def make_certificate() -> bytes:
    """A new self-signed certificate and its private key, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(
            "--tls", "needs the package cryptography: pip install 'evenstep[tls]'"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "evenstep")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))  # nobody looks at the dates
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    return private + certificate.public_bytes(pem)


def pem_fingerprint(path: Path, pem: bytes) -> str:
    """The fingerprint of the first certificate in `pem`, the content of `path`."""
    found = _CERTIFICATE.search(pem.decode("ascii", errors="replace"))
    try:
        if found is None:
            raise ValueError
        framed = f"-----BEGIN CERTIFICATE-----{found[1]}-----END CERTIFICATE-----"
        return fingerprint(ssl.PEM_cert_to_DER_cert(framed))
    except ValueError:
        raise ConfigError(str(path), "holds no certificate: expected one in PEM") from None


def fingerprint(der: bytes) -> str:
    """What a token file says about a certificate."""
    return FINGERPRINT + hashlib.sha256(der).hexdigest()


def shortened(fingerprint: str) -> str:
    """A fingerprint for people."""
    return fingerprint[: len(FINGERPRINT) + 12] + "..."


def server_context(certificate: Path, key: Path | None = None) -> ssl.SSLContext:
    """Serves a certificate; its key is in a file of its own or in the same one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as e:
        files = " and ".join(str(path) for path in (certificate, key) if path)
        raise ConfigError(files, f"cannot be used for TLS: {e}") from None
    return context


class TlsSocket(socket.socket):
    """A client's TLS connection that one thread may read while another one writes.

    `ssl.SSLSocket` is not made for that: it works on one connection in both threads at once.
    """

    def __init__(self, plain: socket.socket) -> None:
        """Takes over a connection. The caller checks `fingerprint` before it sends anything."""
        timeout_s = plain.gettimeout()
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self.settimeout(timeout_s)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self._lock = threading.Lock()  # of the three; never held while the network is waited for
        try:
            self._shake_hands()
            self.fingerprint = fingerprint(self._tls.getpeercert(binary_form=True) or b"")
        except BaseException:
            self.close()
            raise

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                super().sendall(self._outgoing.read())
                return
            except ssl.SSLWantReadError:
                super().sendall(self._outgoing.read())
                self._fetch()

    def _fetch(self) -> None:
        data = super().recv(_FETCH_BYTES)
        with self._lock:
            self._incoming.write(data) if data else self._incoming.write_eof()

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        while True:
            try:
                with self._lock:
                    return self._tls.read(bufsize)
            except ssl.SSLWantReadError:
                self._fetch()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer)
        data = self.recv(nbytes or len(view))
        view[: len(data)] = data
        return len(data)

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        unsent = memoryview(data)
        with self._lock:
            while unsent:
                unsent = unsent[self._tls.write(unsent) :]
            encrypted = self._outgoing.read()
        super().sendall(encrypted)

    def send(self, data: ReadableBuffer, flags: int = 0, /) -> int:
        self.sendall(data)  # rather than in plain text
        return memoryview(data).nbytes
