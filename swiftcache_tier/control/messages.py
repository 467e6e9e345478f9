"""What donors and receivers say to each other, and how strictly it is read.

Two sockets belong to a donor. At its door, a Unix socket that keeps records apart, a peer says
`Hello` and gets a `Welcome`, after which `Offer`s with their descriptors arrive there; or it sends
a `StatusRequest`, a `LimitRequest` or a `DrainRequest` and gets a `StatusReply`. Everything else
goes through the control socket (ZeroMQ), where each message to the donor carries the session's
token. Either side may get an `Error` for an answer.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import FDS_PER_RECORD_MAX

PROTOCOL: Final = 4
"""Raised by one whenever either side could misread the other."""

NAME_PATTERN: Final = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Of a donor: it becomes part of a file's name."""

NAME_FORM: Final = "up to 64 letters, digits, '.', '_' and '-', the first a letter or a digit"
"""The same for people."""

EXTENTS_MAX: Final = 2**16
"""Of one donor: a receiver keeps books of each."""

_Name: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
_Text: TypeAlias = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f]{1,200}\Z")]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
_LinkText: TypeAlias = Annotated[str, Meta(pattern=r"\A[\x20-\x7e]{1,100}\Z")]
_Rate: TypeAlias = Annotated[float, Meta(gt=0, le=1e6)]
_Slots: TypeAlias = Annotated[list[_Count], Meta(min_length=1, max_length=FDS_PER_RECORD_MAX)]


class Message(Struct, tag=True, tag_field="type", forbid_unknown_fields=True, frozen=True):
    """The base of every message; on the wire a msgpack map with the class's name as `type`."""


class Hello(Message, frozen=True):
    """A receiver asks for a session."""

    protocol: _Count
    receiver: _Text


class StatusRequest(Message, frozen=True):
    """Anyone who is let in asks how the donor stands."""

    protocol: _Count


class LimitRequest(Message, frozen=True):
    """The donor's user lets it lend no more than this, or lifts a limit."""

    protocol: _Count
    bytes: _Bytes | None
    """None lifts the limit."""
    receiver: _Text | None = None
    """Limit what a receiver of this name holds."""
    each: bool = False
    """Limit what each receiver holds that has no limit of its own. Otherwise all together."""


class DrainRequest(Message, frozen=True):
    """The donor's user wants everything asked back, and nothing lent until a limit is set."""

    protocol: _Count


class Welcome(Message, frozen=True):
    """The session is open; its token is known to this peer alone."""

    protocol: _Count
    name: _Name
    device: _Text
    device_uuid: _Text | None
    """Of the donor's GPU; None for host memory. What "cuda:1" is may differ between processes."""
    extent_bytes: Annotated[int, Meta(gt=0, le=2**40)]
    extents: Annotated[int, Meta(gt=0, le=EXTENTS_MAX)]
    token: Annotated[str, Meta(min_length=16, max_length=64)]
    lost_after_s: Annotated[float, Meta(gt=0)]
    """Silence after which the donor counts this peer as lost."""
    owner_pid: _Count | None
    elastic: bool = False
    """It is a serving engine: what it lends comes and goes with its load, and may be nothing."""


class Offer(Message, frozen=True):
    """Extents to be mapped; one descriptor for each slot, in their order, comes with it."""

    grant: _Number
    slots: _Slots


class ReceiverStatus(Struct, forbid_unknown_fields=True, frozen=True):
    """One session, as the donor sees it."""

    name: _Text
    pid: _Count
    uid: _Count
    extents: dict[str, _Count]
    """By lease state."""
    bytes: _Bytes
    heartbeat_age_s: _Seconds
    link: _LinkText | None
    """As in its last `Ping`."""
    gb_per_s: _Rate | None


class StatusReply(Message, frozen=True):
    """How a donor stands."""

    protocol: _Count
    name: _Name
    device: _Text
    device_uuid: _Text | None
    device_model: _Text | None
    """What the GPU calls itself, for people to read."""
    pid: _Count
    owner_pid: _Count | None
    state: _Text
    """"serving", "draining" (it ends), "drained" (until a limit is set or lifted) or "failed"."""
    extent_bytes: _Bytes
    extents: dict[str, _Count]
    """By lease state."""
    bytes_untaken: _Bytes
    """Promised and not yet taken from the system: host memory takes RAM as it is written."""
    receivers: list[ReceiverStatus]
    kept: _Count = 0
    """Free extents that the engine uses for its own KV."""
    elastic: bool = False
    limit_bytes: _Bytes | None = None
    each_limit_bytes: _Bytes | None = None
    receiver_limit_bytes: dict[str, _Bytes] = {}


class Ping(Message, frozen=True):
    """A receiver's sign of life, and how many extents it would like to hold in all."""

    token: str
    wanted: _Count
    link: _LinkText | None = None
    """How it reaches the memory, for people to read."""
    gb_per_s: _Rate | None = None
    """How fast it reads the memory; None where that was not measured."""


class Accept(Message, frozen=True):
    """The offered extents are mapped."""

    token: str
    grant: _Number
    slots: _Slots


class Decline(Message, frozen=True):
    """The offered extents are not mapped, and will not be under this grant."""

    token: str
    grant: _Number
    slots: _Slots


class Released(Message, frozen=True):
    """The extents are not mapped any more, and will not be under this grant."""

    token: str
    grant: _Number
    slots: _Slots


class Bye(Message, frozen=True):
    """The receiver has unmapped everything and ends the session."""

    token: str


class Pong(Message, frozen=True):
    """The donor's answer to `Ping`."""

    target: _Count
    """Extents it means this receiver to hold, as things stand."""


class Reclaim(Message, frozen=True):
    """The donor asks extents back; repeated until each is released."""

    grant: _Number
    slots: _Slots
    deadline_s: _Seconds
    reason: _Text


class Farewell(Message, frozen=True):
    """The donor's answer to `Bye`."""


class Error(Message, frozen=True):
    """Why a message was not acted on."""

    code: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=2000)]


class ErrorCode:
    """Values of `Error.code` that receivers tell apart."""

    MALFORMED: Final = "malformed"
    TOO_LARGE: Final = "too_large"
    PROTOCOL: Final = "protocol"
    NOT_ALLOWED: Final = "not_allowed"
    OWNED: Final = "owned"
    FULL: Final = "full"
    DRAINING: Final = "draining"
    NO_SESSION: Final = "no_session"
    NOT_YOURS: Final = "not_yours"


class MessageError(SwiftCacheError):
    """A message that is not acted on; `code` is what the sender is told."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Preamble(Struct):
    protocol: int


AtDoor: TypeAlias = Hello | StatusRequest | LimitRequest | DrainRequest
FromDoor: TypeAlias = Welcome | StatusReply | Offer | Error
ToDonor: TypeAlias = Ping | Accept | Decline | Released | Bye
ToReceiver: TypeAlias = Pong | Reclaim | Farewell | Error

AT_DOOR: Final = msgspec.msgpack.Decoder(AtDoor)
FROM_DOOR: Final = msgspec.msgpack.Decoder(FromDoor)
TO_DONOR: Final = msgspec.msgpack.Decoder(ToDonor)
TO_RECEIVER: Final = msgspec.msgpack.Decoder(ToReceiver)
_PREAMBLE: Final = msgspec.msgpack.Decoder(_Preamble)

_T = TypeVar("_T")

encode: Final = msgspec.msgpack.encode


def decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes, bytes_max: int) -> _T:
    """The message in `data`. Raises MessageError when it is too long or not one of `decoder`'s."""
    if len(data) > bytes_max:
        raise MessageError(
            ErrorCode.TOO_LARGE,
            f"message of {len(data)} bytes: expected at most {bytes_max}; nothing of it was read",
        )
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MessageError(
            ErrorCode.MALFORMED,
            f"message of {len(data)} bytes is malformed: {_shorten(str(error))}; expected "
            f"protocol {PROTOCOL} of swiftcache",
        ) from None


def check_protocol(data: bytes, who: str) -> None:
    """Raise MessageError if `data`, from `who`, states another protocol version than ours.

    Reads nothing but the version, so it works on messages of versions that do not exist yet.
    """
    try:
        theirs = _PREAMBLE.decode(data).protocol
    except (msgspec.MsgspecError, RecursionError):
        return  # not a message that states a version: `decode` says what is wrong with it
    if theirs != PROTOCOL:
        raise MessageError(
            ErrorCode.PROTOCOL,
            f"{who} speaks protocol version {theirs} and this process version {PROTOCOL}: "
            f"install the same sglang-swiftcache for both and restart the older",
        )


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."
