"""The longest prompt that a given amount of local KV memory serves, and what its tokens cost.

Contenders, one server after the other, each with the same local KV bytes: stock SGLang, HiCache,
SwiftCache with a layer window, and, for what is right and how long it takes with enough memory, a
reference whose slots are all regular. A prompt counts as served if all tokens of its answer are
those of the reference; how far they agree is printed, and "not checked" where the reference has no
answer, which counts as not served. Answers are kept in --output-dir, so that contenders may be run
one by one, the reference first:

    python benchmark/max_context/bench_max_context.py --model-path DIR --only reference ...
    python benchmark/max_context/bench_max_context.py --model-path DIR --only swiftcache ...
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.long_prompts import LongAnswer, ask, compare, prompt_ids
from swiftcache_bench.server.api import flush_cache, server_info
from swiftcache_bench.server.contender_server import ContenderServer, LaunchSettings
from swiftcache_bench.server.contenders import (
    DEFAULT_DONORS,
    DEVICE_FLAGS,
    Contender,
    parse_contender,
    resolve_contenders,
    split_flags,
)
from swiftcache_tier.settings import GPU_PAGE_BYTES
from swiftcache_tier.stream import StreamShape, regular_tokens_for
from swiftcache_tier.stream.sizing import WINDOW_SETS

NAMES = ("reference", "stock", "hicache", "swiftcache")
REFERENCE = "reference"


@dataclass(frozen=True)
class Sizes:
    """Slots of each contender, from what --local-tokens and --window-tokens say."""

    local_tokens: int
    """Of stock SGLang: the memory that all have."""
    window_tokens: int
    shape: StreamShape
    vocabulary: int

    @property
    def page_tokens(self) -> int:
        return self.shape.page_tokens

    @property
    def regular_tokens(self) -> int:
        """R: what two sets of window slots leave, each a layer high, in whole units."""
        rest = self.local_tokens - math.ceil(WINDOW_SETS * self.window_tokens / self.shape.layers)
        return regular_tokens_for(rest, self.shape)

    @property
    def total_tokens(self) -> int:
        return self.regular_tokens + self.window_tokens

    def prompt(self, length: int, seed: int) -> list[int]:
        return prompt_ids(length, seed, self.vocabulary)

    def flags(self, name: str, tier_gb: str) -> str:
        pool = f"--max-total-tokens {self.local_tokens}"
        match name:
            case "reference":
                return f"--max-total-tokens {self.total_tokens + self.page_tokens}"
            case "stock":
                return pool
            case "hicache":
                return f"{pool} --enable-hierarchical-cache --hicache-size {tier_gb}"
        return (
            f"--max-total-tokens {self.regular_tokens} "
            f"--swiftcache-layer-stream {self.window_tokens} "
            "--swiftcache-donors auto --swiftcache-runtime-dir {runtime_dir}"
        )


def main() -> int:
    args = parse_args()
    try:
        return run(args)
    except BenchmarkError as error:
        print(f"bench_max_context: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    sizes = sizes_of(args)
    if sizes.regular_tokens <= 0:
        raise BenchmarkError(
            f"--window-tokens {args.window_tokens} leaves no regular slots of --local-tokens "
            f"{args.local_tokens}: ask for a smaller window"
        )
    entries = dict(
        parse_contender(f"{name}={sizes.flags(name, args.hicache_gb)}") for name in NAMES
    )
    donors = args.donors or DEFAULT_DONORS[args.device]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for contender in resolve_contenders(entries, donors, args.only or NAMES):
        measure(contender, sizes, args)
    report(sizes, args.output_dir)
    return 0


def sizes_of(args: argparse.Namespace) -> Sizes:
    """The sizes that a server makes of the flags, so that all contenders get the same prompts."""
    config = json.loads((Path(args.model_path) / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    row_bytes = heads * dim * args.kv_number_bytes
    mapped_bytes = GPU_PAGE_BYTES if args.device == "cuda" else mmap.PAGESIZE
    unit = math.lcm(args.page_size, mapped_bytes // math.gcd(mapped_bytes, row_bytes))
    shape = StreamShape(config["num_hidden_layers"], 2 * row_bytes, args.page_size, unit)
    window = -(-args.window_tokens // unit) * unit
    return Sizes(args.local_tokens, window, shape, config["vocab_size"])


def measure(contender: Contender, sizes: Sizes, args: argparse.Namespace) -> None:
    logs = args.output_dir / contender.name
    logs.mkdir(exist_ok=True)
    settings = LaunchSettings(
        args.model_path,
        args.port,
        logs,
        (
            *DEVICE_FLAGS[args.device],
            *("--page-size", str(args.page_size)),
            *split_flags(args.server_args, "--server-args"),
        ),
    )
    lengths = [int(factor * sizes.regular_tokens) for factor in args.factors]
    lengths += [sizes.total_tokens - args.output_tokens - 2 * args.page_size]
    with ContenderServer(contender, settings) as server:
        print(f"bench_max_context: {contender.name}: starting (log: {server.log_path})", flush=True)
        server.start()
        ask(server.url, sizes.prompt(64, 1), 4, args.timeout_s)
        answers: list[dict[str, Any]] = []
        states: list[tuple[int, float]] = []
        for length in sorted(lengths):
            flush_cache(server.url)
            answer = ask(
                server.url, sizes.prompt(length, length), args.output_tokens, args.timeout_s
            )
            print(f"bench_max_context: {contender.name}: {describe(answer)}", flush=True)
            answers.append(answer.as_json())
            states.append(streamed(server.url))
        joined = join(server.url, sizes, args) if args.residents else None
        info = server_info(server.url)
    result = {
        "answers": answers,
        "streamed": states,
        "residents": joined,
        "memory": info["internal_states"][0].get("memory_usage"),
        "swiftcache": info["internal_states"][0].get("swiftcache"),
        "max_total_num_tokens": info.get("max_total_num_tokens"),
    }
    (args.output_dir / f"{contender.name}.json").write_text(json.dumps(result, indent=1))


def join(url: str, sizes: Sizes, args: argparse.Namespace) -> dict[str, float]:
    """TPOT of requests that run in regular slots: alone, and once a streamed one has joined."""
    length = sizes.regular_tokens // (4 * args.residents)
    short = [sizes.prompt(length, seed) for seed in range(args.residents)]
    long = sizes.prompt(sizes.regular_tokens + args.joining_tokens, 99)
    found: dict[str, float] = {}
    for what, others in (("alone", []), ("joined", [long])):
        flush_cache(url)
        for ids in others:  # its prefill is over when the others decode
            ask(url, ids, 1, args.timeout_s)
        with ThreadPoolExecutor(args.residents + 1) as pool:
            asked = [
                pool.submit(ask, url, ids, args.resident_output, args.timeout_s)
                for ids in (*others, *short)
            ]
        answers = [answer.result() for answer in asked]
        for answer in answers:
            if answer.error is not None:
                raise BenchmarkError(f"beside others {describe(answer)}")
        times = [answer.tpot_ms for answer in answers[len(others) :]]
        found[f"tpot_{what}_ms"] = statistics.mean(times)
    found["ratio"] = found["tpot_joined_ms"] / found["tpot_alone_ms"]
    return found


def streamed(url: str) -> tuple[int, float]:
    """Bytes that a decode step of the last request reads from donors, and the time they need.

    Milliseconds, by the rate that the server measured to the slowest donor.
    """
    tier = server_info(url)["internal_states"][0].get("swiftcache") or {}
    if "layer_stream" not in tier:
        return 0, 0.0
    token_bytes = tier["block_bytes"] // tier["block_tokens"]
    used_bytes = tier["layer_stream"]["window_slots"]["used"] * token_bytes
    details = [donor["link_details"] for donor in tier["donors"]]
    rate = min(item["measured_gb_per_s"] or item["expected_gb_per_s"] for item in details)
    return used_bytes, used_bytes / rate / 1e6


def describe(answer: LongAnswer) -> str:
    if answer.error is not None:
        return f"{answer.length} tokens: {answer.error}"
    return (
        f"{answer.length} tokens: TTFT {answer.ttft_ms:.0f} ms, "
        f"TPOT {answer.tpot_ms:.2f} ms ({len(answer.output_ids)} tokens)"
    )


def report(sizes: Sizes, folder: Path) -> None:
    """Print what has been measured so far, against the reference where there is one."""
    results = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in NAMES
        if (folder / f"{name}.json").exists()
    }
    expected = {
        answer["length"]: LongAnswer(**answer)
        for answer in results.get(REFERENCE, {"answers": []})["answers"]
    }
    print(
        f"\nlocal KV memory of {sizes.local_tokens} tokens: R {sizes.regular_tokens}, "
        f"W {sizes.window_tokens}\n"
    )
    print(
        "| contender | prompt | / local | served | TTFT ms | / ref "
        "| TPOT ms | GB a step | / floor |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    remarks = []
    for name, result in results.items():
        longest = 0
        for item, moved in zip(result["answers"], result["streamed"], strict=True):
            answer = LongAnswer(**item)
            right = expected.get(answer.length)
            print(row(name, answer, right, sizes, moved))
            if is_right(answer, right):
                longest = max(longest, answer.length)
        times = longest / sizes.local_tokens
        remarks.append(f"{name}: {longest} tokens at most, {times:.2f} of local")
        if result["memory"]:
            # SGLang rounds to three decimals, in units of 1 << 30 bytes
            used = (
                f"{result['memory']['kvcache']} GiB of KV, {result['memory']['weight']} of weights"
            )
            remarks.append(f"{name}, memory in use on the device: {used}")
        if result["residents"]:
            remarks.append(f"{name}, resident requests: {result['residents']}")
            # attention over the other's context costs them too, wherever its KV lies
            regular = results.get(REFERENCE, result)["residents"]
            if regular and name != REFERENCE:
                ratio = result["residents"]["tpot_joined_ms"] / regular["tpot_joined_ms"]
                remarks.append(f"{name}, joined, against all slots regular: {ratio:.3f}")
    print("\n" + "\n".join(remarks))


def is_right(answer: LongAnswer, right: LongAnswer | None) -> bool:
    """Whether a prompt was served with the tokens of the reference."""
    if answer.error is not None or right is None or right.error is not None:
        return False
    return compare(answer, right).complete


def row(
    name: str, answer: LongAnswer, right: LongAnswer | None, sizes: Sizes, moved: tuple[int, float]
) -> str:
    """One line; the floor of a step is the reference's time, or that of the bytes if longer."""
    ratio = f"{answer.length / sizes.local_tokens:.2f}"
    if answer.error is not None:
        return f"| {name} | {answer.length} | {ratio} | no: {answer.error[:60]} | | | | | |"
    served, ttft, floor = "not checked", "", ""
    if right is not None and right.error is None:
        agreement = compare(answer, right)
        served = (
            f"{agreement.same_tokens} of {agreement.of_tokens} tokens the same, "
            f"log-probabilities within {agreement.largest_logprob_difference:.3f}"
        )
        ttft = f"{answer.ttft_ms / right.ttft_ms:.3f}"
        floor_ms = max(right.tpot_ms, moved[1])
        floor = f"{answer.tpot_ms / floor_ms:.3f}" if floor_ms else ""
    return (
        f"| {name} | {answer.length} | {ratio} | {served} | {answer.ttft_ms:.0f} | {ttft} | "
        f"{answer.tpot_ms:.2f} | {moved[0] / 1e9:.2f} | {floor} |"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True, help="folder with a config.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--donors", nargs="+", metavar="SPEC", help="such as cuda:1=60GiB")
    parser.add_argument("--local-tokens", type=int, required=True, help="slots of stock SGLang")
    parser.add_argument("--window-tokens", type=int, required=True, help="W")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-number-bytes", type=int, default=2, help="2 for bf16, 4 for float32")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1.5, 4.0, 8.0])
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--hicache-gb", default="32", help="host memory of HiCache")
    parser.add_argument("--residents", type=int, default=0, help="requests beside a streamed one")
    parser.add_argument("--resident-output", type=int, default=128)
    parser.add_argument("--joining-tokens", type=int, default=4096, help="streamed, of the other")
    parser.add_argument("--server-args", default="", help="for all, as one word")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--output-dir", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
