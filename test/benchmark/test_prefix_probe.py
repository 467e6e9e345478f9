"""The prefix probe: three requests a prefix, others between that fill the pool."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from benchmark.fake_server import FakeServer
from benchmark.serving import serving

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.prefix_probe import ProbeResult, ProbeSettings, phase_times_s, probe_prefixes
from swiftcache_bench.tokens import IdRange

IDS = IdRange(100, 800)
POOL_TOKENS = 300


@contextmanager
def in_a_thread(server: FakeServer) -> Iterator[str]:
    """The URL of ``server``, which answers from a loop of its own while the block runs."""
    loop = asyncio.new_event_loop()
    up: list[str] = []
    ready = threading.Event()
    end = asyncio.Event()

    async def serve() -> None:
        async with serving(server) as url:
            up.append(url)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20), "the fake server did not start"
        yield up[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(20)
        loop.close()


def probe(server: FakeServer, *lengths: int, repeats: int = 2) -> ProbeResult:
    with in_a_thread(server) as url:
        return probe_prefixes(
            url,
            ProbeSettings(lengths, repeats, output_tokens=2),
            IDS,
            pool_tokens=POOL_TOKENS,
            max_prompt_tokens=200,
            request_timeout_s=30.0,
        )


def test_a_prefix_is_sent_three_times_with_the_pool_filled_before_the_third() -> None:
    server = FakeServer()
    result = probe(server, 50, repeats=1)
    assert result.complete
    assert [record.phase for record in result.records] == ["cold", "device", "evicted"]
    prompts = [body["input_ids"] for body in server.bodies]
    assert prompts[0] == prompts[1] == prompts[-1]
    fillers = prompts[2:-1]
    assert len(fillers) == result.fillers
    assert sum(map(len, fillers)) >= POOL_TOKENS
    assert len({tuple(prompt) for prompt in prompts}) == 1 + len(fillers)


def test_each_length_and_repeat_has_a_prefix_of_its_own() -> None:
    server = FakeServer()
    result = probe(server, 40, 80, repeats=3)
    digests = {(r.length, r.repeat): r.request.prompt_digest for r in result.records}
    assert len(set(digests.values())) == len(digests) == 6
    for length in (40, 80):
        for phase in ("cold", "device", "evicted"):
            assert len(phase_times_s(result.records, length, phase)) == 3
    cold = [r.request.cached_tokens for r in result.records if r.phase == "cold"]
    again = [r.request.cached_tokens for r in result.records if r.phase == "device"]
    assert max(cold) < 2
    assert min(again) > 30


def test_a_filler_that_failed_makes_the_probe_incomplete() -> None:
    result = probe(FakeServer(fault=lambda number, body: "abort" if number == 2 else None), 50)
    assert result.failed_fillers == 1
    assert not result.complete


def test_a_timed_request_that_failed_is_kept_and_has_no_time() -> None:
    result = probe(FakeServer(fault=lambda number, body: "abort" if number == 0 else None), 50)
    assert not result.complete
    assert len(phase_times_s(result.records, 50, "cold")) == 1


def test_a_prefix_over_what_the_server_takes_is_refused() -> None:
    server = FakeServer()
    with pytest.raises(BenchmarkError, match="201 tokens"):
        probe(server, 50, 201)
    assert not server.bodies
