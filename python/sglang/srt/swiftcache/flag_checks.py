"""What may not stand beside ``--swiftcache-donors``, checked before anything is allocated.

Every check raises ``SwiftCacheError`` with one line: what was wrong and what to do.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.swiftcache import BACKEND_NAME, donate_checks
from sglang.srt.swiftcache.conflicts import (
    DATA_PARALLEL,
    DCP,
    DISAGGREGATION,
    STREAMING_SESSION,
    Conflict,
)
from swiftcache_tier.blocks.kv_format import is_power_of_two
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.log_format import json_wanted

if TYPE_CHECKING:
    from swiftcache_tier.spec import DonorSpec

REPLICAS_MAX = 8
IO_BACKENDS = ("auto", "kernel", "copy")

# HiCache's own sizing and layout: donors decide both. Values are what ServerArgs defaults to.
_HOST_TIER_FLAGS = {
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "hicache_mem_layout": "page_first",
    "hicache_io_backend": "kernel",
}


_CONFLICTS = (
    Conflict(
        "--device other than cuda and cpu",
        lambda a: a.device not in (None, "cuda", "cpu"),
        "use cuda or cpu",
    ),
    Conflict(
        "--page-size that is no power of two",
        lambda a: a.page_size is not None and not is_power_of_two(a.page_size),
        "SGLang's allocator needs a power of two: use 1, 16 or 64",
    ),
    Conflict(
        "--disable-radix-cache",
        lambda a: a.disable_radix_cache,
        "donors hold radix-prefix KV: drop --disable-radix-cache",
    ),
    Conflict(
        "--radix-cache-backend",
        lambda a: a.radix_cache_backend not in (None, BACKEND_NAME),
        "donors come with a radix cache of their own: drop --radix-cache-backend",
    ),
    Conflict(
        "--tensor-parallel-size > 1",
        lambda a: a.tp_size > 1,
        "the ranks do not agree on donor blocks yet: use --tp 1",
    ),
    Conflict(
        "--pipeline-parallel-size > 1",
        lambda a: a.pp_size > 1,
        "the stages do not agree on donor blocks yet: use --pp 1",
    ),
    DATA_PARALLEL,
    DCP,
    Conflict(
        "--speculative-algorithm",
        lambda a: a.speculative_algorithm is not None,
        "the draft model's KV has no donor blocks yet: drop --speculative-algorithm",
    ),
    DISAGGREGATION,
    Conflict(
        "--hicache-storage-backend",
        lambda a: a.hicache_storage_backend is not None,
        "a storage tier below the donors is not covered: drop --hicache-storage-backend",
    ),
    Conflict(
        "--enable-lmcache",
        lambda a: a.enable_lmcache,
        "two tiers would hold the same prefixes: drop one of the two flags",
    ),
    Conflict(
        "--enable-flexkv",
        lambda a: a.enable_flexkv,
        "two tiers would hold the same prefixes: drop one of the two flags",
    ),
    Conflict(
        "--enable-hisparse",
        lambda a: a.enable_hisparse,
        "sparse host offload is not covered: drop --enable-hisparse",
    ),
    Conflict(
        "--enable-page-major-kv-layout",
        lambda a: a.enable_page_major_kv_layout,
        "the receiver's pool must be layer-major: drop the flag",
    ),
    Conflict(
        "--enable-unified-memory",
        lambda a: a.enable_unified_memory,
        "the receiver's pool must be layer-major: drop the flag",
    ),
    STREAMING_SESSION,
    Conflict(
        "--dllm-algorithm",
        lambda a: a.dllm_algorithm is not None,
        "diffusion models turn the hierarchical cache off: drop one of the two flags",
    ),
    Conflict(
        "--kv-cache-dtype fp4 / mxfp8",
        lambda a: "fp4" in str(a.kv_cache_dtype) or "mxfp" in str(a.kv_cache_dtype),
        "scales of packed KV formats are not stored: use auto, bf16, fp8_e4m3 or fp8_e5m2",
    ),
)


def normalize(args: Any) -> None:
    """Bring the fields into one form, whether they come from flags, YAML or keyword arguments.

    The donors are then ``None`` (off) or a list of SPECs, ``[]`` meaning auto.

    Raises:
        SwiftCacheError: a value that is none, a flag that does nothing without donors.
    """
    donors = args.swiftcache_donors
    if isinstance(donors, str):
        donors = donors.split()
    # a key of a YAML file arrives as the one word "None" (nothing follows), "True" or "False"
    words = [str(word).lower() for word in donors] if isinstance(donors, list) else None
    if donors is False or words == ["false"]:
        donors = None
    elif donors is True or words in (["true"], ["none"]):
        donors = []
    args.swiftcache_donors = donors
    if args.swiftcache_runtime_dir is not None:
        if not str(args.swiftcache_runtime_dir):
            raise SwiftCacheError(
                "--swiftcache-runtime-dir is empty: expected a folder; drop the flag for the "
                "default"
            )
        # the scheduler process may run elsewhere
        args.swiftcache_runtime_dir = str(Path(args.swiftcache_runtime_dir).absolute())
    if args.swiftcache_io_backend not in IO_BACKENDS:
        raise SwiftCacheError(
            f"--swiftcache-io-backend {args.swiftcache_io_backend}: expected auto, kernel or copy"
        )
    args.swiftcache_replicas = _replicas(args.swiftcache_replicas)
    args.swiftcache_ttl = _ttl_s(args.swiftcache_ttl)
    if args.swiftcache_donors is not None:
        return
    lends = donate_checks.is_on(args)
    for flag, is_given in (
        ("--swiftcache-runtime-dir", args.swiftcache_runtime_dir is not None and not lends),
        ("--swiftcache-io-backend", args.swiftcache_io_backend != "auto"),
        ("--swiftcache-verify", args.swiftcache_verify),
        ("--swiftcache-replicas", args.swiftcache_replicas != 1),
        ("--swiftcache-ttl", args.swiftcache_ttl is not None),
    ):
        if is_given:
            raise SwiftCacheError(
                f"{flag} has no effect without --swiftcache-donors: add the one or drop the other"
            )


def check_before(args: Any) -> None:
    """Check the flags before SGLang resolves its own arguments.

    Raises:
        SwiftCacheError: a flag that cannot stand beside donors, a SPEC that is none, an SGLang that
            the hooks do not fit.
    """
    from sglang.srt.swiftcache import startup_check
    from swiftcache_tier.control.runtime_dir import default_runtime_dir
    from swiftcache_tier.spec import parse_specs

    for conflict in _CONFLICTS:
        if conflict.present(args):
            raise SwiftCacheError(
                f"--swiftcache-donors cannot be used with {conflict.flag}: {conflict.advice}"
            )
    for field, default in _HOST_TIER_FLAGS.items():
        if getattr(args, field) != default:
            raise _host_tier_flag(field)
    _check_replicas(args.swiftcache_replicas, parse_specs(args.swiftcache_donors))
    json_wanted()  # a format that is none is refused now, not in the scheduler process
    startup_check.check()
    # written back, so that the scheduler process and /server_info have the directory that counts
    args.swiftcache_runtime_dir = str(args.swiftcache_runtime_dir or default_runtime_dir())


def check_after(args: Any) -> None:
    """Check device and donors, once SGLang knows the device. Allocates nothing.

    Raises:
        SwiftCacheError: a device that is not covered, more memory than there is, a donor that does
            not exist, does not answer or cannot be reached, an unsafe runtime directory.
    """
    from swiftcache_tier.receiver.check import check_specs
    from swiftcache_tier.settings import Settings
    from swiftcache_tier.spec import parse_specs

    if args.device not in ("cpu", "cuda"):
        raise SwiftCacheError(
            f"--swiftcache-donors does not run on --device {args.device}: use cuda or cpu"
        )
    check_specs(
        parse_specs(args.swiftcache_donors),
        Path(args.swiftcache_runtime_dir),
        Settings.from_env(),
        device="cpu" if args.device == "cpu" else f"cuda:{args.base_gpu_id}",
    )


def _replicas(value: Any) -> int:
    try:
        replicas = int(str(value))
    except ValueError:
        replicas = 0
    if not 1 <= replicas <= REPLICAS_MAX:
        raise SwiftCacheError(
            f"--swiftcache-replicas {value}: expected 1 (no copies) to {REPLICAS_MAX}"
        )
    return replicas


def _ttl_s(value: Any) -> float | None:
    if value is None:
        return None
    try:
        ttl_s = float(str(value))
    except ValueError:
        ttl_s = math.nan
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise SwiftCacheError(
            f"--swiftcache-ttl {value}: expected seconds over 0; drop the flag to keep prefixes "
            "until their memory is needed"
        )
    return ttl_s


def _check_replicas(replicas: int, specs: Sequence[DonorSpec]) -> None:
    # `auto` may find any number of donors, now and later.
    donors = [spec for spec in specs if spec.kind != "auto"]
    if len(donors) == len(specs) and len(donors) < replicas:
        raise SwiftCacheError(
            f"--swiftcache-replicas {replicas} with {len(donors)} donor SPEC(s): copies lie on "
            f"different donors, so name at least {replicas} donors or ask for fewer copies"
        )


def check_command_line(argv: Sequence[str]) -> None:
    """Refuse HiCache's sizing flags even where they repeat the default value."""
    given = _given(argv)
    for field in _HOST_TIER_FLAGS:
        if field in given:
            raise _host_tier_flag(field)


def _given(argv: Sequence[str]) -> set[str]:
    """The fields that a command line and its ``--config`` file set, told by SGLang's own parser."""
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = list(argv)
    if "--config" in words:
        words = ConfigArgumentMerger(parser).merge_config_with_args(words)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(words)))


def _host_tier_flag(field: str) -> SwiftCacheError:
    flag = "--" + field.replace("_", "-")
    return SwiftCacheError(
        f"{flag} sets up HiCache's host tier, which --swiftcache-donors replaces: drop {flag} "
        "(the size of the tier is what the donors lend)"
    )
