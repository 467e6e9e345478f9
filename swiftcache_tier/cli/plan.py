"""`swiftcache plan`: how far memory goes, before anything is started."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console
from rich.table import Table

from swiftcache_tier.cli.arguments import count, size
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

if TYPE_CHECKING:
    from swiftcache_tier.planning.memory_plan import DonorPlan, MemoryPlan


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="show what models and donors come to: extents, blocks, tokens",
        description="Show what a receiver gets from its own memory and its donors' (with "
        "--receiver), or which extents models lend to each other (with --pairs). A MODEL is a name "
        "such as Qwen3-8B or a folder with a config.json, with ,page=64 ,kv=fp8 or ,tp=2 behind it "
        "where it is not served in bf16 with pages of 16 tokens on one rank.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--receiver", metavar="MODEL", help="the model whose KV is to be kept")
    what.add_argument(
        "--pairs",
        nargs="*",
        metavar="MODEL",
        help="print tables of extents, MEU and waste for these models; default: all known ones",
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="the receiver's own memory for KV, per GPU"
    )
    parser.add_argument(
        "--donor",
        action="append",
        default=[],
        metavar="WHAT=SIZE",
        help="a server that lends (MODEL=20GiB), or plain memory (host=8GiB, cuda:1=40GiB); may be "
        "given several times",
    )
    parser.add_argument(
        "--layer-stream",
        default="auto",
        metavar="TOKENS",
        help="off, auto or W, tokens that are streamed, as for --swiftcache-layer-stream; default: "
        "auto",
    )
    parser.add_argument(
        "--context",
        type=count,
        metavar="TOKENS",
        help="the longest context, beyond which auto takes no window; default: the model's own",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Imported here: the other subcommands do without numpy.
    from swiftcache_tier.models import KNOWN_MODELS, parse_model
    from swiftcache_tier.planning.memory_plan import parse_donor, plan_memory
    from swiftcache_tier.planning.pairs import pair_tables

    extent_bytes = Settings.from_env().extent_bytes
    if arguments.pairs is not None:
        models = [parse_model(name) for name in arguments.pairs or KNOWN_MODELS]
        print(pair_tables(models, extent_bytes))
        return 0
    if arguments.memory is None or not arguments.donor:
        raise SwiftCacheError(
            "--receiver needs --memory SIZE, its own, and one --donor WHAT=SIZE or more"
        )
    wanted_tokens = _window_tokens(arguments.layer_stream)
    plan = plan_memory(
        parse_model(arguments.receiver),
        arguments.memory,
        [parse_donor(text) for text in arguments.donor],
        wanted_tokens,
        arguments.context,
        extent_bytes,
    )
    if arguments.json:
        sys.stdout.buffer.write(orjson.dumps(_as_json(plan), option=orjson.OPT_APPEND_NEWLINE))
    else:
        _print(plan, wanted_tokens)
    return 0


def _window_tokens(text: str) -> int | None:
    """W, 0 for off and None for auto."""
    word = text.strip().lower()
    if word in ("off", "auto"):
        return 0 if word == "off" else None
    if not (word.isdecimal() and int(word) > 0):
        raise SwiftCacheError(
            f"--layer-stream {text!r} is not known: expected off, auto or TOKENS over 0"
        )
    return int(word)


def _as_json(plan: MemoryPlan) -> dict[str, Any]:
    stream = plan.stream
    return {
        "receiver": plan.receiver.name,
        "memory_bytes": plan.local_bytes,
        "block_bytes": plan.receiver.kv.page_bytes,
        "layer_block_bytes": plan.receiver.kv.layer_page_bytes,
        "block_tokens": plan.receiver.kv.page_tokens,
        "donors": [
            {
                "name": donor.wish.name,
                "extent_bytes": donor.extent.extent_bytes,
                "extent_pages": donor.extent.pages,
                "extents": donor.lease.extents,
                "bytes": donor.lease.lease_bytes,
                "waste_bytes": donor.lease.waste_bytes,
                "exact_extent_bytes": donor.exact_extent_bytes,
                "meu": donor.unit and donor.unit._asdict(),
                "K_i": blocks,
            }
            for donor, blocks in zip(plan.donors, stream.blocks, strict=True)
        ],
        "resident_tokens": plan.resident_tokens,
        "R": stream.regular_tokens,
        "W": stream.window_tokens,
        "N_LSC": stream.streamed_blocks,
        "N_RC": plan.regular_blocks,
        "prefix_tokens": plan.prefix_tokens,
    }


def _print(plan: MemoryPlan, wanted_tokens: int | None) -> None:
    kv, stream = plan.receiver.kv, plan.stream
    console = Console(width=None if sys.stdout.isatty() else 500, highlight=False, markup=False)
    console.print(
        f"{plan.receiver.name}: blocks of {kv.page_tokens} tokens, {format_size(kv.page_bytes)} "
        f"({kv.layers} layers of M_block = {format_size(kv.layer_page_bytes)})\n"
    )
    table = Table("DONOR", "EXTENT", "PAGES", "LENDS", "MEU", "EXACT", "K_i", "WASTE", box=None)
    for donor, blocks in zip(plan.donors, stream.blocks, strict=True):
        table.add_row(*_donor_row(donor, blocks))
    console.print(table)
    donated_blocks = sum(stream.blocks)
    console.print(
        f"\nwithout a layer stream: {plan.resident_tokens} tokens in "
        f"{format_size(plan.local_bytes)} on the device, {donated_blocks * kv.page_tokens} with "
        f"donors\n"
        f"{_layer_stream(plan, wanted_tokens)}, {plan.prefix_tokens} more with donors\n"
        f"N_LSC = min(sum K_i = {donated_blocks}, W = {stream.window_pages}) = "
        f"{stream.streamed_blocks} blocks, N_RC = {plan.regular_blocks} blocks"
    )


def _layer_stream(plan: MemoryPlan, wanted_tokens: int | None) -> str:
    stream = plan.stream
    if not stream.window_tokens:
        why = "layer stream off" if wanted_tokens == 0 else "layer stream auto: not worth a window"
        return f"{why}: R = {stream.regular_tokens}, W = 0"
    times = stream.total_tokens / plan.resident_tokens
    return (
        f"with a layer stream: R = {stream.regular_tokens}, W = {stream.window_tokens}, contexts "
        f"of {stream.total_tokens} tokens ({times:.2f} times as long)"
    )


def _donor_row(donor: DonorPlan, blocks: int) -> list[str]:
    unit = (
        ""
        if donor.unit is None
        else (
            f"{format_size(donor.unit.unit_bytes)} ({donor.unit.receiver_pages} blocks = "
            f"{donor.unit.donor_pages} pages)"
        )
    )
    pages = "" if donor.wish.model is None else str(donor.extent.pages or "straddle")
    return [
        donor.wish.name,
        format_size(donor.extent.extent_bytes),
        pages,
        f"{format_size(donor.lease.lease_bytes)} in {donor.lease.extents}",
        unit,
        format_size(donor.exact_extent_bytes),
        str(blocks),
        f"{donor.lease.waste:.2%}",
    ]
