"""Messages as lines of JSON: strictly decoded, limited in size, rejected with a typed error."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from evenstep.errors import InvalidInputError

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""The longest line: enough for the reports of a few hundred thousand workers."""


class Codec(Generic[T]):
    """Encodes and decodes one type of message. Raises nothing but InvalidInputError."""

    def __init__(self, kind: Any, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._encoder = msgspec.json.Encoder()

    def encode(self, message: T) -> bytes:
        """The message as one line, with its newline."""
        try:
            line = self._encoder.encode(message) + b"\n"  # JSON escapes newlines in text
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            raise InvalidInputError("message", f"cannot be written as JSON: {e}") from None
        if len(line) > self.max_bytes:
            raise InvalidInputError("message", self._too_long(len(line)))
        return line

    def decode(self, line: bytes) -> T:
        """The message in a line, with or without its newline."""
        if len(line) > self.max_bytes:
            raise InvalidInputError("message", self._too_long(len(line)))
        try:
            return self._decoder.decode(line)
        except msgspec.ValidationError as e:
            raise InvalidInputError("message", f"has the wrong form: {e}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise InvalidInputError("message", f"is not one line of JSON: {e}") from None

    def _too_long(self, num_bytes: int) -> str:
        return f"has {num_bytes} bytes, more than the limit of {self.max_bytes}"
