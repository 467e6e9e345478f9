"""The kernels compile for a GPU and are launched as compiled, checked where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# In a process of its own: this one may have loaded the kernels for the interpreter. Triton gets a
# driver that compiles for a GPU and, instead of launching, prints what it was told to launch.
LAUNCH = """
import contextlib, json, sys
import torch, triton
from triton.backends.compiler import GPUTarget

architecture, verb, programs, blocks = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])

class Launcher:
    def __init__(self, source, metadata):
        self.types = list(source.signature.values())
        self.shared_bytes = metadata.shared

    def __call__(self, x, y, z, stream, function, metadata, *rest):
        arguments = [str(argument) for argument in rest[3:]]
        told = dict(grid=[x, y, z], stream=stream, function=function, hooks=rest[:3])
        told |= dict(types=self.types, arguments=arguments, shared_bytes=self.shared_bytes)
        print(json.dumps(told))

class Utils:
    def get_device_properties(self, ordinal):
        return {"max_shared_mem": 232448}

    def load_binary(self, name, binary, shared_bytes, ordinal):
        return "module", 1234, 32, 0, 1024

class Driver:
    utils, launcher_cls = Utils(), Launcher

    def get_current_device(self):
        return 0

    def get_current_stream(self, ordinal):
        return 77

    def get_current_target(self):
        return GPUTarget("cuda", architecture, 32)

triton.runtime.driver.set_active(Driver())
torch.cuda.device = contextlib.nullcontext
from types import SimpleNamespace
from swiftcache_kernel import BlockLayout, triton_block_copy, triton_checksum, triton_kernels

layout, gpu = BlockLayout(36, 16, 2048, 2048), torch.device("cuda:0")
pool = SimpleNamespace(layout=layout, alignment_bytes=16, device=gpu)
if verb in ("gather", "scatter"):
    bound = triton_kernels.bind_layer(layout, 16, blocks, programs, gpu, gather=verb == "gather")
    bound("TABLE", "PAGES", blocks, 1 << 40, 1 << 41, 0)
    bound("TABLE", "PAGES", blocks, 1 << 10, 1 << 42, 35)
elif verb.startswith("counted"):
    grid = {
        "counted": triton_kernels.Grid(programs),
        "counted-alone": triton_kernels.Grid(programs, tile_words=4096, stages=5),
        "counted-short": triton_kernels.Grid(programs, tile_words=512, stages=1, warps=1),
        "counted-parts": triton_kernels.Grid(programs, launches=8),
    }[verb]
    bound = triton_kernels.bind_counted_layer(layout, 16, blocks, grid, gpu, gather=True)
    for launch in range(grid.launches):
        bound("TABLE", "PAGES", "COUNT", 1 << 40, 1 << 41, 7, launch)
elif verb == "compile-kernels":
    from swiftcache_kernel.kernel_transfer import compile_kernels

    compile_kernels(pool)
    triton_checksum.compile_checksums(pool)
    triton.JITFunction.warmup = None  # from here on, whatever is not compiled fails
    for grid in (1, 8, 16, 17, 32, 64):
        for gather in (True, False):
            triton_kernels.bind_layer(layout, 16, blocks, grid, gpu, gather=gather)
            triton_kernels.bind_layers(layout, 16, blocks, 4, grid, gpu, gather=gather)
        triton_checksum.bind_blocks(layout, blocks, grid, gpu)
        triton_checksum.bind_pages(pool, blocks, grid)
elif verb == "scatter-all":
    bound = triton_kernels.bind_layers(layout, 16, blocks, 36, programs, gpu, gather=False)
    bound("TABLE", "PAGES", blocks, "ADDRESSES", 0, 36)
elif verb == "block-checksums":
    triton_checksum.bind_blocks(layout, blocks, programs, gpu)("TABLE", "SUMS", blocks)
elif verb == "page-checksums":
    bound = triton_checksum.bind_pages(pool, blocks, programs)
    bound("PAGES", "SUMS", blocks, "ADDRESSES", 36)
else:
    # Not through `copy_blocks`, which looks at tensors.
    numbers = torch.arange(blocks)
    launch = triton_block_copy.bind
    triton_block_copy.bind = lambda *a, **k: launch(*a, **{**k, "device": gpu})
    triton_block_copy.copy_blocks(
        numbers, numbers, block_bytes=layout.block_bytes, programs=programs
    )
"""


class Launched(NamedTuple):
    calls: list[dict[str, Any]]
    ptx: str


def launched(cache: Path, architecture: int, verb: str, programs: int, blocks: int) -> Launched:
    calls = run(cache, architecture, verb, programs, blocks)
    [ptx] = cache.rglob("*.ptx")  # one: neither the layer nor an address is compiled in
    return Launched(calls, ptx.read_text())


def run(
    cache: Path, architecture: int, verb: str, programs: int, blocks: int
) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = [str(number) for number in (architecture, verb, programs, blocks)]
    process = subprocess.run(
        [sys.executable, "-c", LAUNCH, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


# Pages of Qwen3-8B. A thread of 256 makes `wide` accesses of 16 bytes to a tile; but for one, the
# tiles under way are read ahead.
@pytest.mark.parametrize(
    ("verb", "programs", "architecture", "wide", "ahead"),
    [
        ("gather", 32, 80, 4, 2),
        ("gather", 16, 90, 8, 3),
        ("scatter", 32, 90, 4, 2),
        ("scatter-all", 16, 90, 8, 3),
        ("counted", 32, 90, 4, 2),
        ("copy-blocks", 32, 90, 4, 2),
    ],
)
def test_accesses_are_16_bytes_wide_and_reads_run_ahead(
    verb: str, programs: int, architecture: int, wide: int, ahead: int, tmp_path: Path
) -> None:
    calls, ptx = launched(tmp_path, architecture, verb, programs, blocks=100)
    reads = re.findall(r"cp\.async\.cg\.shared\.global .*, (?:0x10|16)\b", ptx)
    writes = re.findall(r"\bst\.global\.(?:v2\.b64|v4\.b32)", ptx)
    before_loop, in_loop = ahead * wide, wide
    assert len(reads) == before_loop + in_loop
    assert len(writes) == wide
    assert calls[0]["grid"] == [programs, 1, 1]
    # Less than half of a Hopper SM's, so that other kernels find room there.
    assert calls[0]["shared_bytes"] < 100 * 1024


def test_a_launch_passes_what_the_kernel_takes(tmp_path: Path) -> None:
    first, second = launched(tmp_path, 90, "gather", 64, blocks=9).calls
    assert first["types"][:6] == ["*i64", "*i64", "i32", "i64", "i64", "i32"]
    assert set(first["types"][6:]) == {"constexpr"}
    assert len(first["types"]) == len(first["arguments"])
    assert first["arguments"][:6] == ["TABLE", "PAGES", "9", str(1 << 40), str(1 << 41), "0"]
    assert second["arguments"][:6] == ["TABLE", "PAGES", "9", str(1 << 10), str(1 << 42), "35"]
    assert first["arguments"][6:] == second["arguments"][6:]
    # A row of tiles is one block: two of K and two of V.
    assert first["grid"] == second["grid"] == [9 * 4, 1, 1]
    assert (first["stream"], first["function"], first["hooks"]) == (77, 1234, [None] * 3)


def test_a_counted_launch_binds_no_number_of_blocks(tmp_path: Path) -> None:
    [call] = launched(tmp_path, 90, "counted", 32, blocks=100).calls
    assert call["types"][:7] == ["*i64", "*i64", "*i64", "i64", "i64", "i32", "i32"]
    assert call["arguments"][:3] == ["TABLE", "PAGES", "COUNT"]
    assert call["grid"] == [32, 1, 1]


def test_launches_that_share_a_layer_are_one_kernel(tmp_path: Path) -> None:
    calls = launched(tmp_path, 90, "counted-parts", 32, blocks=100).calls
    assert [call["arguments"][5:7] for call in calls] == [["7", str(n)] for n in range(8)]
    assert {tuple(call["grid"]) for call in calls} == {(32, 1, 1)}


def test_programs_that_end_soon_hold_no_shared_memory(tmp_path: Path) -> None:
    [call], ptx = launched(tmp_path, 90, "counted-short", 1_000_000, blocks=9)
    assert call["shared_bytes"] == 0
    # A tile is eight 16-byte accesses of each of 32 threads; there are eight of K and eight of V.
    assert call["grid"] == [9 * 16, 1, 1]
    assert len(re.findall(r"\bld\.global\.v2\.b64", ptx)) == 8
    assert len(re.findall(r"\bst\.global\.v2\.b64", ptx)) == 8


def test_programs_that_share_no_sm_take_more_than_half_its_memory(tmp_path: Path) -> None:
    [call] = launched(tmp_path, 90, "counted-alone", 32, blocks=100).calls
    assert 228 * 1024 // 2 < call["shared_bytes"] <= 227 * 1024


def test_all_layers_are_one_launch(tmp_path: Path) -> None:
    [call] = launched(tmp_path, 90, "scatter-all", 64, blocks=1).calls
    assert call["types"][:6] == ["*i64", "*i64", "i32", "*i64", "i32", "i32"]
    assert call["arguments"][:6] == ["TABLE", "PAGES", "1", "ADDRESSES", "0", "36"]
    assert call["grid"] == [64, 1, 1]


def test_what_is_compiled_ahead_is_all_that_transfers_launch(tmp_path: Path) -> None:
    assert run(tmp_path, 90, "compile-kernels", 1, blocks=100) == []
    assert len(list(tmp_path.rglob("*.ptx"))) == 10


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("verb", "types"),
    [
        ("block-checksums", ["*i64", "*i64", "i32"]),
        ("page-checksums", ["*i64", "*i64", "i32", "*i64", "i32"]),
    ],
)
def test_checksums_read_ahead_and_add_up_once_a_tile(
    verb: str, types: list[str], architecture: int, tmp_path: Path
) -> None:
    [call], ptx = launched(tmp_path, architecture, verb, 32, blocks=100)
    assert call["types"] == types + ["constexpr"] * (len(call["types"]) - len(types))
    assert call["grid"] == [32, 1, 1]
    # Four accesses of 16 bytes in each thread to a tile: two tiles before the loop, one in it.
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*, (?:0x10|16)\b", ptx)) == 3 * 4
    [addition] = re.findall(r"\batom\.global\S*|\bred\.global\S*", ptx)
    assert addition.endswith(".add.u64")
