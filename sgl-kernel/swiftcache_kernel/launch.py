"""Triton kernels with their grid and constants bound, so that a launch costs the host little.

`kernel[grid](...)` looks at every argument at every launch, which takes some 20 us. A kernel that
was compiled for known types needs none of it, which leaves some 3 us and the driver's own time.
Triton's launch hooks are not called; profilers that ask the driver see every launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton

NUM_WARPS = 8

Launch = Callable[..., None]


def bind(
    kernel: Any,
    signature: tuple[torch.dtype | int, ...],
    constants: tuple[Any, ...],
    *,
    programs: int,
    device: torch.device,
    warps: int = NUM_WARPS,
) -> Launch:
    """A function that queues `kernel` on the current stream of `device`.

    It takes the arguments before the constants, as positions; `signature` has for each of them
    the dtype of a tensor's items, or 0 for a number. The kernel must annotate the type of each
    number and specialize on none of the arguments: the types alone decide what is compiled.

    Compiles on the first use of these constants on a device (a second, or the time to read
    Triton's cache). What is returned is for one thread at a time.
    """
    if not isinstance(kernel, triton.JITFunction):  # under Triton's interpreter
        return lambda *arguments: kernel[(programs,)](*arguments, *constants)
    compiled = _compiled(kernel, signature, constants, device.index, warps)
    current_stream = triton.runtime.driver.active.get_current_stream
    on_device = torch.cuda.device(device)
    with on_device:
        run = compiled.run  # loads the kernel on the current device
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(*arguments: object) -> None:
        with on_device:
            stream = current_stream(device.index)
            # The Nones: metadata for launch hooks, and the two hooks.
            run(
                programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants
            )

    return launch


@lru_cache
def _compiled(
    kernel: Any,
    signature: tuple[torch.dtype | int, ...],
    constants: tuple[Any, ...],
    ordinal: int,
    warps: int,
) -> Any:
    with torch.cuda.device(ordinal):
        return kernel.warmup(*signature, *constants, grid=(1,), num_warps=warps)
