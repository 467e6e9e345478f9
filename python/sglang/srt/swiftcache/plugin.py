"""Entry point of the group ``sglang.srt.plugins``: hooks and the radix-cache backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang.srt.swiftcache import BACKEND_NAME
from sglang.srt.swiftcache.hooks import HOOKS
from sglang.srt.swiftcache.one_line_exit import one_line_exit
from swiftcache_tier.log_format import json_wanted, log_as_json

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache


def register() -> None:
    """Called once per server process by SGLang's plugin framework, which then applies the hooks."""
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.wrapper, hook.kind)
    register_radix_cache_backend(BACKEND_NAME, build_radix_cache)


def build_radix_cache(context: TreeCacheBuildContext) -> DonorRadixCache:
    """Build the cache in the scheduler process. Waits for the donors, up to ``join_timeout_s``.

    Ends the process, after one line on stderr, where the model's KV pool is of a kind the tier does
    not cover, or a donor that was there when the flags were checked did not grant its memory.
    """
    from sglang.srt.swiftcache.layer_stream.allocator import StreamAllocator

    allocator = context.params.token_to_kv_pool_allocator
    # where `auto` finds no window worth having, the pool and its allocator are SGLang's own
    if isinstance(allocator, StreamAllocator):
        from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache as CacheClass
    else:
        from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache as CacheClass

    if json_wanted():
        log_as_json("sglang.srt.swiftcache", "swiftcache_tier")
    with one_line_exit():
        cache = CacheClass(params=context.params, server_args=context.server_args)
    # the built-in chain does this for HiCache only: attention waits, layer by layer, for the loads
    context.tp_worker.register_hicache_layer_transfer_counter(
        cache.cache_controller.layer_done_counter
    )
    return cache
