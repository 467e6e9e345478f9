"""How a scheduler and its tier stand, as plain data, and which invariant does not hold.

For a server that makes no progress: what is queued, what is pinned and by whom, what transfers are
under way, what donors hold. Read on the scheduler thread between two steps, or on another while
the scheduler thread is stuck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from sglang.srt.swiftcache.vacate import descendants

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

LISTED = 32
"""Requests, nodes and transfers that are listed one by one; the rest is a number."""


class Violation(NamedTuple):
    """An invariant that does not hold, and what shows it."""

    invariant: str
    found: str


class StateDump:
    """Looks at one scheduler (SGLang's ``Scheduler``) with a `DonorRadixCache`; changes nothing."""

    def __init__(self, scheduler: Any, cache: DonorRadixCache) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._nodes = list(descendants(cache.root_node))
        self._holders = self._running()

    def as_dict(self) -> dict[str, Any]:
        """Queues, pins, leases and streams; what JSON has."""
        return {
            "queues": self._queues(),
            "device_slots": self._device_slots(),
            "pins": self._pins(),
            "leases": self._leases(),
            "streams": self._streams(),
        }

    def violations(self) -> list[Violation]:
        """Every invariant that does not hold; costs in proportion to nodes and blocks."""
        checks = (
            self._slots_add_up,
            self._locks_have_holders,
            self._locked_nodes_are_on_the_device,
            self._blocks_add_up,
            self._blocks_have_one_node,
            self._completed_transfers_are_acknowledged,
        )
        return [violation for check in checks for violation in check()]

    # -- what is there ------------------------------------------------------------------------

    def _running(self) -> dict[str, Any]:
        """Requests that hold device slots and a lock on their prefix, by id."""
        scheduler = self._scheduler
        # the third is the one in hand, where the scheduler is stuck in a forward
        batches = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug]
        batches += [batch for batch, _ in getattr(scheduler, "result_queue", ())]
        requests = [request for batch in batches if batch is not None for request in batch.reqs]
        if scheduler.chunked_req is not None:
            requests.append(scheduler.chunked_req)
        return {r.rid: r for r in requests if r.req_pool_idx is not None}

    def _queues(self) -> dict[str, Any]:
        waiting = self._scheduler.waiting_queue
        chunked = self._scheduler.chunked_req
        return {
            "forwards": self._scheduler.forward_ct,
            "waiting": len(waiting),
            "running": len(self._holders),
            "prefilling_in_chunks": None if chunked is None else chunked.rid,
            "first_waiting": [_request(request) for request in waiting[:LISTED]],
            "first_running": [_request(r) for r in list(self._holders.values())[:LISTED]],
        }

    def _device_slots(self) -> dict[str, int]:
        cache = self._cache
        allocator = cache.token_to_kv_pool_allocator
        page = cache.page_size
        uncached = 0
        for request in self._holders.values():
            if request.kv is not None:
                whole_pages = -(-request.kv.kv_allocated_len // page) * page
                uncached += whole_pages - request.cache_protected_len
        return {
            "total": self._scheduler.max_total_num_tokens,
            "free": allocator.available_size(),
            "evictable": cache.evictable_size(),
            "protected": cache.protected_size(),
            "of_requests": uncached,
            "lent": allocator.held_tokens if isinstance(allocator, ElasticAllocator) else 0,
        }

    def _pins(self) -> dict[str, Any]:
        expected = self._expected_locks()
        pinned = [n for n in self._nodes if n.lock_ref or n.host_ref_counter]
        return {
            "nodes": len(self._nodes),
            "pinned_nodes": len(pinned),
            "first_pinned": [
                {
                    "node": node.id,
                    "tokens": len(node.key),
                    "locks": node.lock_ref,
                    "locks_explained": expected[node],
                    "host_references": node.host_ref_counter,
                    "on_device": node.value is not None,
                    "on_donors": node.host_value is not None,
                }
                for node in pinned[:LISTED]
            ],
        }

    def _leases(self) -> dict[str, Any]:
        status = self._cache.tier_pool.tier.status()
        kept = ("name", "pid", "device", "link", "state", "extents", "extent_bytes", "blocks")
        return {
            "donors": [{key: donor[key] for key in kept} for donor in status["donors"]],
            "blocks": status["blocks"],
            "orphaned_extents": status["orphaned_extents"],
            "reclaims": status["reclaims"],
        }

    def _streams(self) -> dict[str, Any]:
        cache, controller = self._cache, self._cache.cache_controller
        return {
            "stores_under_way": [
                {"node": node.id, "tokens": tokens}
                for node, tokens, _ in list(cache.ongoing_write_through.values())[:LISTED]
            ],
            "loads_under_way": [
                {"node": node.id, "tokens": len(node.key)}
                for node in list(cache.ongoing_load_back.values())[:LISTED]
            ],
            "stores_queued": cache.stores.waiting,
            "loads_queued": len(controller.load_queue),
            "stores_completed": [a.finish_event.query() for a in controller.ack_write_queue],
            "loads_completed": [a.finish_event.query() for a in controller.ack_load_queue],
        }

    # -- what must hold -----------------------------------------------------------------------

    def _expected_locks(self) -> Counter[TreeNode]:
        """Locks that somebody can be named for, by node."""
        cache = self._cache
        locked = [r.last_node for r in self._holders.values() if r.last_node is not None]
        locked += [node for node, _, _ in cache.ongoing_write_through.values()]
        locked += cache.ongoing_load_back.values()
        locks: Counter[TreeNode] = Counter()
        for node in locked:
            while node is not None and node is not cache.root_node:
                locks[node] += 1
                node = node.parent
        return locks

    def _slots_add_up(self) -> Iterator[Violation]:
        slots = self._device_slots()
        parts = {name: count for name, count in slots.items() if name != "total"}
        if sum(parts.values()) != slots["total"]:
            yield Violation(
                "device slots = free + evictable + protected + of requests + lent",
                f"{slots['total']} slots, but {parts}",
            )

    def _locks_have_holders(self) -> Iterator[Violation]:
        expected = self._expected_locks()
        wrong = [node for node in self._nodes if node.lock_ref != expected[node]]
        if wrong:
            tokens = sum(len(node.key) for node in wrong)
            node = wrong[0]
            yield Violation(
                "every lock has a holder: a request, a store or a load",
                f"{len(wrong)} nodes of {tokens} tokens differ; node {node.id} has "
                f"{node.lock_ref} locks, and {expected[node]} holders",
            )

    def _locked_nodes_are_on_the_device(self) -> Iterator[Violation]:
        wrong = [node.id for node in self._nodes if node.lock_ref and node.value is None]
        if wrong:
            yield Violation("a locked node is on the device", f"nodes {wrong[:LISTED]} are not")

    def _blocks_add_up(self) -> Iterator[Violation]:
        try:
            self._cache.tier_pool.tier.check()
        except AssertionError as error:
            yield Violation("blocks = free + used + retiring", str(error))

    def _blocks_have_one_node(self) -> Iterator[Violation]:
        pool = self._cache.tier_pool
        parts = [pool.blocks_of(n.host_value) for n in self._nodes if n.host_value is not None]
        blocks = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        twice = len(blocks) - len(np.unique(blocks))
        others = np.setdiff1d(self._cache.blocks_of_no_node(), blocks)
        used = pool.tier.used_blocks
        if twice or used != len(blocks) + len(others) + pool.blocks_held_back:
            yield Violation(
                "every block in use belongs to one node, is a copy, or the home of a window page",
                f"{used} blocks are in use, nodes have {len(blocks)}, {twice} of them twice, "
                f"{len(others)} are copies or homes, {pool.blocks_held_back} held back",
            )

    def _completed_transfers_are_acknowledged(self) -> Iterator[Violation]:
        # seen on the scheduler thread right after it has acknowledged what was completed
        controller = self._cache.cache_controller
        under_way = len(self._cache.ongoing_write_through) + len(self._cache.ongoing_load_back)
        queued = len(controller.ack_write_queue) + len(controller.ack_load_queue)
        queued += self._cache.stores.waiting + len(controller.load_queue)
        if under_way and not queued:
            yield Violation(
                "every transfer under way has an event that will complete it",
                f"{under_way} are under way, and nothing is queued",
            )


def _request(request: Any) -> dict[str, Any]:
    return {
        "id": request.rid,
        "prompt_tokens": len(request.origin_input_ids),
        "output_tokens": len(request.output_ids),
    }


def summary(violations: Iterable[Violation]) -> str:
    """For a log line."""
    return "; ".join(f"{v.invariant} ({v.found})" for v in violations) or "none"
