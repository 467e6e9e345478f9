"""From a conversation to the token ids of the next prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
from tokenizers import Tokenizer


class PromptEncoder:
    """A model's chat template and tokenizer, read from its folder without loading transformers."""

    def __init__(self, model: Path) -> None:
        self._template = jinja2.Template((model / "chat_template.jinja").read_text())
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(self, history: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of ``history`` ({"role", "content"} each) and the start of an answer to it."""
        text = self._template.render(messages=history, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
