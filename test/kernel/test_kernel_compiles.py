"""The kernels compile for a GPU, checked where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: this one may have loaded the kernels for the interpreter.
COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from swiftcache_kernel import triton_kernels

kernel = triton_kernels.move_layer_kernel
fixed = dict(K_BYTES=32768, V_BYTES=32768, WORD=tl.int64, WORD_BYTES=8, ALIGNMENT=16)
fixed |= dict(ROWS=1, COLUMNS=triton_kernels.TILE_WORDS, STAGES=triton_kernels.STAGES)
fixed |= dict(GATHER=sys.argv[1] == "gather")
types = dict(table="*i64", pages="*i64", blocks="i32", k_address="i64", v_address="i64")
types |= dict(layer_offset="i32") | dict.fromkeys(fixed, "constexpr")
values = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
source = triton.compiler.ASTSource(kernel, types, constexprs=values)
target = GPUTarget("cuda", int(sys.argv[2]), 32)
options = dict(num_warps=triton_kernels.NUM_WARPS)
print(triton.compile(source, target=target, options=options).asm["ptx"])
"""


@pytest.mark.parametrize(("direction", "architecture"), [("gather", 80), ("scatter", 90)])
def test_accesses_are_16_bytes_wide_and_reads_run_ahead(
    direction: str, architecture: int, tmp_path: Path
) -> None:
    """Pages of Qwen3-8B: 256 threads make four accesses to a tile, and two tiles are read ahead."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE, direction, str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert compiled.returncode == 0, compiled.stderr
    reads = re.findall(r"cp\.async\.cg\.shared\.global .*, (?:0x10|16)\b", compiled.stdout)
    writes = re.findall(r"\bst\.global\.(?:v2\.b64|v4\.b32)", compiled.stdout)
    before_loop, in_loop = 2 * 4, 4
    assert len(reads) == before_loop + in_loop
    assert len(writes) == 4
