"""The memory of an engine's pool: used as one range, shared extent by extent."""

from __future__ import annotations

import os

import pytest

from support.raw_memory import (
    PAGE,
    no_descriptor_leaks,
    open_descriptors,
    peek,
    poke,
    run_child,
)
from swiftcache_tier.extents import HostAddressRange
from swiftcache_tier.extents.pool_memory import PoolMemory, granularity_bytes


def test_it_reads_as_zeros_and_is_one_range() -> None:
    with no_descriptor_leaks():
        memory = PoolMemory("cpu", 2 * PAGE, 3)
        assert peek(memory.base, memory.size_bytes) == bytes(6 * PAGE)
        poke(memory.base + 2 * PAGE - 2, b"edge")
        assert peek(memory.base + 2 * PAGE - 2, 4) == b"edge"
        memory.close()
        memory.close()


def test_a_receiver_sees_the_extent_that_it_was_handed_and_no_other() -> None:
    memory = PoolMemory("cpu", PAGE, 3)
    poke(memory.base, b"first")
    poke(memory.base + PAGE, b"second")
    window = HostAddressRange(PAGE)
    descriptor = memory.share(1)
    window.map(0, descriptor, PAGE)
    os.close(descriptor)
    assert peek(window.base, 6) == b"second"
    poke(window.base, b"theirs")
    assert peek(memory.base + PAGE, 6) == b"theirs"
    assert peek(memory.base, 5) == b"first"
    memory.close()
    assert peek(window.base, 6) == b"theirs", "it outlives the engine"
    window.close()


def test_what_was_shared_stays_shared_until_the_end() -> None:
    with no_descriptor_leaks():
        memory = PoolMemory("cpu", PAGE, 2)
        before = len(open_descriptors())
        for _ in range(3):
            descriptor = memory.share(1)
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
            assert len(open_descriptors()) == before + 1
        os.close(memory.share(0))
        assert len(open_descriptors()) == before - 2 + memory.open_files
        memory.close()


def test_running_out_of_descriptors_is_an_error_that_passes() -> None:
    status, output = run_child(
        "import os, resource\n"
        "from swiftcache_tier.extents.pool_memory import PoolMemory\n"
        f"memory = PoolMemory('cpu', {PAGE}, 2)\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "free = os.dup(0)\n"
        "os.close(free)\n"
        "for files in (free, free + 1):  # none for the one that is kept, none for the other\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))\n"
        "    try: memory.share(1)\n"
        "    except OSError as error: print(error.strerror)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "os.close(memory.share(1))\n"
        "memory.close()\n"
    )
    assert (status, output) == (0, "Too many open files\n" * 2)


def test_sizes_are_multiples_of_the_granularity() -> None:
    assert granularity_bytes("cpu") == PAGE
    with pytest.raises(ValueError, match="multiple"):
        PoolMemory("cpu", PAGE + 1, 2)
