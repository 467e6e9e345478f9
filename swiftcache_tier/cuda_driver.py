"""The CUDA driver: its calls with errors as OSError, its devices, a context to work in.

Imported only where a GPU is wanted: loading the bindings costs a fifth of a second.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from swiftcache_tier.errors import SwiftCacheError

_ERRNO_OF = {
    cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY: errno.ENOMEM,
    cu.CUresult.CUDA_ERROR_INVALID_VALUE: errno.EINVAL,
    cu.CUresult.CUDA_ERROR_INVALID_DEVICE: errno.ENODEV,
    cu.CUresult.CUDA_ERROR_NO_DEVICE: errno.ENODEV,
    cu.CUresult.CUDA_ERROR_NOT_PERMITTED: errno.EPERM,
    cu.CUresult.CUDA_ERROR_NOT_SUPPORTED: errno.EOPNOTSUPP,
}


class CudaError(OSError):
    """A driver call that failed: `errno` by its kind (EIO for any other), the call and result."""

    def __init__(self, call_name: str, result: Any) -> None:
        super().__init__(_ERRNO_OF.get(result, errno.EIO), f"{call_name}: {result.name}")


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the driver; returns the value that comes with success, if any. Raises CudaError."""
    result, *values = function(*arguments)
    if result != cu.CUresult.CUDA_SUCCESS:
        raise CudaError(function.__name__, result)
    return values[0] if values else None


def device_count() -> int:
    """CUDA devices that this process sees (`CUDA_VISIBLE_DEVICES` counts); 0 without a driver."""
    try:
        call(cu.cuInit, 0)
        return int(call(cu.cuDeviceGetCount))
    except (CudaError, RuntimeError):  # RuntimeError: the driver's library is not there
        return 0


def device(ordinal: int) -> Any:
    """The driver's device "cuda:`ordinal`". Raises SwiftCacheError when there is none such."""
    try:
        call(cu.cuInit, 0)
        count = int(call(cu.cuDeviceGetCount))
    except RuntimeError:
        problem = "the NVIDIA driver is not installed here; install it or use host memory"
    except CudaError as error:
        problem = f"the NVIDIA driver does not start ({error.strerror}); use host memory"
    else:
        if 0 <= ordinal < count:
            return call(cu.cuDeviceGet, ordinal)
        seen = "no CUDA device" if count == 0 else f"cuda:0 to cuda:{count - 1}"
        problem = (
            f"this process sees {seen}; choose another, change CUDA_VISIBLE_DEVICES or use "
            f"host memory"
        )
    raise SwiftCacheError(f"device 'cuda:{ordinal}' cannot be used: {problem}")


def device_uuid(ordinal: int) -> str:
    """The GPU behind an ordinal, the same in every process: "GPU-" and a UUID, as NVML has it."""
    raw = call(cu.cuDeviceGetUuid, device(ordinal)).bytes
    return f"GPU-{UUID(bytes=bytes(raw))}"


def ordinal_of(uuid: str) -> int | None:
    """The ordinal that a GPU has in this process; None when the process does not see it."""
    ordinals = range(device_count())
    return next((ordinal for ordinal in ordinals if device_uuid(ordinal) == uuid), None)


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Whether one GPU can read and write the memory of another, both by ordinal."""
    return ordinal == peer or bool(call(cu.cuDeviceCanAccessPeer, device(ordinal), device(peer)))


class PrimaryContext:
    """The context that a process has on a device, shared with PyTorch, kept alive until `close`.

    It costs some hundred MiB of the device's memory while anybody in the process holds it.
    """

    def __init__(self, ordinal: int) -> None:
        """Raises SwiftCacheError if there is no such device, CudaError (ENOMEM) if it is full."""
        self._device = device(ordinal)
        self._context = call(cu.cuDevicePrimaryCtxRetain, self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the calling thread's context for a while.

        Meanwhile the thread may allocate and map even though another thread captures a CUDA graph:
        in CUDA's default mode that would fail here and spoil the capture there. Nothing that is
        done here may belong to a capture.
        """
        call(cu.cuCtxPushCurrent, self._context)
        try:
            relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            mode = call(cu.cuThreadExchangeStreamCaptureMode, relaxed)
            try:
                yield
            finally:
                call(cu.cuThreadExchangeStreamCaptureMode, mode)
        finally:
            call(cu.cuCtxPopCurrent)

    def close(self) -> None:
        """Let go of it; the last in the process to do so destroys it. May be repeated."""
        if self._context is not None:
            self._context = None
            call(cu.cuDevicePrimaryCtxRelease, self._device)
