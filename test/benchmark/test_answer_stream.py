"""A streamed answer: times at the events that brought tokens, and nothing wrong taken for right."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_bench.answer_stream import AnswerAborted, AnswerBroken, AnswerStream

PROMPT_TOKENS = 11


def line(ids: list[int], total: int, **meta: Any) -> bytes:
    meta = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": total, "cached_tokens": 0} | meta
    return b"data: " + orjson.dumps({"output_ids": ids, "meta_info": meta}) + b"\n"


def last(ids: list[int], total: int, **meta: Any) -> bytes:
    return line(ids, total, finish_reason={"type": "length"}, **meta)


@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    incremental=st.booleans(),
    repeats=st.booleans(),
)
def test_ids_and_gaps_are_right_however_tokens_are_grouped(
    cuts: list[int], incremental: bool, repeats: bool
) -> None:
    stream = AnswerStream()
    ids: list[int] = []
    for number, new in enumerate(cuts):
        fresh = list(range(len(ids), len(ids) + new))
        ids += fresh
        send = last if number == len(cuts) - 1 else line
        event = send(fresh if incremental else list(ids), len(ids))
        stream.feed(event, float(number + 1))
        stream.feed(b"\n", 99.0)
        if repeats and not incremental:
            stream.feed(event, number + 1.5)
    stream.feed(b"data: [DONE]\n", 99.0)
    assert stream.finish(PROMPT_TOKENS, len(ids)).tolist() == ids
    assert stream.first_token_s == 1.0
    assert stream.last_token_s == len(cuts)
    assert stream.itl_s == [1 / new for new in cuts[1:] for _ in range(new)]


def test_an_event_without_tokens_is_not_the_first_token() -> None:
    stream = AnswerStream()
    stream.feed(line([], 0), 1.0)
    stream.feed(last([5], 1), 2.5)
    assert stream.first_token_s == 2.5


def test_cached_tokens_are_divided_by_where_they_were() -> None:
    stream = AnswerStream()
    details = {"device": 4, "host": 3}
    stream.feed(last([5], 1, cached_tokens=7, cached_tokens_details=details), 1.0)
    assert (stream.cached_tokens, stream.device_tokens, stream.host_tokens) == (7, 4, 3)


@pytest.mark.parametrize("details", [{}, {"cached_tokens_details": None}])
def test_without_details_cached_tokens_are_the_devices(details: dict[str, None]) -> None:
    stream = AnswerStream()
    stream.feed(last([5], 1, cached_tokens=7, **details), 1.0)
    assert (stream.cached_tokens, stream.device_tokens, stream.host_tokens) == (7, 7, 0)


def test_an_answer_that_stops_early_is_broken() -> None:
    stream = AnswerStream()
    stream.feed(line([1, 2], 2), 1.0)
    with pytest.raises(AnswerBroken, match="2 of 4"):
        stream.finish(PROMPT_TOKENS, 4)


def test_an_empty_body_is_broken() -> None:
    with pytest.raises(AnswerBroken, match="0 of 4"):
        AnswerStream().finish(PROMPT_TOKENS, 4)


def test_an_answer_of_another_length_is_broken() -> None:
    stream = AnswerStream()
    stream.feed(last([1, 2], 2), 1.0)
    with pytest.raises(AnswerBroken, match="2 of 4"):
        stream.finish(PROMPT_TOKENS, 4)


def test_a_prompt_that_was_read_in_part_is_broken() -> None:
    stream = AnswerStream()
    stream.feed(last([1], 1, prompt_tokens=PROMPT_TOKENS - 1), 1.0)
    with pytest.raises(AnswerBroken, match="10 tokens of a prompt of 11"):
        stream.finish(PROMPT_TOKENS, 1)


def test_an_abort_is_told_from_a_failure() -> None:
    stream = AnswerStream()
    stream.feed(line([1], 1, finish_reason={"type": "abort", "message": "out of room"}), 1.0)
    with pytest.raises(AnswerAborted, match="out of room"):
        stream.finish(PROMPT_TOKENS, 1)


@pytest.mark.parametrize(
    "event",
    [
        b"data: {]\n",
        b"data: 3\n",
        b"data: {}\n",
        b'data: {"output_ids": [1], "meta_info": {}}\n',
        b'data: {"error": {"message": "no room"}}\n',
    ],
)
def test_events_that_are_no_answer_break_it_in_one_line(event: bytes) -> None:
    with pytest.raises(AnswerBroken) as caught:
        AnswerStream().feed(event, 1.0)
    assert "\n" not in str(caught.value)


def test_lost_tokens_are_noticed() -> None:
    stream = AnswerStream()
    stream.feed(line([1, 2], 2), 1.0)
    with pytest.raises(AnswerBroken, match="lost"):
        stream.feed(line([4], 4), 2.0)
