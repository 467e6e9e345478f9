"""The same tokens and log-probabilities from a GPU's own KV and from what a peer GPU gave back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch

from support.donors import Donor
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
POOL_TOKENS = 16384
PROMPT_TOKENS = 9000
NEW_TOKENS = 24
VARIANTS = {
    "graphs, overlap": (),
    "no graphs": ("--disable-cuda-graph",),
    "prefill graphs": ("--cuda-graph-backend-prefill=breakable",),
    "no overlap": ("--disable-overlap-schedule",),
    "copy engine": ("--swiftcache-io-backend", "copy"),
    "kernel, pages of 64": ("--swiftcache-io-backend", "kernel", "--page-size", "64"),
}


class Answer(NamedTuple):
    """What a prompt got, and where its prefix came from."""

    output_ids: list[int]
    logprobs: list[float]
    device_tokens: int
    donor_tokens: int


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One for each variant, all on cuda:0; a donor on the last GPU lends to all of them."""
    scratch = tmp_path_factory.mktemp("gpu")
    model = build_tiny_model(scratch / "model", SHAPE)
    # Each its own donors, so that none takes what another needs.
    last = torch.cuda.device_count() - 1
    with ExitStack() as ending:
        found: dict[str, Server] = {}
        for number, (name, flags) in enumerate(VARIANTS.items()):
            folder = scratch / str(number)
            folder.mkdir()
            donor = Donor(
                folder / "rt", "peer", device=f"cuda:{last}", size="4GiB", extent_size="32MiB"
            )
            ending.enter_context(donor)
            found[name] = Server(
                model,
                *("--dtype", "bfloat16", "--page-size", "16", "--random-seed", "1"),
                *("--max-total-tokens", str(POOL_TOKENS), "--mem-fraction-static", "0.5"),
                *("--swiftcache-donors", "--swiftcache-runtime-dir", str(folder / "rt"), *flags),
                tmp_path=folder,
                deadline_s=300.0,
                base_flags=GPU_FLAGS,
            )
            ending.callback(found[name].stop)
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.start, found.values()))
        yield found


def ask(server: Server, prompt: list[int], new_tokens: int = NEW_TOKENS) -> Answer:
    (answer,) = server.generate(prompt, new_tokens, return_logprob=True)
    meta: dict[str, Any] = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        answer["output_ids"],
        [entry[0] for entry in meta["output_token_logprobs"]],
        details.get("device", 0),
        details.get("host", 0),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_donor_gives_back_is_what_was_computed(
    servers: dict[str, Server], variant: str
) -> None:
    server, rng = servers[variant], random.Random(7)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(10, 500) for _ in range(tokens)]

    wanted = prompt(PROMPT_TOKENS)
    cold = ask(server, wanted)
    assert (cold.device_tokens, cold.donor_tokens) == (0, 0)
    on_device = ask(server, wanted)
    assert on_device.device_tokens > PROMPT_TOKENS - 200
    for _ in range(3):
        for _ in range(2):
            ask(server, prompt(PROMPT_TOKENS), 1)
        restored = ask(server, wanted)
        assert restored.donor_tokens > PROMPT_TOKENS - 200
        assert restored.output_ids == on_device.output_ids == cold.output_ids
        assert restored.logprobs == on_device.logprobs == cold.logprobs


def test_all_variants_give_the_same_tokens(servers: dict[str, Server]) -> None:
    prompt = [random.Random(3).randrange(10, 500) for _ in range(3000)]
    answers = {name: ask(server, prompt).output_ids for name, server in servers.items()}
    assert len({tuple(ids) for ids in answers.values()}) == 1, answers
