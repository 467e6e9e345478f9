"""Bytes and descriptors that a hostile or broken peer might send."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from swiftcache_tier.control.messages import encode

_NUMBERS = (-1, 0, 1, 7, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, 1.5, float("nan"))
_TEXTS = ("", "x", "../../etc/passwd", "a\nb", "\x00", "é" * 99, "x" * 5000, "__import__('os')")
_PICKLE = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix"


class Inputs:
    """Makes inputs from messages that are right; remembers what it made, to send it again."""

    def __init__(self, messages: Sequence[Any], bytes_max: int, seed: str) -> None:
        """`bytes_max` is the longest message that a victim reads."""
        self.rng = random.Random(seed)
        self._bodies = [msgspec.msgpack.decode(encode(message)) for message in messages]
        self._bytes_max = bytes_max
        self._sent: list[bytes] = []

    def add(self, message: Any) -> None:
        """Another message that is right."""
        self._bodies.append(msgspec.msgpack.decode(encode(message)))
        del self._bodies[:-64]

    def make(self) -> bytes:
        """One input, never empty."""
        ways = (
            (self._random, 10),
            (self._right, 10),
            (self._with_other_values, 40),
            (self._flipped, 20),
            (self._cut, 8),
            (self._joined, 5),
            (self._nested, 2),
            (self._long, 1),
            (self._far_too_long, 0.02),
            (self._again, 10),
        )
        way = self.rng.choices([way for way, _ in ways], [weight for _, weight in ways])[0]
        data = way() or b"\x00"
        self._sent.append(data[: self._bytes_max])
        del self._sent[:-100]
        return data

    def _body(self) -> dict[str, Any]:
        return dict(self.rng.choice(self._bodies))

    def _right(self) -> bytes:
        return msgspec.msgpack.encode(self._body())

    def _random(self) -> bytes:
        return self.rng.choice((_PICKLE, self.rng.randbytes(self.rng.randint(1, 300))))

    def _with_other_values(self) -> bytes:
        body, other = self._body(), self._body()
        for _ in range(self.rng.randint(1, 3)):
            name = self.rng.choice([*body, *other, "more"])
            match self.rng.randrange(5):
                case 0:
                    body.pop(name, None)
                case 1:
                    body[name] = self._value()
                case 2:
                    body[name] = other.get(name, None)
                case 3:
                    body[name] = [self._value() for _ in range(self.rng.choice((0, 1, 253, 400)))]
                case 4:
                    body["type"] = other["type"]
        return msgspec.msgpack.encode(body)

    def _value(self) -> Any:
        return self.rng.choice(
            (
                self.rng.choice(_NUMBERS),
                self.rng.choice(_TEXTS),
                self.rng.randint(0, 8),
                self.rng.randbytes(9),
                None,
                {"type": "Ping"},
            )
        )

    def _flipped(self) -> bytes:
        data = bytearray(self._right())
        for _ in range(self.rng.randint(1, 4)):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return bytes(data)

    def _cut(self) -> bytes:
        data = self._right()
        return data[: self.rng.randrange(len(data))]

    def _joined(self) -> bytes:
        return self._right() + self._right()

    def _nested(self) -> bytes:
        return self.rng.choice((b"\x91", b"\x81\xa1a")) * self.rng.choice((50, 5000))

    def _long(self) -> bytes:
        over = self.rng.choice((1, 2, 1000, self._bytes_max // 2))
        return self._right().ljust(self._bytes_max + over, b"\xff")

    def _far_too_long(self) -> bytes:
        """What is not even received: the connection is closed."""
        return self._right().ljust(8 * self._bytes_max, b"\xff")

    def _again(self) -> bytes:
        return self.rng.choice(self._sent) if self._sent else self._right()


@contextmanager
def too_long_for_a_record() -> Iterator[None]:
    """Send a record inside: what the kernel itself refuses reaches nobody."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise


def make_descriptor(rng: random.Random, extent_bytes: int) -> int:
    """A descriptor that is no extent of `extent_bytes`, but for one kind, which is; the caller
    closes it."""
    kind = rng.randrange(7)
    if kind == 0:
        reading, writing = os.pipe()
        os.close(writing)
        return reading
    if kind == 1:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    if kind == 2:
        return os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, extent_bytes // 2 if kind == 3 else extent_bytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if kind == 4:
        seals |= fcntl.F_SEAL_WRITE
    if kind != 5:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
