"""A CUDA driver made of Python objects, for what can be tested without a GPU.

It keeps the driver's books: memory that lives while a handle, a mapping or an open descriptor of it
does, addresses, contexts and which of them is current in which thread. Fresh memory is garbage.
Processes that are given the same folder have the same GPUs.
"""

# ruff: noqa: N802 - functions have the driver's names.

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from cuda.bindings import driver as cu  # type: ignore[import-untyped]

GRANULARITY = 2 << 20
GARBAGE = 0xAA

_OK = cu.CUresult.CUDA_SUCCESS


@dataclass
class FakeMemory:
    """One physical allocation."""

    number: int
    ordinal: int
    data: bytearray | mmap.mmap


@dataclass
class FakeMapping:
    size_bytes: int
    memory: FakeMemory
    accessible_from: set[int] = field(default_factory=set)


class FakeDriver:
    """Stands in for `cuda.bindings.driver` once `install` has put its functions there."""

    def __init__(
        self, devices: int = 2, memory_bytes: int = 8 * GRANULARITY, folder: Path | None = None
    ) -> None:
        """`folder`: where memory lies, for all processes that use the same."""
        self.devices = devices
        self.memory_bytes = memory_bytes
        self.peer_access = True
        self.can_share = True
        self.hidden: set[int] = set()
        """Ordinals of GPUs whose memory exists and that this process does not see."""
        self.wrong_size_result = cu.CUresult.CUDA_ERROR_NOT_SUPPORTED
        """What mapping more or less than an allocation gives; drivers differ in it."""
        self.device_pointer_shift = 0
        self.failing: dict[str, Any] = {}
        """Result of calls that are to fail, by name."""
        self.contexts = [0] * devices
        """How often each device's primary context is held."""
        self.context_most = 0
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, FakeMapping] = {}
        self.registered: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.events: dict[int, float] = {}
        self.capture_mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.modes_while_mapping: set[Any] = set()
        self.without_access: set[int] = set()
        """Addresses of mappings that no device is given access to."""
        self.calls: Counter[str] = Counter()
        """How often each function was called."""
        self._folder = folder
        self._numbers = itertools.count(1)
        self._memories: dict[int, FakeMemory] = {}
        self._handles: dict[int, FakeMemory] = {}
        self._streams: set[int] = set()
        self._clock_ms = 0.0
        self._next = 1
        self._next_address = 1 << 44
        self._current = threading.local()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in dir(self):
            if name.startswith("cu"):
                patch.setattr(cu, name, self._guarded(name))

    def _guarded(self, name: str) -> Any:
        function = getattr(self, name)

        def guarded(*arguments: Any) -> Any:
            self.calls[name] += 1
            if name in self.failing:
                return (self.failing[name],)
            return function(*arguments)

        guarded.__name__ = name
        return guarded

    # What tests look at.

    def used_bytes(self, ordinal: int = 0) -> int:
        self._collect()
        return sum(len(m.data) for m in self._memories.values() if m.ordinal == ordinal)

    @property
    def handles(self) -> int:
        return len(self._handles)

    @property
    def streams(self) -> int:
        return len(self._streams)

    def read(self, address: int, count: int, ordinal: int = 0) -> bytes:
        """What a kernel of a device reads; KeyError where it would fault."""
        mapping, start = self._mapping_at(address, count)
        if ordinal not in mapping.accessible_from:
            raise KeyError(f"{address:#x} is out of the reach of cuda:{ordinal}")
        return bytes(mapping.memory.data[start : start + count])

    def write(self, address: int, data: bytes) -> None:
        mapping, start = self._mapping_at(address, len(data))
        mapping.memory.data[start : start + len(data)] = data

    @contextlib.contextmanager
    def fail(self, name: str, result: Any) -> Iterator[None]:
        self.failing[name] = result
        yield
        del self.failing[name]

    # The driver's functions, under its names.

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (_OK,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return _OK, self.devices

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return _OK, ordinal

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        uuid = cu.CUuuid()
        # CUuuid has no setter in some versions of the bindings.
        ctypes.memmove(uuid.getPtr(), UUID(int=device).bytes, 16)
        return _OK, uuid

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        return _OK, int(self.can_share)

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[Any, ...]:
        return _OK, int(self.peer_access)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.contexts[device] += 1
        self.context_most = max(self.context_most, self.contexts[device])
        return _OK, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        if self.contexts[device] == 0:
            return (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.contexts[device] -= 1
        return (_OK,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        if self.contexts[context] == 0:
            return (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._stack().append(context)
        return (_OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return _OK, self._stack().pop()

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self.capture_mode = self.capture_mode, mode
        return _OK, before

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        used = self.used_bytes(self._stack()[-1])
        return _OK, self.memory_bytes - used, self.memory_bytes

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        return _OK, GRANULARITY

    def cuMemCreate(self, size_bytes: int, prop: Any, flags: int) -> tuple[Any, ...]:
        ordinal = int(prop.location.id)
        if size_bytes % GRANULARITY:
            return cu.CUresult.CUDA_ERROR_INVALID_VALUE, None
        if self.used_bytes(ordinal) + size_bytes > self.memory_bytes:
            return cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        # Unique among processes, and tells the GPU.
        number = (os.getpid() << 24 | next(self._numbers)) << 4 | ordinal
        if self._folder is None:
            memory = FakeMemory(number, ordinal, bytearray([GARBAGE]) * size_bytes)
            self._memories[number] = memory
        else:
            (self._folder / str(number)).write_bytes(bytes([GARBAGE]) * size_bytes)
            memory = self._memory(number)
        return _OK, self._handle(memory)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if self._handles.pop(handle, None) is None:
            return (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)
        return (_OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple[Any, ...]:
        # Not close-on-exec: the code under test must not rely on what the driver does.
        descriptor = os.eventfd(0, 0)
        os.eventfd_write(descriptor, self._handles[handle].number)
        return _OK, descriptor

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: Any) -> tuple[Any, ...]:
        try:
            memory = self._memory(_eventfd_value(str(descriptor)) or 0)
        except (KeyError, OSError):
            return cu.CUresult.CUDA_ERROR_INVALID_VALUE, None
        return _OK, self._handle(memory)

    def cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> tuple[Any, ...]:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        ordinal = self._handles[handle].ordinal
        properties.location.id = -2 if ordinal in self.hidden else ordinal
        return _OK, properties

    def cuMemAddressReserve(
        self, size_bytes: int, alignment: int, address: int, flags: int
    ) -> tuple[Any, ...]:
        base = self._next_address
        self._next_address += size_bytes + GRANULARITY
        self.reservations[base] = size_bytes
        return _OK, base

    def cuMemAddressFree(self, address: int, size_bytes: int) -> tuple[Any, ...]:
        mapped = any(address <= at < address + size_bytes for at in self.mappings)
        if self.reservations.get(address) != size_bytes or mapped:
            return (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.reservations[address]
        return (_OK,)

    def cuMemMap(
        self, address: int, size_bytes: int, offset: int, handle: int, flags: int
    ) -> tuple[Any, ...]:
        end = address + size_bytes
        reserved = any(at <= address and end <= at + n for at, n in self.reservations.items())
        taken = any(
            at < end and address < at + mapping.size_bytes for at, mapping in self.mappings.items()
        )
        memory = self._handles[handle]
        if not reserved or taken:
            return (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)
        if size_bytes != len(memory.data):
            return (self.wrong_size_result,)
        self.modes_while_mapping.add(self.capture_mode)
        self.mappings[address] = FakeMapping(size_bytes, memory)
        return (_OK,)

    def cuMemSetAccess(
        self, address: int, size_bytes: int, access: list[Any], count: int
    ) -> tuple[Any, ...]:
        pieces = self._mappings_in(address, size_bytes)
        if not pieces:
            return (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)
        if self.without_access.intersection(pieces):
            return (cu.CUresult.CUDA_ERROR_NOT_PERMITTED,)
        for piece in pieces:
            self.mappings[piece].accessible_from.update(int(a.location.id) for a in access)
        return (_OK,)

    def cuMemUnmap(self, address: int, size_bytes: int) -> tuple[Any, ...]:
        pieces = self._mappings_in(address, size_bytes)
        if not pieces:
            return (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)
        for piece in pieces:
            del self.mappings[piece]
        return (_OK,)

    def cuStreamCreate(self, flags: Any) -> tuple[Any, ...]:
        if not self._stack():
            return cu.CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        stream = self._number()
        self._streams.add(stream)
        return _OK, stream

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return (_OK,) if stream in self._streams else (cu.CUresult.CUDA_ERROR_INVALID_HANDLE,)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self._streams.remove(stream)
        return (_OK,)

    def cuMemsetD32Async(
        self, address: int, value: int, count: int, stream: int
    ) -> tuple[Any, ...]:
        mapping = self.mappings[address]
        if not self._stack() or self._stack()[-1] not in mapping.accessible_from:
            return (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        mapping.memory.data[: 4 * count] = value.to_bytes(4, "little") * count
        return (_OK,)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[Any, ...]:
        if not self._stack():
            return (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        ctypes.string_at(address, size_bytes)  # locks the pages, so they must be there
        self.registered[address] = size_bytes
        return (_OK,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        ctypes.string_at(address, self.registered.pop(address))  # must still be mapped
        return (_OK,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        return _OK, cu.CUdeviceptr(address + self.device_pointer_shift)

    def cuMemAlloc(self, size_bytes: int) -> tuple[Any, ...]:
        address = self._number()
        self.buffers[address] = size_bytes
        return _OK, address

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        del self.buffers[address]
        return (_OK,)

    def cuMemcpyAsync(
        self, target: int, source: int, size_bytes: int, stream: int
    ) -> tuple[Any, ...]:
        # A copy of 1 GB takes a second here.
        assert size_bytes <= self.buffers[target]
        if self.registered.get(source, 0) < size_bytes:
            self._mapping_at(source, size_bytes)
        self._clock_ms += size_bytes / 1e6
        return (_OK,)

    def cuEventCreate(self, flags: Any) -> tuple[Any, ...]:
        event = self._number()
        self.events[event] = 0.0
        return _OK, event

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        self.events[event] = self._clock_ms
        return (_OK,)

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return (_OK,)

    def cuEventElapsedTime(self, start: int, end: int) -> tuple[Any, ...]:
        return _OK, self.events[end] - self.events[start]

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        del self.events[event]
        return (_OK,)

    def _stack(self) -> list[int]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        stack: list[int] = self._current.stack
        return stack

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _handle(self, memory: FakeMemory) -> int:
        handle = self._number()
        self._handles[handle] = memory
        return handle

    def _memory(self, number: int) -> FakeMemory:
        if number not in self._memories and self._folder is not None:
            with (self._folder / str(number)).open("r+b") as file:
                data = mmap.mmap(file.fileno(), 0)
            self._memories[number] = FakeMemory(number, number & 15, data)
        return self._memories[number]

    def _mapping_at(self, address: int, count: int) -> tuple[FakeMapping, int]:
        for at, mapping in self.mappings.items():
            if at <= address and address + count <= at + mapping.size_bytes:
                return mapping, address - at
        raise KeyError(f"nothing is mapped at {address:#x}")

    def _mappings_in(self, address: int, size_bytes: int) -> list[int]:
        """Addresses of the mappings that fill these bytes; none unless they do, exactly."""
        pieces, end = [], address
        while end < address + size_bytes and end in self.mappings:
            pieces.append(end)
            end += self.mappings[end].size_bytes
        return pieces if end == address + size_bytes else []

    def _collect(self) -> None:
        """Free the memory that nothing refers to any more."""
        kept = {memory.number for memory in self._handles.values()}
        kept.update(mapping.memory.number for mapping in self.mappings.values())
        kept.update(_eventfd_value(name) or 0 for name in os.listdir("/proc/self/fd"))
        self._memories = {n: memory for n, memory in self._memories.items() if n in kept}


def _eventfd_value(descriptor: str) -> int | None:
    """The counter of an eventfd, which is the same in all duplicates of it."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}") as lines:
        for line in lines:
            if line.startswith("eventfd-count:"):
                return int(line.split()[1], 16)
    return None
