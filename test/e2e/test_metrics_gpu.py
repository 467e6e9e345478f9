"""`/metrics` of a server on a GPU: bytes on the wires that they went over, and times of loads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from support.donors import Donor
from support.processes import wait_until
from support.server import GPU_FLAGS, Server
from support.tiny_model import TinyShape, build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# The KV of Qwen3-8B: a page of 16 tokens is 64 KiB in each layer.
SHAPE = TinyShape(
    layers=8, hidden=512, heads=32, kv_heads=8, head_dim=128, intermediate=1024, context=32768
)
PROMPT_TOKENS = 6000
DEADLINE_S = 60.0


@pytest.mark.parametrize("device", ["cuda", "host"])
def test_a_load_counts_on_its_wire(device: str, tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    if device == "cuda" and last == 0:
        pytest.skip("needs two GPUs")
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)] for _ in range(3)]
    lender = f"cuda:{last}" if device == "cuda" else "host"
    with (
        Donor(tmp_path / "rt", "peer", device=lender, size="2GiB", extent_size="32MiB"),
        Server(
            build_tiny_model(tmp_path / "model", SHAPE),
            *("--dtype", "bfloat16", "--page-size", "16", "--random-seed", "1"),
            *("--max-total-tokens", "8192", "--mem-fraction-static", "0.5", "--enable-metrics"),
            *("--swiftcache-donors", "--swiftcache-runtime-dir", str(tmp_path / "rt")),
            tmp_path=tmp_path,
            deadline_s=300.0,
            base_flags=GPU_FLAGS,
        ) as server,
    ):
        (donor,) = server.swiftcache()["donors"]
        wire, other = ("nvlink", "pcie") if donor["link"] == "nvlink" else ("pcie", "nvlink")
        for prompt in prompts:
            server.generate(prompt, 4)
        (again,) = server.generate(prompts[0], 4)
        restored = again["meta_info"]["cached_tokens_details"]["host"]
        assert restored > 0
        state = server.swiftcache()
        moved = restored // state["block_tokens"] * state["block_bytes"]
        loaded = f'swiftcache_{wire}_bytes_transferred_total{{direction="load"}}'
        wait_until(
            lambda: (
                server.metrics()[loaded] == moved
                and server.metrics()["swiftcache_load_seconds_count"] == 1
            ),
            DEADLINE_S,
            f"{moved} bytes are counted on {wire}",
        )
        found = server.metrics()
        assert found[f'swiftcache_{other}_bytes_transferred_total{{direction="load"}}'] == 0
        assert found["swiftcache_load_seconds_sum"] > 0, "by the GPU's own clock"
        fastest = found["swiftcache_nvlink_max_bandwidth"]
        assert (fastest > 1e10) == (wire == "nvlink")
        assert found['swiftcache_donor_bandwidth{donor="peer"}'] > 1e9
