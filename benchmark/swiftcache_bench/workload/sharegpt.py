"""ShareGPT-style JSON: a list of conversations, a person's messages and a model's in turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from swiftcache_bench.tokens import TextEncoder
from swiftcache_bench.workload.base import Turn, Workload
from swiftcache_bench.workload.limits import Limits
from swiftcache_bench.workload.rows import read_document

ASKING = frozenset({"human", "user"})
ANSWERING = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


class Message(msgspec.Struct):
    """One message: who it is from and what it says."""

    sender: str = msgspec.field(name="from")
    value: str


class SharedConversation(msgspec.Struct):
    conversations: list[Message]


def load_sharegpt(path: Path, encoder: TextEncoder, limits: Limits) -> Workload:
    """A turn for each message of a person that a model's message follows.

    Other messages (a system prompt, a model's opening) are passed over.
    """
    rows = read_document(path, list[SharedConversation])
    conversations = (
        turns for row in rows if (turns := list(_turns(row.conversations, encoder, limits)))
    )
    return limits.collect(f"ShareGPT {path.stem}", conversations, {"tokenizer": encoder.name})


def _turns(messages: list[Message], encoder: TextEncoder, limits: Limits) -> Iterator[Turn]:
    for asked, answered in pairwise(messages):
        if asked.sender in ASKING and answered.sender in ANSWERING and asked.value:
            yield Turn(
                encoder.encode(asked.value), limits.answer_tokens(answered.value, encoder.encode)
            )
