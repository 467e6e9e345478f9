"""A dump names the invariant that was broken, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang.srt.swiftcache.state_dump import StateDump
from support.kv_tree import Running, Tree

PAGE_SIZE = 4


def request(running: Running, name: str) -> Any:
    """A `Running` as SGLang's request that it stands for."""
    return SimpleNamespace(
        rid=name,
        req_pool_idx=0,
        kv=SimpleNamespace(kv_allocated_len=len(running.tokens)),
        cache_protected_len=running.cached,
        last_node=running.last_node,
        origin_input_ids=running.tokens,
        output_ids=[],
    )


class Server:
    """A tree with two conversations, one of them on donors alone, and a third that runs."""

    def __init__(self, replicas: int) -> None:
        self.tree = Tree(PAGE_SIZE, pages=16, policy="write_through", replicas=replicas)
        for donor in range(1, 3):
            self.tree.tier.join(donor, extents=32)
        for kind in range(2):
            assert self.tree.run([100 + kind] * 16) is not None
        self.tree.cache.check_hicache_events()
        self.tree.cache.evict(EvictParams(num_tokens=16))
        running = self.tree.start([100] * 16 + [103] * 16)
        assert running is not None
        self.running = running
        self.tree.cache.check_hicache_events()
        self.scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=[request(running, "r")]),
            last_batch=None,
            cur_batch_for_debug=None,
            chunked_req=None,
            waiting_queue=[],
            forward_ct=7,
            max_total_num_tokens=self.tree.tokens_total,
        )

    @property
    def dump(self) -> StateDump:
        return StateDump(self.scheduler, self.tree.cache)

    def violated(self) -> list[str]:
        return [violation.invariant for violation in self.dump.violations()]


@pytest.fixture(params=[1, 2])
def server(request: pytest.FixtureRequest) -> Server:
    return Server(request.param)


def test_nothing_is_wrong_with_a_healthy_server(server: Server) -> None:
    assert server.violated() == []
    state = orjson.loads(orjson.dumps(server.dump.as_dict()))
    assert state["queues"]["running"] == 1
    assert state["queues"]["first_running"][0]["id"] == "r"
    assert state["pins"]["pinned_nodes"] > 0
    assert all(n["locks"] == n["locks_explained"] for n in state["pins"]["first_pinned"])
    server.tree.finish(server.running)
    server.scheduler.running_batch.reqs.clear()
    server.tree.cache.check_hicache_events()
    assert server.violated() == []


def test_a_lock_that_nobody_holds(server: Server) -> None:
    server.tree.cache.inc_lock_ref(server.running.last_node)
    assert server.violated() == ["every lock has a holder: a request, a store or a load"]


def test_device_slots_that_are_lost(server: Server) -> None:
    assert server.tree.allocator.alloc(PAGE_SIZE) is not None
    (violated,) = server.violated()
    assert violated.startswith("device slots = free + evictable + protected")


def test_a_block_that_no_node_has(server: Server) -> None:
    assert server.tree.tier.alloc(1) is not None
    (violated,) = server.violated()
    assert violated.startswith("every block in use belongs to one node")


def test_a_miscounted_block(server: Server) -> None:
    donor = next(iter(server.tree.tier.pool._donors.values()))
    donor.used += 1
    assert "blocks = free + used + retiring" in server.violated()


def test_a_store_whose_event_is_gone(server: Server) -> None:
    cache = server.tree.cache
    node = server.tree.nodes()[0]
    cache.ongoing_load_back[node.id] = cache.root_node
    assert server.violated() == ["every transfer under way has an event that will complete it"]
