"""Entry point of the group ``sglang.srt.plugins``: hooks and the radix-cache backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang.srt.swiftcache import BACKEND_NAME
from sglang.srt.swiftcache.hooks import HOOKS

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

    Raises:
        SwiftCacheError: the model's KV pool is of a kind the tier does not cover, or a donor named
            by a SPEC did not grant its memory in time.
    """
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

    cache = DonorRadixCache(params=context.params, server_args=context.server_args)
    # the built-in chain does this for HiCache only: attention waits, layer by layer, for the loads
    context.tp_worker.register_hicache_layer_transfer_counter(
        cache.cache_controller.layer_done_counter
    )
    return cache
