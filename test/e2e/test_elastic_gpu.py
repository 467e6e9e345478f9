"""A server on a GPU lends its own KV memory to one on another, on each backend that reads pages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from e2e.test_elastic import donation, prompt
from e2e.test_restored_identity_gpu import PROMPT_TOKENS, SHAPE, Answer, ask

from support.processes import wait_until
from support.server import GPU_FLAGS, Server
from support.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(700),
]

POOL_TOKENS = 65536
RECEIVER_TOKENS = 16384
TOKEN_BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2
DEADLINE_S = 60.0
# Where a batch is cut differently a bfloat16 is rounded differently.
TOLERANCE = 0.15


class Servers(NamedTuple):
    """All of one attention backend: one without flags of ours, one that lends, its receiver."""

    stock: Server
    lender: Server
    receiver: Server


# A model with experts rotates and stores K in one kernel, where the pool's rows allow that.
@pytest.fixture(
    scope="module",
    params=[("fa3", SHAPE), ("triton", SHAPE), ("fa3", replace(SHAPE, experts=4))],
    ids=["fa3", "triton", "fa3-experts"],
)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("elastic")
    backend, shape = request.param
    model = build_tiny_model(folder / "model", shape)
    runtime_dir = ("--swiftcache-runtime-dir", str(folder / "rt"))
    last = str(torch.cuda.device_count() - 1)

    def server(*flags: str) -> Server:
        return Server(
            model,
            *("--dtype", "bfloat16", "--page-size", "16", "--random-seed", "1"),
            *("--mem-fraction-static", "0.3", "--attention-backend", backend),
            *flags,
            tmp_path=folder,
            env={"SWIFTCACHE_LEND_QUIET_S": "0.2", "SWIFTCACHE_COLD_AFTER_S": "5"},
            deadline_s=300.0,
            base_flags=GPU_FLAGS,
        )

    pool = ("--max-total-tokens", str(POOL_TOKENS))
    found = Servers(
        stock=server(*pool),
        lender=server(*pool, "--swiftcache-donate", "auto", *runtime_dir),
        receiver=server(
            *("--max-total-tokens", str(RECEIVER_TOKENS), "--base-gpu-id", last),
            *("--swiftcache-donors", "auto", *runtime_dir),
        ),
    )
    with ExitStack() as ending:
        for each in found:
            ending.callback(each.stop)
        with ThreadPoolExecutor() as threads:
            # The receiver last: with no donor at its start it would begin one of host memory.
            list(threads.map(Server.start, found[:2]))
        found.receiver.start()
        yield found


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.output_ids == expected.output_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_both_say_what_they_say_alone_while_memory_is_lent_used_and_taken_back(
    servers: Servers,
) -> None:
    stock, lender, receiver = servers
    room = 3 * PROMPT_TOKENS * TOKEN_BYTES
    wait_until(lambda: donation(lender)["lent_bytes"] > room, DEADLINE_S, "three prompts have room")
    wanted = prompt(PROMPT_TOKENS, 7)
    cold = ask(receiver, wanted)
    assert_same(cold, ask(stock, wanted))
    for seed in (1, 2):
        ask(receiver, prompt(PROMPT_TOKENS, seed), 1)
    restored = ask(receiver, wanted)
    assert restored.donor_tokens > PROMPT_TOKENS - 200
    assert_same(restored, cold)

    # The lender's own requests, while it lends, and then so many that it takes memory back.
    own = prompt(3000, 11)
    assert_same(ask(lender, own), ask(stock, own))
    many = [prompt(PROMPT_TOKENS, seed) for seed in range(20, 25)]
    with ThreadPoolExecutor(len(many)) as threads:
        found = list(threads.map(lambda ids: ask(lender, ids), many))
        expected = list(threads.map(lambda ids: ask(stock, ids), many))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    assert "asked" in lender.log(), "the load was to need what was lent"
    assert "Retract" not in lender.log()
    assert_same(ask(receiver, wanted), cold)
    assert_same(ask(lender, own), ask(stock, own))
