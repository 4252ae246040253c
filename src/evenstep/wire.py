"""Messages as lines of JSON: strictly decoded, limited in size, rejected with a typed error."""

from __future__ import annotations

import re
import zlib
from typing import Any, Generic, TypeVar

import msgspec

from evenstep.errors import InvalidInputError

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""The longest line: enough for the reports of a few hundred thousand workers."""

_CHECKSUM = re.compile(rb',"crc":(0|[1-9]\d*)\}\n?\Z')


class Codec(Generic[T]):
    """Encodes and decodes one type of message. Raises nothing but InvalidInputError.

    With `checksum`, a line ends with the CRC-32 of what is before it. Lines of older versions have
    none, and are decoded without.
    """

    def __init__(self, kind: Any, *, max_bytes: int = MAX_BYTES, checksum: bool = False) -> None:
        self.max_bytes, self._checksum = max_bytes, checksum
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._encoder = msgspec.json.Encoder()

    def encode(self, message: T) -> bytes:
        """The message as one line, with its newline."""
        try:
            line = self._encoder.encode(message) + b"\n"  # JSON escapes newlines in text
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            raise InvalidInputError("message", f"cannot be written as JSON: {e}") from None
        if self._checksum:
            body = line[:-2]  # without the closing brace
            line = b'%b,"crc":%d}\n' % (body, zlib.crc32(body))
        if len(line) > self.max_bytes:
            raise InvalidInputError("message", self._too_long(len(line)))
        return line

    def decode(self, line: bytes) -> T:
        """The message in a line, with or without its newline."""
        if len(line) > self.max_bytes:
            raise InvalidInputError("message", self._too_long(len(line)))
        if self._checksum and (found := _CHECKSUM.search(line, max(0, len(line) - 24))):
            body = line[: found.start()]
            if zlib.crc32(body) != int(found[1]):
                raise InvalidInputError("message", "is damaged: its checksum does not match")
            line = body + b"}"
        try:
            return self._decoder.decode(line)
        except msgspec.ValidationError as e:
            raise InvalidInputError("message", f"has the wrong form: {e}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise InvalidInputError("message", f"is not one line of JSON: {e}") from None

    def _too_long(self, num_bytes: int) -> str:
        return f"has {num_bytes} bytes, more than the limit of {self.max_bytes}"
