"""How a grading process and its worker talk: length-prefixed pickles over the pipes between the two, nothing else.

Only our own parent and child hold the ends of these pipes, so a pickle never comes from data, a file or a network.
"""

import pickle
import struct
from typing import Any, BinaryIO

_HEADER = struct.Struct("!Q")


def encode(message: Any) -> bytes:
    """The bytes of one message: eight bytes of length, then its pickle; ValueError for what cannot be pickled."""
    try:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"rewards: a prompt, completion or column cannot be sent to a worker: {error}") from error
    return _HEADER.pack(len(body)) + body


def receive(stream: BinaryIO) -> Any:
    """Block until one message has come from `stream`; EOFError once the other side is gone."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    (size,) = _HEADER.unpack(header)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return pickle.loads(body)


class Inbox:
    """Collects bytes as they come and gives back whole messages, for the side that must not block."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> tuple[Any] | None:
        """The oldest whole message in a tuple of one, or None where it is still incomplete."""
        if len(self._bytes) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + size
        if len(self._bytes) < end:
            return None
        message = pickle.loads(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return (message,)
