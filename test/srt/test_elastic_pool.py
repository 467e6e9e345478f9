"""The memory of a pool whose extents can be lent."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor import forward_context
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang.srt.swiftcache import donation_wiring
from support.elastic_tree import ElasticTree

EXTENT_BYTES = 4096
EXTENTS = 8


@pytest.mark.parametrize(
    ("slots", "kernels"),
    [([], 0), ([0], 1), ([7], 1), ([5, 4, 6], 1), ([7, 2, 5, 1], 3), (range(EXTENTS), 1)],
)
def test_extents_are_zeroed_with_one_kernel_for_neighbours(
    slots: list[int], kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", str(EXTENT_BYTES))
    tree = ElasticTree(EXTENTS * 8 - 1)
    tree.pool.raw_pages.fill_(7)
    with torch.profiler.profile() as profile:
        tree.pool.zero_extents(slots)
    assert sum(event.name == "aten::zero_" for event in profile.events()) == kernels
    zeroed = (tree.pool.raw_pages.view(EXTENTS, EXTENT_BYTES) == 0).all(dim=1)
    assert zeroed.nonzero().flatten().tolist() == sorted(slots)
    assert tree.pool.raw_pages.count_nonzero() == (EXTENTS - len(slots)) * EXTENT_BYTES
    tree.close()


@pytest.fixture
def backend() -> Iterator[SimpleNamespace]:
    """Of the forward that is running."""
    backend = SimpleNamespace()
    context: Any = SimpleNamespace(attn_backend=backend)
    before = forward_context.set_forward_context(context)
    yield backend
    forward_context.set_forward_context(before)


def test_no_kernel_that_knows_rows_alone_stores_into_pages(
    backend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", str(EXTENT_BYTES))
    tree = ElasticTree(EXTENTS * 8 - 1)
    backend.token_to_kv_pool = tree.pool
    assert not donation_wiring.store_by_pages(lambda batch: True, "batch")
    tree.close()


class Pool:
    """Of a server that does not lend."""


@pytest.mark.parametrize("fuses", [True, False])
def test_other_pools_are_stored_into_as_sglang_says(backend: SimpleNamespace, fuses: bool) -> None:
    """Also in models that SGLang compiles, which trace the hook."""
    backend.token_to_kv_pool = Pool()
    hooked = _wrap_fn(lambda batch: fuses, donation_wiring.store_by_pages, HookType.AROUND)
    compiled = torch.compile(
        lambda x: x + 1 if hooked("batch") else x, fullgraph=True, backend="eager"
    )
    assert compiled(torch.zeros(2)).tolist() == [float(fuses)] * 2
