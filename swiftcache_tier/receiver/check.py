"""What can be told to be wrong with donor SPECs before anything is allocated."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swiftcache_tier.control.credentials import user_name
from swiftcache_tier.control.lendable import lendable_bytes
from swiftcache_tier.control.messages import StatusReply
from swiftcache_tier.control.open_files import require_open_files
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import (
    NAME_ANOTHER,
    check_runtime_dir,
    donor_paths_at,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena, arena_for
from swiftcache_tier.receiver.owned import owned_donor_paths, owned_extent_bytes
from swiftcache_tier.receiver.probe import Question, probe
from swiftcache_tier.receiver.reach import kind_of
from swiftcache_tier.settings import GPU_PAGE_BYTES, Settings
from swiftcache_tier.sizes import format_size
from swiftcache_tier.spec import DonorSpec


def check_specs(
    specs: Sequence[DonorSpec], runtime_dir: Path, settings: Settings, device: str = "cpu"
) -> None:
    """Raise SwiftCacheError, one line that names the SPEC, if a receiver could not start on them.

    `device` is what the receiver will compute on: "cpu" or "cuda:N". Allocates and leaves nothing,
    starts no CUDA driver in this process, and may be called in any process and thread. Blocks for
    `settings.status_timeout_s` at most for each `ipc` SPEC and for `host`, and for
    `settings.probe_timeout_s` if any memory is that of a GPU. Donors that `auto` would find are not
    asked: those that cannot be joined are passed over.
    """
    if any(spec.kind != "ipc" for spec in specs):
        check_runtime_dir(runtime_dir)
        _check_writable(runtime_dir)
    questions: dict[DonorSpec, Question] = {}
    for spec in specs:
        with _named(spec):
            question = _check(spec, runtime_dir, settings, device)
            if question is not None:
                questions[spec] = question
    if not questions:
        return
    answers = probe(device, list(questions.values()), settings)
    for spec, answer in zip(questions, answers, strict=True):
        with _named(spec):
            if answer.problem is not None:
                raise SwiftCacheError(answer.problem)
            _check_size(spec, answer.available_bytes, settings, GPU_PAGE_BYTES)


@contextmanager
def _named(spec: DonorSpec) -> Iterator[None]:
    try:
        yield
    except SwiftCacheError as error:
        raise SwiftCacheError(f"donor SPEC {spec}: {error}") from error


def _check_writable(runtime_dir: Path) -> None:
    """Find out by doing it: neither modes nor `access` tell of file systems that refuse."""
    existing = next(path for path in (runtime_dir, *runtime_dir.parents) if path.exists())
    try:
        # Under a name of its own: others may be making or using the directory itself right now.
        tempfile.TemporaryDirectory(prefix=".swiftcache-", dir=existing).cleanup()
    except OSError as error:
        raise SwiftCacheError(
            f"runtime directory {runtime_dir} cannot be used: {existing} may not be written by "
            f"user {user_name(os.geteuid())} ({error.strerror}); {NAME_ANOTHER}"
        ) from error


def _check(spec: DonorSpec, runtime_dir: Path, settings: Settings, device: str) -> Question | None:
    """Check what needs no GPU; returns what is left to ask of one."""
    match spec.kind:
        case "ipc":
            assert spec.path is not None
            reply = query_status(donor_paths_at(spec.path), settings)
            _check_donor(reply)
            if kind_of(reply.device, device) != HostArena.device:
                return Question(reply.device, reply.device_uuid)
        case "host" | "cuda":
            assert spec.device is not None
            owned_donor_paths(spec.device, runtime_dir)
            kind = kind_of(spec.device, device)
            _check_holds_a_page(spec, kind)
            if kind != HostArena.device:
                return Question(spec.device, None)
            arena = arena_for(spec.device)
            available_bytes = lendable_bytes(arena, runtime_dir, settings)
            _check_size(spec, available_bytes, settings, arena.granularity_bytes)
        case "auto":
            owned_donor_paths(HostArena.device, runtime_dir)
    return None


def _check_holds_a_page(spec: DonorSpec, kind: str) -> None:
    page_bytes = HostArena.granularity_bytes if kind == HostArena.device else GPU_PAGE_BYTES
    if spec.size_bytes is not None and spec.size_bytes < page_bytes:
        raise SwiftCacheError(
            f"{spec.size_bytes} bytes are less than one page of {kind} memory, "
            f"{format_size(page_bytes)}: ask for more, as in {spec.device}=8GiB"
        )


def _check_size(spec: DonorSpec, available_bytes: int, settings: Settings, page_bytes: int) -> None:
    if spec.size_bytes is None:
        return
    if spec.size_bytes > available_bytes:
        raise SwiftCacheError(
            f"that is over what {spec.device} has to give: {format_size(available_bytes)} is "
            f"available now, beyond what other donors have promised; ask for less or free some"
        )
    extent_bytes = owned_extent_bytes(spec.size_bytes, page_bytes, settings)
    extents = spec.size_bytes // extent_bytes
    require_open_files(
        extents, extent_bytes, settings, option="SWIFTCACHE_EXTENT_BYTES", for_extents=extents
    )


def _check_donor(reply: StatusReply) -> None:
    if reply.owner_pid is not None:
        raise SwiftCacheError(
            f"that donor is owned by process {reply.owner_pid} and serves it alone: name another, "
            f"or start one (swiftcache donor)"
        )
    if reply.state != "serving":
        raise SwiftCacheError(f"that donor is {reply.state}: name another, or start it again")
