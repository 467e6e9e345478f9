"""Data sets: read as the conversations they hold, cut to what fits, refused when broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import IdRange, TextEncoder, read_vocab_size, text_encoder, usable_ids
from swiftcache_bench.workload.base import Workload, longest_prompt
from swiftcache_bench.workload.contexts import load_contexts
from swiftcache_bench.workload.datasets import DatasetKind, dataset_kind
from swiftcache_bench.workload.leval import load_leval
from swiftcache_bench.workload.limits import Limits
from swiftcache_bench.workload.mooncake import TRACE_BLOCK_TOKENS, load_mooncake
from swiftcache_bench.workload.sharegpt import load_sharegpt

IDS = IdRange(100, 800)
ALL = Limits(conversations=1000)

# One id per character, so that lengths in tokens are lengths of text.
LETTERS = TextEncoder(
    "letters", lambda text: np.array([ord(c) % 1000 for c in text], dtype=np.uint32)
)

LEVAL_ROWS = [
    {
        "input": "d" * 300,
        "instructions": ["What?", "Why?", "When?"],
        "outputs": ["yes", "because", "now, or soon"],
        "source": "made up",
        "evaluation": "exam",
    },
    {"input": "e" * 200, "instructions": ["Who?"], "outputs": ["me"], "source": "made up"},
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(content: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        rows = content if name.endswith(".jsonl") else [content]
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return path

    return write_file


def text_of(workload: Workload, conversation: int, turn: int) -> str:
    ids = workload.conversations[conversation].turns[turn].input_ids
    return "".join(chr(i) for i in ids)


# -- L-Eval -----------------------------------------------------------------------------------


def test_an_leval_row_is_a_conversation_that_begins_with_its_document(
    write: Callable[..., Path],
) -> None:
    workload = load_leval(write(LEVAL_ROWS), LETTERS, ALL)
    assert [len(c.turns) for c in workload.conversations] == [3, 1]
    first = text_of(workload, 0, 0)
    assert first.startswith("d" * 300)
    assert "What?" in first
    for number, question in ((1, "Why?"), (2, "When?")):
        assert question in text_of(workload, 0, number)
        assert "ddd" not in text_of(workload, 0, number)
    answers = [turn.output_tokens for turn in workload.conversations[0].turns]
    assert answers == [len("yes"), len("because"), len("now, or soon")]


def test_limits_hold_for_leval(write: Callable[..., Path]) -> None:
    limits = Limits(conversations=1, rounds=2, max_input_tokens=150, output_tokens=5)
    workload = load_leval(write(LEVAL_ROWS), LETTERS, limits)
    (conversation,) = workload.conversations
    assert longest_prompt(conversation.turns) == 150
    assert [turn.output_tokens for turn in conversation.turns] == [5, 5]
    assert "What?" in text_of(workload, 0, 0)
    assert workload.notes["conversations_shortened"] == 1


def test_turns_that_no_cut_of_the_document_makes_fit_are_dropped(
    write: Callable[..., Path],
) -> None:
    later = len("\n\nQuestion: Why?\nAnswer:")
    workload = load_leval(write(LEVAL_ROWS), LETTERS, Limits(9, max_input_tokens=later + 10))
    assert [len(c.turns) for c in workload.conversations] == [2, 1]
    workload = load_leval(write(LEVAL_ROWS), LETTERS, Limits(9, max_input_tokens=later))
    assert [len(c.turns) for c in workload.conversations] == [1, 1]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input": "d", "instructions": ["a", "b"], "outputs": ["c"]}, "2 instructions"),
        ({"input": "d", "instructions": [], "outputs": []}, "at least one"),
        ({"input": "d", "instructions": "a", "outputs": ["c"]}, "instructions"),
        ({"instructions": ["a"], "outputs": ["c"]}, "input"),
    ],
)
def test_a_broken_leval_row_is_named_by_its_line(
    write: Callable[..., Path], row: dict[str, Any], says: str
) -> None:
    path = write([LEVAL_ROWS[0], row])
    with pytest.raises(BenchmarkError, match=f"line 2.*{says}"):
        load_leval(path, LETTERS, ALL)


# -- Mooncake ---------------------------------------------------------------------------------


def trace_row(hashes: list[int], tail: int = TRACE_BLOCK_TOKENS, at: int = 0) -> dict[str, Any]:
    """A request whose last block holds ``tail`` tokens."""
    length = (len(hashes) - 1) * TRACE_BLOCK_TOKENS + tail
    return {"timestamp": at, "input_length": length, "output_length": 9, "hash_ids": hashes}


@st.composite
def traces(draw: st.DrawFn) -> list[list[int]]:
    """Hash lists as a trace has them: a hash always has the same hashes before it."""
    paths: list[list[int]] = [[]]
    fresh = 0
    for _ in range(draw(st.integers(1, 8))):
        path = list(draw(st.sampled_from(paths)))
        path = path[: draw(st.integers(0, len(path)))]
        for _ in range(draw(st.integers(1, 3))):
            path.append(fresh)
            fresh += draw(st.sampled_from([1, 7, 100_003]))
        paths.append(path)
    return paths[1:]


@given(trace=traces(), block_tokens=st.sampled_from([2, 3, 16, 512]), seed=st.integers(0, 99))
def test_prefixes_are_equal_exactly_where_hashes_are(
    tmp_path_factory: pytest.TempPathFactory, trace: list[list[int]], block_tokens: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(json.dumps(trace_row(hashes)) for hashes in trace))
    workload = load_mooncake(path, IDS, ALL, seed, block_tokens=block_tokens)
    prompts = [c.turns[0].input_ids for c in workload.conversations]
    assert [len(p) for p in prompts] == [len(hashes) * block_tokens for hashes in trace]
    for one, its_hashes in zip(prompts, trace, strict=True):
        for other, other_hashes in zip(prompts, trace, strict=True):
            equal_hashes = common(its_hashes, other_hashes)
            equal_blocks = common(one.tolist(), other.tolist()) // block_tokens
            assert equal_blocks == equal_hashes


@given(trace=traces())
def test_what_was_sent_before_is_counted(
    tmp_path_factory: pytest.TempPathFactory, trace: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(json.dumps(trace_row(hashes)) for hashes in trace))
    workload = load_mooncake(path, IDS, ALL, 1, block_tokens=4)
    for number, conversation in enumerate(workload.conversations):
        before = max((common(trace[number], earlier) for earlier in trace[:number]), default=0)
        assert conversation.turns[0].shared_tokens == 4 * before


def test_lengths_times_and_answers_are_the_traces(write: Callable[..., Path]) -> None:
    path = write([trace_row([0, 1], tail=100, at=0), trace_row([0, 2, 3], tail=1, at=2500)])
    workload = load_mooncake(path, IDS, ALL, 1, time_scale=0.5)
    turns = [c.turns[0] for c in workload.conversations]
    assert [len(turn.input_ids) for turn in turns] == [612, 1025]
    assert [turn.arrival_s for turn in turns] == [0.0, 1.25]
    assert [turn.output_tokens for turn in turns] == [9, 9]
    assert workload.has_arrivals


def test_a_trace_is_cut_at_the_end_and_that_is_noted(write: Callable[..., Path]) -> None:
    path = write([trace_row([0, 1]), trace_row([0, 2]), trace_row([5], tail=7)])
    limits = Limits(2, max_input_tokens=700, output_tokens=3)
    workload = load_mooncake(path, IDS, limits, 1)
    one, two = (c.turns[0] for c in workload.conversations)
    assert len(one.input_ids) == len(two.input_ids) == 700
    assert common(one.input_ids.tolist(), two.input_ids.tolist()) // 512 == 1
    assert two.shared_tokens == 512
    assert workload.notes["requests_shortened"] == 2
    assert one.output_tokens == 3


def test_a_trace_whose_hashes_do_not_match_its_lengths_is_refused(
    write: Callable[..., Path],
) -> None:
    row = trace_row([0, 1]) | {"input_length": 2000}
    with pytest.raises(BenchmarkError, match=r"line 1.*2000"):
        load_mooncake(write([row]), IDS, ALL, 1)


@pytest.mark.parametrize("wrong", [{"block_tokens": 0}, {"block_tokens": 513}, {"time_scale": -1}])
def test_a_trace_cannot_be_scaled_out_of_range(
    write: Callable[..., Path], wrong: dict[str, int]
) -> None:
    with pytest.raises(BenchmarkError):
        load_mooncake(write([trace_row([0])]), IDS, ALL, 1, **wrong)


# -- ShareGPT and contexts --------------------------------------------------------------------

SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "hello"},
            {"from": "gpt", "value": "hi there"},
            {"from": "human", "value": "and now?"},
            {"from": "gpt", "value": "bye"},
            {"from": "human", "value": "never answered"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "alone"}]},
]


def test_sharegpt_turns_are_questions_that_were_answered(write: Callable[..., Path]) -> None:
    workload = load_sharegpt(write(SHAREGPT, "share.json"), LETTERS, ALL)
    (conversation,) = workload.conversations
    assert [text_of(workload, 0, number) for number in range(2)] == ["hello", "and now?"]
    assert [turn.output_tokens for turn in conversation.turns] == [len("hi there"), len("bye")]


CONTEXTS = {
    "contexts": {"7": "c" * 100, "8": "k" * 60},
    "queries": [
        {"context": "7", "question": "one?", "reference_answer": "1"},
        {"context": "8", "question": "two?", "reference_answer": "22"},
        {"context": 7, "question": "three?", "reference_answer": "333"},
    ],
}


def test_queries_are_requests_that_share_their_context(write: Callable[..., Path]) -> None:
    workload = load_contexts(write(CONTEXTS, "contexts.json"), LETTERS, ALL)
    turns = [c.turns[0] for c in workload.conversations]
    assert [turn.shared_tokens for turn in turns] == [0, 0, 100]
    assert [turn.output_tokens for turn in turns] == [1, 2, 3]
    assert text_of(workload, 2, 0).startswith("c" * 100)
    assert "three?" in text_of(workload, 2, 0)


def test_cut_contexts_are_still_shared_and_keep_the_question(write: Callable[..., Path]) -> None:
    limits = Limits(3, max_input_tokens=60)
    workload = load_contexts(write(CONTEXTS, "contexts.json"), LETTERS, limits)
    assert all(len(c.turns[0].input_ids) <= 60 for c in workload.conversations)
    assert "three?" in text_of(workload, 2, 0)
    shared = workload.conversations[2].turns[0].shared_tokens
    assert text_of(workload, 2, 0)[:shared] == "c" * shared
    assert shared > 0


def test_leval_rows_are_contexts_too(write: Callable[..., Path]) -> None:
    workload = load_contexts(write(LEVAL_ROWS), LETTERS, ALL)
    assert [c.turns[0].shared_tokens for c in workload.conversations] == [0, 300, 300, 0]


def test_a_query_of_no_context_is_refused(write: Callable[..., Path]) -> None:
    queries = [{"context": "9", "question": "?", "reference_answer": "!"}]
    with pytest.raises(BenchmarkError, match=r"query 0.*'9'"):
        load_contexts(write(CONTEXTS | {"queries": queries}, "contexts.json"), LETTERS, ALL)


# -- which kind, and limits -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "name", "kind"),
    [
        (LEVAL_ROWS, "a.jsonl", DatasetKind.LEVAL),
        ([trace_row([0])], "b.jsonl", DatasetKind.MOONCAKE),
        (SHAREGPT, "c.json", DatasetKind.SHAREGPT),
        (CONTEXTS, "d.json", DatasetKind.CONTEXTS),
    ],
)
def test_a_data_set_is_known_by_what_it_holds(
    write: Callable[..., Path], content: Any, name: str, kind: DatasetKind
) -> None:
    assert dataset_kind(write(content, name)) is kind


def test_json_over_several_lines_is_known_too(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps(SHAREGPT, indent=2))
    assert dataset_kind(path) is DatasetKind.SHAREGPT


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", '{"prompt": "x"}', "[1, 2]"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match="no data set") as caught:
        dataset_kind(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"nowhere\.jsonl"):
        dataset_kind(tmp_path / "nowhere.jsonl")


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(BenchmarkError):
        Limits(conversations=0)
    with pytest.raises(BenchmarkError):
        Limits(conversations=1, max_input_tokens=0)


# -- tokens -----------------------------------------------------------------------------------


@given(text=st.text(max_size=200), more=st.text(max_size=50))
def test_text_without_a_tokenizer_keeps_its_prefixes(
    tmp_path_factory: pytest.TempPathFactory, text: str, more: str
) -> None:
    encode = text_encoder(str(tmp_path_factory.getbasetemp()), IDS).encode
    ids, longer = encode(text), encode(text + more)
    assert len(ids) == -(-len(text) // 4)
    whole = len(text) // 4
    assert ids[:whole].tolist() == longer[:whole].tolist()
    assert all(IDS.first <= i < IDS.first + IDS.size for i in ids)


def test_a_models_own_tokenizer_is_used(tiny_model: Path) -> None:
    ids = usable_ids(read_vocab_size(str(tiny_model)))
    encoder = text_encoder(str(tiny_model), ids)
    assert str(tiny_model) in encoder.name
    text = "licensed under the Apache License"
    assert 0 < len(encoder.encode(text)) < len(text)


def test_usable_ids_leave_the_ends_of_a_vocabulary_out() -> None:
    ids = usable_ids(1000)
    assert ids.first > 0
    assert ids.first + ids.size < 1000
    assert usable_ids(1).size == 1


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"config\.json"):
        read_vocab_size(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BenchmarkError, match="vocab_size"):
        read_vocab_size(str(tmp_path))


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
