"""Token ids: which of a vocabulary's may be sent, and how text becomes ids."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftcache_bench.errors import BenchmarkError

TokenIds = NDArray[np.uint32]
"""Token ids, shape (tokens,)."""

FALLBACK_CHARS_PER_TOKEN = 4


class IdRange(NamedTuple):
    """The ids ``first`` … ``first + size - 1``."""

    first: int
    size: int

    def random(self, rng: np.random.Generator, tokens: int) -> TokenIds:
        return rng.integers(self.first, self.first + self.size, tokens, dtype=np.uint32)


class TextEncoder(NamedTuple):
    """How text becomes ids, and what to call that in a report. The ids hold no special tokens."""

    name: str
    encode: Callable[[str], TokenIds]


def usable_ids(vocab_size: int) -> IdRange:
    """The middle of a vocabulary: special tokens, and rows no token uses, lie at its two ends."""
    margin = vocab_size // 10
    return IdRange(margin, max(1, vocab_size - 2 * margin))


def read_vocab_size(model_path: str) -> int:
    """Vocabulary of a model folder (its config.json) or of a hub name (through transformers).

    Raises BenchmarkError when there is no configuration, or it names no vocabulary.
    """
    config_file = Path(model_path) / "config.json"
    if Path(model_path).is_dir():
        try:
            config: dict[str, Any] = json.loads(config_file.read_bytes())
        except (OSError, ValueError) as error:
            raise BenchmarkError(
                f"cannot read {config_file} ({error}): give --model-path a model folder"
            ) from None
    else:
        config = _hub_config(model_path)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise BenchmarkError(
            f"the configuration of {model_path} names no vocab_size: give --model-path a folder "
            "whose config.json does"
        )
    return size


def text_encoder(model_path: str, ids: IdRange) -> TextEncoder:
    """The model's own tokenizer; for a folder without one, a stand-in of about the same length.

    The stand-in hashes every 4 characters to one of ``ids``: equal texts give equal ids, and texts
    that share a prefix share ids up to the last whole 4 characters of it. Raises BenchmarkError
    when there is a tokenizer that cannot be loaded.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return TextEncoder(f"tokenizer of {model_path}", _transformers_encode(model_path))
    if (folder / "tokenizer.json").exists():
        return TextEncoder(f"tokenizer of {folder}", _fast_encode(folder / "tokenizer.json"))
    if (folder / "tokenizer.model").exists() or (folder / "tokenizer_config.json").exists():
        return TextEncoder(f"tokenizer of {folder}", _transformers_encode(model_path))
    return TextEncoder(
        f"none in {folder}: {FALLBACK_CHARS_PER_TOKEN} characters a token",
        lambda text: _fallback_encode(text, ids),
    )


def _fast_encode(tokenizer_file: Path) -> Callable[[str], TokenIds]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return lambda text: np.array(
        tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32
    )


def _transformers_encode(model_path: str) -> Callable[[str], TokenIds]:
    # Imported here: it takes seconds, and generated workloads need no tokenizer.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise BenchmarkError(
            f"no tokenizer for {model_path} ({_first_line(error)}): give --model-path a folder "
            "that has one"
        ) from None
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.uint32)


def _fallback_encode(text: str, ids: IdRange) -> TokenIds:
    starts = range(0, len(text), FALLBACK_CHARS_PER_TOKEN)
    hashes = [zlib.crc32(text[i : i + FALLBACK_CHARS_PER_TOKEN].encode()) for i in starts]
    return (np.array(hashes, dtype=np.uint32) % np.uint32(ids.size)) + np.uint32(ids.first)


def _hub_config(model_path: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(model_path).to_dict()
    except (OSError, ValueError) as error:
        raise BenchmarkError(
            f"no configuration for {model_path} ({_first_line(error)}): give --model-path a model "
            "folder or a hub name that is cached"
        ) from None
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
