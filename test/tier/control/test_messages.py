"""How strictly messages are read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.control.messages import (
    AT_DOOR,
    FROM_DOOR,
    PROTOCOL,
    TO_DONOR,
    TO_RECEIVER,
    Accept,
    ErrorCode,
    Hello,
    MessageError,
    Offer,
    Ping,
    Reclaim,
    check_protocol,
    decode,
    encode,
)

BYTES_MAX = 4096
DECODERS = {"door": AT_DOOR, "donor": TO_DONOR, "receiver": TO_RECEIVER, "reply": FROM_DOOR}
PING = {"type": "Ping", "token": "t" * 32, "wanted": 3}

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def read_or_refuse(decoder: Any, data: bytes) -> bool:
    """Whether `data` is a message, or is refused in the one way that callers expect."""
    try:
        decode(decoder, data, BYTES_MAX)
    except MessageError as error:
        return error.code == ErrorCode.MALFORMED and "\n" not in str(error)
    return True


@pytest.mark.parametrize("message", [Ping(token="t" * 32, wanted=3), Accept("t", 1, [0, 5])])
def test_what_is_encoded_is_read_back(message: Any) -> None:
    assert decode(TO_DONOR, encode(message), BYTES_MAX) == message


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(decoder: Any, data: bytes) -> None:
    assert read_or_refuse(decoder, data)


@given(kind=st.sampled_from(["Ping", "Accept", "Released", "Bye"]), fields=json_like)
def test_any_fields_are_read_or_refused(kind: str, fields: Any) -> None:
    body = {"type": kind} | (fields if isinstance(fields, dict) else {"token": fields})
    assert read_or_refuse(TO_DONOR, msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "body",
    [
        PING | {"more": 1},
        {k: v for k, v in PING.items() if k != "wanted"},
        PING | {"wanted": -1},
        PING | {"wanted": "3"},
        PING | {"wanted": 2**31},
        PING | {"type": "Pong"},
        PING | {"type": "Hello"},
        {"type": "Accept", "token": "t", "grant": 1, "slots": []},
        {"type": "Accept", "token": "t", "grant": 1, "slots": [0] * 254},
        {"type": "Accept", "token": "t", "grant": 1, "slots": [-1]},
        {"type": "Accept", "token": "t", "grant": 1, "slots": [1.5]},
        [1, 2],
        None,
    ],
)
def test_what_is_not_exactly_a_message_is_refused(body: Any) -> None:
    with pytest.raises(MessageError, match="malformed"):
        decode(TO_DONOR, msgspec.msgpack.encode(body), BYTES_MAX)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(MessageError, match="malformed"):
        decode(TO_DONOR, b"\x91" * 100_000 + b"\x00", 200_000)


def test_nothing_of_a_long_message_is_read() -> None:
    with pytest.raises(MessageError, match="expected at most 4096") as caught:
        decode(TO_DONOR, encode(Ping(token="t" * BYTES_MAX, wanted=1)), BYTES_MAX)
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_the_longest_legal_messages_fit_the_smallest_limit() -> None:
    slots = [2**31 - 1] * 253
    assert len(encode(Offer(2**62, slots))) < BYTES_MAX
    assert len(encode(Reclaim(2**62, slots, 1e9, "r" * 200))) < BYTES_MAX


@pytest.mark.parametrize("extra", [{}, {"colour": "blue"}, {"receiver": 5}])
def test_another_version_is_told_from_whatever_its_message_looks_like(extra: Any) -> None:
    data = msgspec.msgpack.encode({"type": "Salute", "protocol": PROTOCOL + 1} | extra)
    with pytest.raises(MessageError) as caught:
        check_protocol(data, "process 7")
    assert caught.value.code == ErrorCode.PROTOCOL
    line = str(caught.value)
    assert "process 7" in line
    assert f"version {PROTOCOL + 1}" in line
    assert f"version {PROTOCOL}" in line
    assert "restart" in line


@pytest.mark.parametrize("data", [encode(Hello(PROTOCOL, "me")), b"", b"\xff", b"\x01"])
def test_our_version_and_no_version_pass(data: bytes) -> None:
    check_protocol(data, "process 7")


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[31m", "x" * 201])
def test_a_name_cannot_carry_control_characters(name: str) -> None:
    body = {"type": "Hello", "protocol": PROTOCOL, "receiver": name}
    with pytest.raises(MessageError):
        decode(AT_DOOR, msgspec.msgpack.encode(body), BYTES_MAX)
