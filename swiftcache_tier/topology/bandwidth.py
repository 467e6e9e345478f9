"""How fast a receiver's GPU reads what is mapped for it."""

from __future__ import annotations

from contextlib import ExitStack

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from swiftcache_tier.cuda_driver import PrimaryContext, call


def measure_bandwidth(ordinal: int, address: int, size_bytes: int, *, copies: int = 4) -> float:
    """GB/s (1e9 bytes) at which GPU "cuda:N" reads `size_bytes` mapped at `address`.

    The copy engine reads them `copies` times into a scratch buffer on the GPU, after one round to
    warm up: a few ms for 32 MiB over PCIe, under one over NVLink. Whatever else uses the link
    meanwhile slows it down. Waits for the copies. Raises CudaError, ENOMEM if there is no room
    for the buffer. Any thread may call.
    """
    with ExitStack() as stack:
        context = PrimaryContext(ordinal)
        stack.callback(context.close)
        stack.enter_context(context.current())
        scratch = call(cu.cuMemAlloc, size_bytes)
        stack.callback(call, cu.cuMemFree, scratch)
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(call, cu.cuStreamDestroy, stream)
        start, end = (_event(stack) for _ in range(2))
        for copy in range(copies + 1):
            if copy == 1:
                call(cu.cuEventRecord, start, stream)
            call(cu.cuMemcpyAsync, scratch, address, size_bytes, stream)
        call(cu.cuEventRecord, end, stream)
        call(cu.cuEventSynchronize, end)
        elapsed_ms = float(call(cu.cuEventElapsedTime, start, end))
    return copies * size_bytes / elapsed_ms / 1e6


def _event(stack: ExitStack) -> object:
    event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
    stack.callback(call, cu.cuEventDestroy, event)
    return event
