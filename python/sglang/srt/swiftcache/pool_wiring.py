"""Which KV pool a server gets: SGLang's own, one that can be lent, or one with a layer window.

The flags exclude a server with both. One hook chooses, since SGLang warns of two around one
function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.swiftcache import donate_checks
from sglang.srt.swiftcache.layer_stream import wiring as stream_wiring
from sglang.srt.swiftcache.one_line_exit import one_line_exit


def build_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """KVCacheConfigurator._build_mha_kv_pool."""
    if not donate_checks.is_on(configurator.server_args):
        return stream_wiring.build_pool(original, configurator, **kwargs)
    from sglang.srt.swiftcache.elastic_pool import ElasticKVPool

    with one_line_exit():
        return original(configurator, **{**kwargs, "mha_pool_class": ElasticKVPool})


def build_allocator(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """KVCacheConfigurator._build_token_to_kv_pool_allocator."""
    if not donate_checks.is_on(configurator.server_args):
        return stream_wiring.build_allocator(original, configurator, **kwargs)
    from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator

    return ElasticAllocator(original(configurator, **kwargs), kwargs["token_to_kv_pool"])
