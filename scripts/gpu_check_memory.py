"""Check what the donor tier needs of this machine's GPUs, and time it.

    PYTHONPATH=. python scripts/gpu_check_memory.py [STEP ...]

Each step runs in a process of its own that is killed after STEP_TIMEOUT_S, so that a driver that
hangs costs one step. Prints what each step found; exits 1 if one failed. The receiver is cuda:0,
the donor cuda:1, or cuda:0 as well where there is no other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from cuda.bindings import driver as cu  # type: ignore[import-untyped]
from gpu_check_support import (
    RECEIVER,
    SIZE,
    STEP_TIMEOUT_S,
    ask,
    attempt,
    context_active,
    donor,
    donor_ordinal,
    expect,
    fill,
    is_filled,
    map_one,
    rate,
    say,
    timed,
)

from swiftcache_tier.cuda_driver import (
    PrimaryContext,
    call,
    can_access_peer,
    device,
    device_count,
    device_uuid,
)
from swiftcache_tier.extents import HostArena, device_memory
from swiftcache_tier.extents.cuda import CudaArena
from swiftcache_tier.extents.cuda_address_range import CudaAddressRange
from swiftcache_tier.extents.pinned import PinnedHostAddressRange
from swiftcache_tier.topology import (
    find_gpu,
    free_memory_bytes,
    link_between,
    load_nvml,
    numa_nodes,
)
from swiftcache_tier.topology.bandwidth import measure_bandwidth

MIB = 1 << 20
# What this file does when it starts itself.
_STEP_ROLE, _MAP_ROLE = "--step", "--map"


def main(names: list[str]) -> int:
    if names[:1] == [_MAP_ROLE]:
        _map_given(int(names[1]))
        return 0
    if names[:1] == [_STEP_ROLE]:
        STEPS[names[1]]()
        return 0
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        print(f"no step {', '.join(unknown)}: the steps are {', '.join(STEPS)}")
        return 2
    if device_count() == 0:
        print("no CUDA device is seen here: there is nothing to check")
        return 1
    failed = [name for name in names or STEPS if not _run_step(name)]
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'all steps passed'}")
    return 1 if failed else 0


def _run_step(name: str) -> bool:
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, __file__, _STEP_ROLE, name], start_new_session=True)
    try:
        status: int | str = process.wait(STEP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        status = f"killed after {STEP_TIMEOUT_S} s"
        # Its session holds the donor that it started, too. A process inside the driver may not
        # even end then; the next step shows what that means.
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    passed = status == 0
    verdict = "passed" if passed else f"FAILED ({status})"
    print(f"-- {name}: {verdict} in {time.monotonic() - started:.1f} s", flush=True)
    return passed


def machine() -> None:
    say("CUDA devices", device_count())
    say("NUMA nodes with CPUs", numa_nodes())
    for ordinal in range(device_count()):
        say(f"cuda:{ordinal}", find_gpu(device_uuid(ordinal), load_nvml()))
    for one in range(device_count()):
        for other in range(device_count()):
            reach = can_access_peer(one, other)
            link = link_between(
                device_uuid(one), device_uuid(other), load_nvml(), can_access_peer=reach
            )
            say(f"cuda:{one} reads cuda:{other}", f"{link} (peer access {reach})")
    say("cuda:0 reads host memory", link_between(device_uuid(0), None, load_nvml()))


def without_context() -> None:
    """Memory is made, shared, imported, mapped and freed while no context exists."""
    ordinal = donor_ordinal()
    device(ordinal)
    say("granularity", f"{device_memory.granularity_bytes(ordinal)} bytes")
    handle = device_memory.create(ordinal, SIZE)
    descriptor = device_memory.export_descriptor(handle)
    mode = os.fstat(descriptor).st_mode
    say("a descriptor is", f"{os.readlink(f'/proc/self/fd/{descriptor}')}, mode {mode:#o}")
    say("... a character device", stat.S_ISCHR(mode))
    say("... handed to children", os.get_inheritable(descriptor))
    say("context active", context_active(ordinal))
    imported = device_memory.import_descriptor(descriptor)
    say("imported handle lies on", f"cuda:{device_memory.device_of(imported)}")
    address = device_memory.reserve(SIZE, 0)
    device_memory.map_at(address, SIZE, imported)
    attempt("allow access without a context", device_memory.allow_access, address, SIZE, RECEIVER)
    say("context active", context_active(ordinal))
    device_memory.unmap(address, SIZE)
    for held in (imported, handle):
        device_memory.release(held)
    os.close(descriptor)
    expect("no context was made", not context_active(ordinal))


def footprint() -> None:
    """MiB of its GPU that a donor takes beyond what it lends."""
    ordinal = donor_ordinal()
    uuid = device_uuid(ordinal)
    start = free_memory_bytes(uuid, load_nvml())
    if start is None:
        say("skipped", "NVML does not tell what is free")
        return
    with donor(ordinal, extents=0) as commands:
        lent = 0
        for command, what in (
            ("nothing", "driver started"),
            ("raw 8", "8 extents, not zeroed"),
            ("create 8", "8 more, zeroed, context held"),
            ("idle", "the context given back"),
            ("scrub", "all zeroed again, context held"),
            ("idle", "the context given back again"),
            ("share 0", "one shared"),
        ):
            for descriptor in ask(commands, command):
                os.close(descriptor)
            lent += 8 * SIZE if command in ("raw 8", "create 8") else 0
            free = free_memory_bytes(uuid, load_nvml()) or 0
            say(what, f"{(start - free - lent) / MIB:.0f} MiB")
    time.sleep(0.5)
    free = free_memory_bytes(uuid, load_nvml()) or 0
    say("half a second after its end", f"{(start - free) / MIB:.0f} MiB")


def survival() -> None:
    """Data outlives the donor's context and the donor."""
    ordinal = donor_ordinal()
    addresses = CudaAddressRange(4 * SIZE, RECEIVER)
    with donor(ordinal, extents=2) as commands:
        map_one(addresses, 0, ask(commands, "share 0")[0])
        expect("a new extent is zero", is_filled(addresses.base, 0))
        fill(addresses.base, 0x11)
        ask(commands, "idle")
        map_one(addresses, 1, ask(commands, "share 0")[0])
        expect("data outlive the donor's context", is_filled(addresses.base + SIZE, 0x11))
        stale = ask(commands, "share 0")[0]
        ask(commands, "scrub")
        map_one(addresses, 2, ask(commands, "share 0")[0])
        expect("a scrubbed extent is zero", is_filled(addresses.base + 2 * SIZE, 0))
        fill(addresses.base + 2 * SIZE, 0x22)
        map_one(addresses, 3, stale)
        expect(
            "a stale descriptor reads what its holder wrote",
            is_filled(addresses.base + 3 * SIZE, 0x11),
        )
        ask(commands, "die", wait=False)
    time.sleep(0.5)
    expect("data outlive the donor", is_filled(addresses.base + 2 * SIZE, 0x22))
    fill(addresses.base + 2 * SIZE, 0x33)
    expect("and can be written", is_filled(addresses.base + 2 * SIZE, 0x33))
    addresses.close()


def wrong_descriptors() -> None:
    reading, _ = os.pipe()
    addresses = CudaAddressRange(4 * SIZE, RECEIVER)
    arena = CudaArena(donor_ordinal())
    extent = arena.create(SIZE)
    kinds: dict[str, int] = {
        "pipe": reading,
        "host extent": HostArena().create(SIZE).share(),
        "/dev/null": os.open("/dev/null", os.O_RDWR),
        "eventfd": os.eventfd(3),
        "a number that is not open": 900,
    }
    for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"):
        with contextlib.suppress(OSError):
            kinds[node] = os.open(node, os.O_RDWR)
    for kind, descriptor in kinds.items():
        attempt(f"the driver on {kind}", device_memory.import_descriptor, descriptor)
        attempt(f"the range on {kind}", addresses.map, 0, descriptor, SIZE, expected=False)
    own = extent.share()
    attempt("too small an extent", addresses.map, 0, own, 2 * SIZE, expected=False)
    attempt("half an extent", addresses.map, 0, own, SIZE // 2)
    attempt("a whole one", addresses.map, SIZE, own, SIZE, expected=True)


def hidden_gpu() -> None:
    """A receiver that CUDA_VISIBLE_DEVICES lets see one GPU maps memory of another."""
    if device_count() < 2:
        say("skipped", "there is one GPU")
        return
    with donor(1, extents=1) as commands:
        descriptor = ask(commands, "share 0")[0]
        for visible in (device_uuid(0), f"{device_uuid(1)},{device_uuid(0)}"):
            subprocess.run(
                [sys.executable, __file__, _MAP_ROLE, str(descriptor)],
                pass_fds=[descriptor],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                timeout=30,
                check=False,
            )


def _map_given(descriptor: int) -> None:
    addresses = CudaAddressRange(SIZE, RECEIVER)
    visible = os.environ["CUDA_VISIBLE_DEVICES"]

    def import_it() -> None:
        handle = device_memory.import_descriptor(descriptor)
        say("it lies on cuda", device_memory.device_of(handle))

    attempt("import it", import_it)
    attempt(f"map it seeing {visible}", addresses.map, 0, descriptor, SIZE)


def graph_capture() -> None:
    """A thread maps, zeroes, pins and measures while another captures a graph."""
    context = PrimaryContext(RECEIVER)
    addresses = CudaAddressRange(4 * SIZE, RECEIVER)
    pinned = PinnedHostAddressRange(4 * SIZE, RECEIVER)
    host_extent = HostArena().create(SIZE)
    with context.current():
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        buffer = call(cu.cuMemAlloc, SIZE)
    everywhere = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    def work() -> None:
        extent = CudaArena(RECEIVER, context_idle_s=None).create(SIZE)
        map_one(addresses, 0, extent.share())
        extent.scrub()
        measure_bandwidth(RECEIVER, addresses.base, SIZE)
        map_one(pinned, 0, host_extent.share())
        pinned.unmap(0, SIZE)
        addresses.unmap(0, SIZE)
        extent.close()

    with context.current():
        call(cu.cuStreamBeginCapture, stream, everywhere)
        call(cu.cuMemsetD32Async, buffer, 1, SIZE // 4, stream)
        outcome: list[bool] = []
        thread = threading.Thread(
            target=lambda: outcome.append(attempt("work beside a capture", work))
        )
        thread.start()
        thread.join()
        graph = call(cu.cuStreamEndCapture, stream)
    expect("the capture is whole", int(graph) != 0)
    expect("the work was done", outcome == [True])


def timings() -> None:
    count = 64
    arena = CudaArena(donor_ordinal(), context_idle_s=None)
    first = timed("the first extent, with a context", 1, lambda: arena.create(SIZE))
    extents = [first]
    timed("create", count, lambda: extents.append(arena.create(SIZE)))
    timed("scrub", count, extents[0].scrub)
    descriptors: list[int] = []
    timed("share", count, lambda: descriptors.append(extents[0].share()))
    started = time.perf_counter()
    addresses = CudaAddressRange(1 << 40, RECEIVER)
    say("reserve 1 TiB", f"{(time.perf_counter() - started) * 1e3:.2f} ms at {addresses.base:#x}")
    places = iter(range(count))
    timed("map", count, lambda: addresses.map(next(places) * SIZE, descriptors[0], SIZE))
    places = iter(range(count))
    timed("unmap", count, lambda: addresses.unmap(next(places) * SIZE, SIZE))
    addresses.close()


def pinned_host() -> None:
    arena, count = HostArena(), 32
    extents = [arena.create(SIZE) for _ in range(count)]
    gpu = find_gpu(device_uuid(RECEIVER), load_nvml())
    addresses = PinnedHostAddressRange(count * SIZE, RECEIVER, gpu.numa_node if gpu else None)
    say("reserved at", f"{addresses.base:#x}")
    places = iter(range(count))

    def map_next() -> None:
        place = next(places)
        map_one(addresses, place, extents[place].share())

    timed("map, lock and take 32 MiB of RAM", count, map_next)
    say("cuda:0 reads host memory", f"{rate(addresses.base)}")
    fill(addresses.base, 0x44)
    expect("the GPU writes it", is_filled(addresses.base, 0x44))
    addresses.unmap(0, SIZE)
    places = iter([0])
    timed("map and lock RAM that is there", 1, map_next)
    addresses.close()


def bandwidth() -> None:
    addresses = CudaAddressRange(device_count() * SIZE, RECEIVER)
    for ordinal in range(device_count()):
        if not can_access_peer(RECEIVER, ordinal):
            continue
        extent = CudaArena(ordinal).create(SIZE)
        map_one(addresses, ordinal, extent.share())
        link = link_between(device_uuid(RECEIVER), device_uuid(ordinal), load_nvml())
        started = time.perf_counter()
        measured = rate(addresses.base + ordinal * SIZE)
        took_ms = (time.perf_counter() - started) * 1e3
        say(
            f"cuda:0 reads cuda:{ordinal} ({link.kind})",
            f"{measured}, {link.expected_gb_per_s:.0f} expected; measuring took {took_ms:.1f} ms",
        )


STEPS: dict[str, Callable[[], None]] = {
    "machine": machine,
    "without-context": without_context,
    "footprint": footprint,
    "survival": survival,
    "wrong-descriptors": wrong_descriptors,
    "hidden-gpu": hidden_gpu,
    "graph-capture": graph_capture,
    "timings": timings,
    "pinned-host": pinned_host,
    "bandwidth": bandwidth,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
