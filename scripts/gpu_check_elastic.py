"""Time what elastic donation does on GPUs: lend and take back, and what page-major costs.

    PYTHONPATH=scripts:test python scripts/gpu_check_elastic.py times
    PYTHONPATH=scripts:test python scripts/gpu_check_elastic.py page-major

`times` (about two minutes): an engine's pool of Qwen3-8B pages on cuda:0 and, on the last GPU, a
receiver in a process of its own, which is idle or streams at full rate; lends and takes back 1 GiB,
with the pool at 1x and 10x and the layers at 1x and 2x. `page-major` (under four minutes): one
server after the other with dummy weights of Qwen3-8B, on its default backend and with
--swiftcache-donate, nothing lent. Both print JSON and what was to be reached. With
SWIFTCACHE_EXTENT_BYTES=16MiB, `--device cpu --lease 16MiB --pool 64MiB` tries the first out without
a GPU, where its times tell nothing.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stopwatch import Stopwatch

from swiftcache_tier.cuda_driver import device_count
from swiftcache_tier.extents import JoinedAddressRange
from swiftcache_tier.receiver import DonorTier
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size, parse_size
from swiftcache_tier.spec import parse_specs

if TYPE_CHECKING:
    from elastic_engine import Engine

TIMES = 6
DEADLINE_S = 60.0
BATCH, SHORT, LONG, PROMPT_TOKENS = 16, 8, 264, 512
STREAMED_BLOCKS = 256
# Receivers of other models: Qwen3-32B keeps 4 MiB to a page.
BLOCK_BYTES = 4 << 20

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "eos_token_id": 151645, "bos_token_id": 151643,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["times", "page-major", "receive"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--lease", type=parse_size, default=1 << 30)
    parser.add_argument("--pool", type=parse_size, default=4 << 30)
    parser.add_argument("--receiver", nargs=3, metavar=("SPEC", "FOLDER", "DEVICE"))
    arguments = parser.parse_args()
    if arguments.part == "receive":
        spec, folder, device = arguments.receiver
        _receive(spec, folder, device, min(BLOCK_BYTES, arguments.lease // 16))
        return 0
    report = _times(arguments) if arguments.part == "times" else _page_major(arguments.device)
    print(json.dumps(report, indent=2))
    return 0


def _times(arguments: argparse.Namespace) -> dict[str, Any]:
    """Median, and first, of lends and take-backs of one lease; seconds are of one clock."""
    cases = {"1x": (1, 1), "10x pool": (10, 1), "2x layers": (1, 2)}
    found = {
        name: _measure(arguments, arguments.pool * pool, layers)
        for name, (pool, layers) in cases.items()
    }
    base = found["1x"]
    ratios = {
        f"{what}, {name}": round(found[name][what] / base[what], 2)
        for name in cases
        if name != "1x"
        for what in ("lend_ms", "take_back_idle_ms", "take_back_loaded_ms")
    }
    goal = "lend <= 5 ms (first <= 50), take back <= 10 ms idle, <= 50 ms loaded, ratios <= 1.2"
    return {"lease": format_size(arguments.lease), "goal": goal, **found, "ratios": ratios}


def _measure(arguments: argparse.Namespace, pool_bytes: int, layers: int) -> dict[str, float]:
    from elastic_engine import Engine  # imports SGLang, which the receiver does without

    settings = Settings.from_env()
    with tempfile.TemporaryDirectory(prefix="sc-") as folder:
        engine = Engine(arguments.device, pool_bytes, layers, Path(folder), settings)
        extents = max(1, arguments.lease // engine.extent_bytes)
        try:
            with _receiver(engine, folder, arguments) as ask:
                lends: list[float] = []
                handed_over: list[float] = []
                shared: list[float] = []
                mapped: list[float] = []
                idle: list[float] = []
                loaded: list[float] = []
                for load in [False] * TIMES + [True] * TIMES:
                    _until(lambda: engine.donor.demand >= extents)
                    decided_s = time.monotonic()
                    engine.lend(extents)
                    handed_over.append(time.monotonic() - decided_s)
                    usable_s = ask(f"mapped {extents * engine.extent_bytes}")
                    lends.append(usable_s - decided_s)
                    shared.append(engine.sharing.read())
                    mapped.append(ask("mapping"))
                    if load:
                        ask("load")
                    asked_s = time.monotonic()
                    engine.take_back(DEADLINE_S)
                    (loaded if load else idle).append(time.monotonic() - asked_s)
                    ask("idle")
        finally:
            engine.close()
    return {
        "extent_mib": engine.extent_bytes / (1 << 20),
        "lend_first_ms": round(lends[0] * 1e3, 3),
        "lend_ms": round(statistics.median(lends[1:]) * 1e3, 3),
        # Of those, the engine's part: to find free extents, and to zero them.
        "hand_over_first_ms": round(handed_over[0] * 1e3, 3),
        "hand_over_ms": round(statistics.median(handed_over[1:]) * 1e3, 3),
        # Then the donor's thread makes descriptors, and the receiver's maps what they name.
        "share_first_ms": round(shared[0] * 1e3, 3),
        "share_ms": round(statistics.median(shared[1:]) * 1e3, 3),
        "map_first_ms": round(mapped[0] * 1e3, 3),
        "map_ms": round(statistics.median(mapped[1:]) * 1e3, 3),
        "take_back_idle_ms": round(statistics.median(idle) * 1e3, 3),
        "take_back_loaded_ms": round(statistics.median(loaded) * 1e3, 3),
    }


@contextmanager
def _receiver(
    engine: Engine, folder: str, arguments: argparse.Namespace
) -> Iterator[Callable[[str], float]]:
    device = "cpu" if arguments.device == "cpu" else f"cuda:{device_count() - 1}"
    command = [sys.executable, __file__, "receive", "--lease", str(arguments.lease)]
    process = subprocess.Popen(
        [*command, "--receiver", engine.spec, folder, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(order: str) -> float:
        print(order, file=process.stdin, flush=True)
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], DEADLINE_S)[0]:
            raise RuntimeError(f"the receiver has not answered {order!r} within {DEADLINE_S:g} s")
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the receiver has ended")
        return float(line)

    try:
        assert process.stdout.readline(), "the receiver did not start"
        yield ask
    finally:
        process.kill()
        process.wait()


def _receive(spec: str, folder: str, device: str, block_bytes: int) -> None:
    """Follow orders on stdin, each answered with the moment (monotonic) when it was fulfilled, or
    with what it asks for."""
    import torch

    from swiftcache_kernel import copy_blocks

    tier = DonorTier(
        parse_specs([spec]),
        block_bytes,
        settings=Settings.from_env(),
        runtime_dir=Path(folder),
        receiver_name="receiver",
        device=device,
    )
    mapping = Stopwatch(JoinedAddressRange.map_each)
    JoinedAddressRange.map_each = lambda *args: mapping(*args)  # type: ignore[method-assign]
    tier.start()
    if device != "cpu":
        torch.cuda.set_device(device)
    own = torch.zeros(STREAMED_BLOCKS, block_bytes, dtype=torch.uint8, device=device)
    target = own.data_ptr() + torch.arange(STREAMED_BLOCKS, device=device) * block_bytes
    if device != "cpu":
        torch.cuda.synchronize(device)
    print("ready", flush=True)
    used = None
    wanted_bytes: int | None = None
    while True:
        tier.poll()
        doomed = tier.must_vacate()
        if used is not None:
            count = min(STREAMED_BLOCKS, len(used))
            source = torch.from_numpy(tier.addresses(used[:count])).to(device)
            copy_blocks(source, target[:count], block_bytes=block_bytes)
            if device != "cpu":
                torch.cuda.synchronize(device)
        if doomed.size:
            tier.free(doomed)
            used = None
            tier.poll()
        # Not by `status`, which looks at every extent and would keep the control thread waiting.
        # A block at either end may not lie wholly inside.
        if wanted_bytes is not None and (tier.total_blocks + 2) * block_bytes > wanted_bytes:
            print(time.monotonic(), flush=True)
            wanted_bytes = None
        if not select.select([sys.stdin], [], [], 0)[0]:
            time.sleep(0)
            continue
        verb, _, number = sys.stdin.readline().partition(" ")
        if not verb:
            return
        if verb == "mapped":
            wanted_bytes = int(number)
            continue
        if verb.strip() == "mapping":
            print(mapping.read(), flush=True)
            continue
        if verb.strip() == "load":
            used = tier.alloc(tier.free_blocks)
        print(time.monotonic(), flush=True)


def _page_major(device: str) -> dict[str, Any]:
    """Time per output token of one engine as SGLang has it on Hopper, and page-major."""
    from support.server import Server

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="sc-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(QWEN3_8B))
        common = (
            # The last of a flag counts: Server asks for the CPU engine.
            *("--device", device, "--dtype", "bfloat16"),
            *("--load-format", "dummy", "--skip-tokenizer-init", "--random-seed", "1"),
        )
        for label, flags in {
            "default": ("--page-size", "16", "--attention-backend", "fa3"),
            "page_major": ("--swiftcache-donate", "auto", "--attention-backend", "fa3"),
            "page_major_triton": ("--swiftcache-donate", "auto", "--attention-backend", "triton"),
        }.items():
            with Server(
                folder, *common, *flags, tmp_path=folder, env={"OMP_NUM_THREADS": None}
            ) as server:
                found[label] = _tpot_ms(server)
    return {
        "tpot_ms": {name: round(value, 3) for name, value in found.items()},
        "against_default": {
            name: round(value / found["default"], 4) for name, value in found.items()
        },
        "goal": "<= 1.03, or reported",
    }


def _tpot_ms(server: Any) -> float:
    prompts = [[100 + i] * PROMPT_TOKENS for i in range(BATCH)]
    server.generate(prompts, SHORT)  # compiles, and fills the prefix cache
    taken = []
    for _ in range(3):
        seconds = []
        for tokens in (SHORT, LONG):
            began_s = time.perf_counter()
            server.generate(prompts, tokens)
            seconds.append(time.perf_counter() - began_s)
        taken.append((seconds[1] - seconds[0]) / (LONG - SHORT) * 1e3)
    return statistics.median(taken)


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError(f"not within {DEADLINE_S:g} s")
        time.sleep(0)


if __name__ == "__main__":
    raise SystemExit(main())
