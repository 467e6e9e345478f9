"""Copies on a peer GPU and in host memory: the loss of either donor costs no recompute."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from e2e.test_replicas import wait_for_copies
from e2e.test_restored_identity_gpu import NEW_TOKENS, POOL_TOKENS, PROMPT_TOKENS, SHAPE

from support.donors import Donor
from support.server import GPU_FLAGS, Server
from support.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PROMPTS = 3  # together more than the pool holds
EXTENT = "32MiB"


@pytest.mark.parametrize("lost", ["peer", "host"])
def test_a_donor_is_lost_and_every_hit_stays_a_hit(tmp_path: Path, lost: str) -> None:
    model = build_tiny_model(tmp_path / "model", SHAPE)
    runtime_dir = tmp_path / "rt"
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 500) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    last = torch.cuda.device_count() - 1
    with (
        Donor(runtime_dir, "peer", size="2GiB", extent_size=EXTENT, device=f"cuda:{last}") as peer,
        Donor(runtime_dir, "host", size="2GiB", extent_size=EXTENT) as host,
        Server(
            model,
            *("--dtype", "bfloat16", "--page-size", "16", "--random-seed", "1"),
            *("--max-total-tokens", str(POOL_TOKENS), "--mem-fraction-static", "0.5"),
            *("--swiftcache-donors", "--swiftcache-replicas", "2"),
            *("--swiftcache-runtime-dir", str(runtime_dir)),
            tmp_path=tmp_path,
            deadline_s=300.0,
            base_flags=GPU_FLAGS,
        ) as server,
    ):
        wait_for_copies(server, "peer", "host")

        def ask_all() -> tuple[list[list[int]], int]:
            """The answers, and how many prompt tokens were computed for them."""
            answers = [server.generate(prompt, NEW_TOKENS)[0] for prompt in prompts]
            cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
            computed = PROMPTS * PROMPT_TOKENS - cached
            return [answer["output_ids"] for answer in answers], computed

        ask_all()
        expected, computed = ask_all()
        assert computed < PROMPT_TOKENS, "the prompts are not restored"
        tier = server.swiftcache()
        assert tier["replicas"]["short_blocks"] == 0
        assert tier["blocks"]["used"] == 2 * tier["replicas"]["copies"] > 0

        {"peer": peer, "host": host}[lost].kill()
        wait_for_copies(server, "host" if lost == "peer" else "peer")
        assert ask_all() == (expected, computed)
        tier = server.swiftcache()
        assert tier["lost_blocks"] == tier["moved_blocks"] == 0
        assert tier["blocks_saved_by_copies"] > 0

        with Donor(runtime_dir, "next", size="2GiB", extent_size=EXTENT):
            wait_for_copies(server, "host" if lost == "peer" else "peer", "next")
            assert server.swiftcache()["replicas"]["refilled_blocks"] > 0
            assert ask_all() == (expected, computed)
