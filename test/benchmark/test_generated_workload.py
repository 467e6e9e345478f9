"""Generated workloads: the same from the same seed, of the lengths asked for, sharing nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import IdRange
from swiftcache_bench.workload.base import (
    Conversation,
    Turn,
    Workload,
    longest_prompt,
    same_shape,
    trim,
)
from swiftcache_bench.workload.generated import (
    GeneratedShape,
    generate_contexts,
    generate_conversations,
)

IDS = IdRange(100, 800)

lengths = st.integers(1, 60)
shapes = st.builds(
    lambda rounds, more, **rest: GeneratedShape(
        min_rounds=rounds, max_rounds=rounds + more, **rest
    ),
    rounds=st.integers(1, 4),
    more=st.integers(0, 3),
    conversations=st.integers(1, 6),
    first_input_tokens=lengths,
    next_input_tokens=lengths,
    output_tokens=lengths,
    range_ratio=st.floats(0.05, 1),
)


def turns_of(workload: Workload) -> list[Turn]:
    return [turn for conversation in workload.conversations for turn in conversation.turns]


@given(shape=shapes, seed=st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_requests(shape: GeneratedShape, seed: int) -> None:
    first, second = (generate_conversations(shape, IDS, seed) for _ in range(2))
    assert first.digest() == second.digest()
    for one, other in zip(turns_of(first), turns_of(second), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.output_tokens == other.output_tokens


def test_another_seed_gives_other_requests() -> None:
    shape = GeneratedShape(conversations=2)
    digests = {generate_conversations(shape, IDS, seed).digest() for seed in range(5)}
    assert len(digests) == 5


@given(shape=shapes, seed=st.integers(0, 2**32))
def test_a_conversation_does_not_depend_on_how_many_there_are(
    shape: GeneratedShape, seed: int
) -> None:
    alone = generate_conversations(
        GeneratedShape(**{**vars(shape), "conversations": 1}), IDS, seed
    ).conversations[0]
    among = generate_conversations(shape, IDS, seed).conversations[0]
    assert [t.input_ids.tolist() for t in alone.turns] == [
        t.input_ids.tolist() for t in among.turns
    ]


@given(shape=shapes, seed=st.integers(0, 2**32))
def test_lengths_and_ids_stay_within_what_was_asked(shape: GeneratedShape, seed: int) -> None:
    workload = generate_conversations(shape, IDS, seed)
    assert len(workload.conversations) == shape.conversations
    for conversation in workload.conversations:
        assert shape.min_rounds <= len(conversation.turns) <= shape.max_rounds
        for number, turn in enumerate(conversation.turns):
            longest = shape.next_input_tokens if number else shape.first_input_tokens
            shortest = max(1, int(longest * shape.range_ratio))
            assert shortest <= len(turn.input_ids) <= longest
            assert 1 <= turn.output_tokens <= shape.output_tokens
            assert turn.input_ids.min() >= IDS.first
            assert turn.input_ids.max() < IDS.first + IDS.size


def test_without_variation_every_length_is_the_one_asked_for() -> None:
    shape = GeneratedShape(3, 4, 4, first_input_tokens=50, next_input_tokens=7, output_tokens=9)
    for conversation in generate_conversations(shape, IDS, 1).conversations:
        assert [len(turn.input_ids) for turn in conversation.turns] == [50, 7, 7, 7]
        assert [turn.output_tokens for turn in conversation.turns] == [9] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_rounds": 3, "max_rounds": 2},
        {"min_rounds": 0},
        {"conversations": 0},
        {"output_tokens": 0},
        {"range_ratio": 0.0},
        {"range_ratio": 1.5},
    ],
)
def test_shapes_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BenchmarkError):
        GeneratedShape(**wrong)  # type: ignore[arg-type]


def test_queries_of_a_context_share_it_and_others_do_not() -> None:
    shape = GeneratedShape(first_input_tokens=40, next_input_tokens=10, output_tokens=3)
    workload = generate_contexts(5, 4, shape, IDS, seed=3)
    seen: dict[bytes, int] = {}
    for turn in turns_of(workload):
        context = turn.input_ids[:40].tobytes()
        assert len(turn.input_ids) == 50
        assert turn.shared_tokens == (40 if context in seen else 0)
        seen[context] = seen.get(context, 0) + 1
    assert sorted(seen.values()) == [4] * 5
    assert len({turn.input_ids.tobytes() for turn in turns_of(workload)}) == 20


@given(shape=shapes, limit=st.integers(1, 300))
def test_a_trimmed_conversation_fits_and_keeps_the_end_of_its_first_turn(
    shape: GeneratedShape, limit: int
) -> None:
    (conversation, *_) = generate_conversations(shape, IDS, 1).conversations
    trimmed = trim(conversation.turns, limit)
    assert trimmed, "a first turn can always be cut to one token"
    assert longest_prompt(trimmed) <= limit
    if longest_prompt(conversation.turns) <= limit:
        assert trimmed == conversation.turns
    first, whole = trimmed[0].input_ids, conversation.turns[0].input_ids
    assert len(first) >= 1
    assert first.tolist() == whole[len(whole) - len(first) :].tolist()
    for kept, original in zip(trimmed[1:], conversation.turns[1:], strict=False):
        assert kept is original


def test_a_warm_up_has_the_same_lengths_and_shares_no_prefix() -> None:
    workload = generate_conversations(GeneratedShape(3, range_ratio=0.5), IDS, 1)
    warm_up = same_shape(workload, 2, IDS, seed=2)
    assert len(warm_up.conversations) == 2
    for real, other in zip(workload.conversations, warm_up.conversations, strict=False):
        for one, two in zip(real.turns, other.turns, strict=True):
            assert len(one.input_ids) == len(two.input_ids)
            assert one.output_tokens == two.output_tokens
            assert one.input_ids[:8].tolist() != two.input_ids[:8].tolist()


def test_the_digest_tells_where_conversations_and_turns_end() -> None:
    (turn,) = turns_of(generate_conversations(GeneratedShape(1, 1, 1), IDS, 1))
    halves = (Turn(turn.input_ids[:200], 64), Turn(turn.input_ids[200:], 64))
    digests = {
        Workload("", conversations).digest()
        for conversations in (
            (Conversation((turn,)),),
            (Conversation(halves),),
            (Conversation(halves[:1]), Conversation(halves[1:])),
        )
    }
    assert len(digests) == 3
