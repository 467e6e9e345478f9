"""``--swiftcache-layer-stream``: its value, and what may not stand beside it.

Every check raises ``SwiftCacheError`` with one line, before anything is allocated.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.swiftcache.conflicts import Conflict
from sglang.srt.swiftcache.flag_words import AUTO, OFF, word_of
from swiftcache_tier.errors import SwiftCacheError

DEFAULT_PAGE_TOKENS = 16

# Backends whose reads and writes all go through the pool's methods, one layer after the other.
ATTENTION_BACKENDS = {"cpu": ("torch_native",), "cuda": ("triton", "flashinfer", "fa3")}


# What `--swiftcache-donors` refuses is not repeated: more than one rank, speculative decoding,
# prefill-decode disaggregation, storage backends, page-major and packed pools, streaming sessions.
_CONFLICTS = (
    Conflict(
        "--page-size 1",
        lambda a: a.page_size == 1,
        "one token a block is too little to stream: use --page-size 16 or 64",
    ),
    Conflict(
        "--hicache-write-policy write_back",
        lambda a: a.hicache_write_policy == "write_back",
        "what is streamed has its copy on donors from the start: use write_through or "
        "write_through_selective",
    ),
    Conflict(
        "--enable-two-batch-overlap",
        lambda a: a.enable_two_batch_overlap,
        "two batches would want two layers at once: drop the flag",
    ),
    Conflict(
        "--enable-dp-attention",
        lambda a: a.enable_dp_attention,
        "the ranks do not agree on window pages: drop the flag",
    ),
    Conflict(
        "--enable-pdmux",
        lambda a: a.enable_pdmux,
        "two streams would want two layers at once: drop the flag",
    ),
    Conflict(
        "--enable-torch-compile",
        lambda a: a.enable_torch_compile,
        "compiled models do not call the pool layer by layer: drop the flag",
    ),
    Conflict(
        "--enable-memory-saver",
        lambda a: a.enable_memory_saver,
        "memory that is mapped several times cannot be released and resumed: drop the flag",
    ),
    Conflict(
        "--enable-lora",
        lambda a: bool(a.enable_lora or a.lora_paths),
        "its captured graphs are not covered: drop the flag",
    ),
    Conflict(
        "--prefill-only-disable-kv-cache",
        lambda a: a.prefill_only_disable_kv_cache,
        "there is no KV to stream: drop one of the two flags",
    ),
    Conflict(
        "--swiftcache-verify",
        lambda a: a.swiftcache_verify,
        "blocks that are written in every step have no checksum: drop one of the two flags",
    ),
    Conflict(
        "--swiftcache-replicas",
        lambda a: a.swiftcache_replicas != 1,
        "what is streamed has one copy: drop one of the two flags",
    ),
)


def normalize(args: Any) -> None:
    """Bring the field into one form: "off", "auto" or the digits of a number over 0."""
    value = args.swiftcache_layer_stream
    text = word_of(value)
    if text not in (OFF, AUTO) and not (text.isdecimal() and int(text) > 0):
        raise SwiftCacheError(
            f"--swiftcache-layer-stream {value}: expected off, auto or a number of tokens over 0"
        )
    args.swiftcache_layer_stream = text
    if text != OFF and args.swiftcache_donors is None:
        raise SwiftCacheError(
            "--swiftcache-layer-stream has no effect without --swiftcache-donors: add the one or "
            "drop the other"
        )


def check_before(args: Any) -> None:
    """Check the flags before SGLang resolves its own; fills in the page size.

    Raises:
        SwiftCacheError: a flag that cannot stand beside a layer window.
    """
    if args.swiftcache_layer_stream == OFF:
        return
    from sglang.srt.environ import envs

    for conflict in _CONFLICTS:
        if conflict.present(args):
            raise _refusal(conflict.flag, conflict.advice)
    if envs.SGLANG_USE_HND_KVCACHE.get():
        raise _refusal("SGLANG_USE_HND_KVCACHE=1", "slots must be rows of the pool: unset it")
    if args.page_size is None:
        args.page_size = DEFAULT_PAGE_TOKENS


def check_after(args: Any) -> None:
    """Check the attention backend, once SGLang has chosen one.

    Raises:
        SwiftCacheError: a backend that is not covered.
    """
    if args.swiftcache_layer_stream == OFF:
        return
    covered = ATTENTION_BACKENDS[args.device]
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        backend = getattr(args, field)
        if backend is not None and backend not in covered:
            flag = "--" + field.replace("_", "-")
            raise _refusal(f"{flag} {backend}", f"use {' or '.join(covered)}")


def _refusal(flag: str, advice: str) -> SwiftCacheError:
    return SwiftCacheError(f"--swiftcache-layer-stream cannot be used with {flag}: {advice}")
