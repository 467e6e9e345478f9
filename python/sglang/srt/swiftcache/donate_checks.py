"""What ``--swiftcache-donate`` asks of a server's other flags, before anything is allocated.

Every check raises ``SwiftCacheError`` with one line: what was wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.swiftcache.conflicts import (
    DATA_PARALLEL,
    DCP,
    DISAGGREGATION,
    STREAMING_SESSION,
    Conflict,
)
from sglang.srt.swiftcache.flag_words import AUTO, OFF, word_of
from swiftcache_tier.blocks.kv_format import is_power_of_two
from swiftcache_tier.control.runtime_dir import DonorPaths, donor_paths, engine_donor_name
from swiftcache_tier.donor.water import WaterMarks
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.log_format import json_wanted

PAGE_TOKENS = 16
CPU_BACKEND = "torch_native"
GPU_BACKENDS = ("triton", "fa3")
"""They take the strides of a pool's views; FlashInfer and the others expect tokens side by side."""

_ONE_RANK = "ranks do not agree on what they lend yet"

_CONFLICTS = (
    Conflict(
        "--swiftcache-layer-stream",
        lambda a: a.swiftcache_layer_stream not in (None, OFF),
        "a layer window aliases memory layer by layer, and pages that can be lent hold all layers "
        "of a token: drop one of the two, or lend other memory (swiftcache donor)",
    ),
    Conflict("--tensor-parallel-size > 1", lambda a: a.tp_size > 1, f"{_ONE_RANK}: use --tp 1"),
    Conflict("--pipeline-parallel-size > 1", lambda a: a.pp_size > 1, f"{_ONE_RANK}: use --pp 1"),
    DATA_PARALLEL,
    DCP,
    Conflict(
        "--page-size that is no power of two",
        lambda a: a.page_size is not None and not is_power_of_two(a.page_size),
        f"SGLang's allocator needs a power of two: use --page-size {PAGE_TOKENS}",
    ),
    Conflict(
        "--radix-cache-backend",
        lambda a: a.radix_cache_backend is not None and a.swiftcache_donors is None,
        "lending is known to SGLang's own radix cache alone: drop --radix-cache-backend",
    ),
    Conflict(
        "--hicache-storage-backend",
        lambda a: a.hicache_storage_backend is not None,
        "storage tiers do not read page-major pools: drop --hicache-storage-backend",
    ),
    Conflict(
        "--page-size 1",
        lambda a: a.page_size == 1,
        f"memory is lent in whole pages of many tokens: use --page-size {PAGE_TOKENS}",
    ),
    Conflict(
        "--disable-radix-cache",
        lambda a: a.disable_radix_cache,
        "what is lent is made room for in the prefix cache: drop --disable-radix-cache",
    ),
    Conflict(
        "--speculative-algorithm",
        lambda a: a.speculative_algorithm is not None,
        "a draft model's KV shares the page numbers: drop --speculative-algorithm",
    ),
    DISAGGREGATION,
    Conflict(
        "--enable-hierarchical-cache",
        lambda a: a.enable_hierarchical_cache and a.swiftcache_donors is None,
        "HiCache's host tier does not read page-major pools: use --swiftcache-donors instead",
    ),
    Conflict(
        "--enable-lmcache or --enable-flexkv",
        lambda a: a.enable_lmcache or a.enable_flexkv,
        "their connectors do not read page-major pools: use --swiftcache-donors instead",
    ),
    Conflict(
        "--enable-unified-memory or --enable-hisparse",
        lambda a: a.enable_unified_memory or a.enable_hisparse,
        "both bring a KV pool of their own: drop the flag",
    ),
    Conflict(
        "--swiftcache-verify",
        lambda a: a.swiftcache_verify,
        "checksums are taken of pools that are laid out layer by layer: drop one of the two",
    ),
    Conflict(
        "--enable-memory-saver",
        lambda a: a.enable_memory_saver,
        "it would release memory that others have mapped: drop the flag",
    ),
    Conflict(
        "--enable-pdmux",
        lambda a: a.enable_pdmux,
        "its event loop takes no step at which memory could be lent: drop the flag",
    ),
    STREAMING_SESSION,
    Conflict(
        "--dllm-algorithm",
        lambda a: a.dllm_algorithm is not None,
        "diffusion models are not covered: drop one of the two flags",
    ),
    Conflict(
        "--kv-cache-dtype fp4 / mxfp8",
        lambda a: "fp4" in str(a.kv_cache_dtype) or "mxfp" in str(a.kv_cache_dtype),
        "scales of packed KV formats are not in the pages: use auto, bf16, fp8_e4m3 or fp8_e5m2",
    ),
)


def is_on(args: Any) -> bool:
    """Whether the server lends its own memory."""
    return bool(args.swiftcache_donate != OFF)


def own_donor(args: Any) -> DonorPaths | None:
    """Where this server lends; None if it does not."""
    if not is_on(args):
        return None
    return donor_paths(Path(args.swiftcache_runtime_dir), engine_donor_name(args.port))


def water_marks(args: Any) -> WaterMarks:
    """The flags' marks. Raises SwiftCacheError for what is no fraction, or in the wrong order."""
    given = {"low": args.swiftcache_low_water, "high": args.swiftcache_high_water}
    marks = {name: value for name, value in given.items() if value is not None}
    if args.swiftcache_donate != AUTO:
        marks["most"] = _fraction(
            "--swiftcache-donate",
            args.swiftcache_donate,
            "off, auto, or the fraction of the KV pool that may be lent, as in 0.5",
        )
    return WaterMarks(**marks)


def normalize(args: Any) -> None:
    """Bring the fields into one form, and refuse water marks that mark nothing."""
    args.swiftcache_donate = word_of(args.swiftcache_donate)
    for mark in ("low", "high"):
        field, flag = f"swiftcache_{mark}_water", f"--swiftcache-{mark}-water"
        value = getattr(args, field)
        if value is None:
            continue
        setattr(args, field, _fraction(flag, value, "a fraction of the KV pool, as in 0.2"))
        if not is_on(args):
            raise SwiftCacheError(
                f"{flag} has no effect without --swiftcache-donate: add the one or drop the other"
            )


def check_before(args: Any) -> None:
    """Check the flags, and choose page size and attention backend where the user did not."""
    from sglang.srt.swiftcache import startup_check
    from swiftcache_tier.control.runtime_dir import check_runtime_dir, default_runtime_dir
    from swiftcache_tier.settings import Settings

    water_marks(args)
    # all of it is refused now, not in the scheduler process
    Settings.from_env()
    json_wanted()
    for conflict in _CONFLICTS:
        if conflict.present(args):
            raise SwiftCacheError(
                f"--swiftcache-donate cannot be used with {conflict.flag}: {conflict.advice}"
            )
    startup_check.check()
    args.swiftcache_runtime_dir = str(args.swiftcache_runtime_dir or default_runtime_dir())
    check_runtime_dir(Path(args.swiftcache_runtime_dir))
    args.page_size = args.page_size or PAGE_TOKENS
    backends = (
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    )
    if not any(backends):
        args.attention_backend = _default_backend(args.device)


def lay_out_by_pages(original: Callable[[Any], None], server_args: Any) -> None:
    """ServerArgs._handle_page_major_kv_layout: the layout that can be lent, also on the CPU."""
    if is_on(server_args) and not turn_page_major_on(server_args):
        return
    original(server_args)


def turn_page_major_on(args: Any) -> bool:
    """Have the KV pool laid out page by page. Returns whether SGLang's own check is to follow.

    Raises:
        SwiftCacheError: an attention backend that cannot read such a pool.
    """
    readable = (CPU_BACKEND,) if args.device == "cpu" else GPU_BACKENDS
    backends = set(args._resolved_attention_backends()) - {None}
    unreadable = backends.difference(readable)
    if unreadable:
        raise SwiftCacheError(
            f"--swiftcache-donate keeps all layers of a page together, which attention backend "
            f"{' and '.join(sorted(unreadable))} cannot read: use --attention-backend "
            f"{' or '.join(readable)}"
        )
    args.enable_page_major_kv_layout = True
    # SGLang's check knows the layout on CUDA with Triton alone. On the CPU the pool sees to it
    # itself, and FA3 takes a page's stride from the view.
    return backends == {"triton"}


def _default_backend(device: str) -> str:
    """SGLang's own choice where it can read the layout."""
    if device == "cpu":
        return CPU_BACKEND
    from sglang.srt.utils import is_hopper_with_cuda_12_3

    return "fa3" if is_hopper_with_cuda_12_3() else "triton"


def _fraction(flag: str, value: Any, expected: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise SwiftCacheError(f"{flag} {value}: expected {expected}") from None
