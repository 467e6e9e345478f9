"""Every time-out, interval and size of the donor tier, by name."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import format_size, parse_size

_PREFIX = "SWIFTCACHE_"
# Read elsewhere: they choose folders, and what examples run.
_OTHER_VARIABLES = {
    "SWIFTCACHE_CACHE",
    "SWIFTCACHE_LOG_FORMAT",
    "SWIFTCACHE_MASTER_MODEL",
    "SWIFTCACHE_ROLE",
    "SWIFTCACHE_RUNTIME_DIR",
    "SWIFTCACHE_WORKER_MODELS",
}

GPU_PAGE_BYTES = 2 << 20
"""Memory of a GPU is taken, lent and mapped in multiples of this."""


@dataclass(frozen=True)
class Settings:
    """Each field may be set by an environment variable: `SWIFTCACHE_HEARTBEAT_S` for the first.

    Seconds are numbers; sizes take units ("64KiB"). Raises SwiftCacheError for values that could
    not work.
    """

    heartbeat_s: float = 1.0
    """Between two signs of life of a receiver, each of which its donor answers."""

    lost_after_s: float = 5.0
    """A peer silent for so long counts as lost."""

    join_timeout_s: float = 10.0
    """What a receiver's start waits for its donors to grant memory, from the last that came:
    locking host memory for a GPU takes 0.65 s for each GiB, so the whole may take minutes."""

    handshake_timeout_s: float = 5.0
    """What either side of a new connection waits for the other's first message."""

    offer_timeout_s: float = 5.0
    """An offer not answered after this is withdrawn."""

    reclaim_deadline_s: float = 5.0
    """What a receiver is given to vacate extents, and a donor that ends waits for them."""

    leave_timeout_s: float = 1.0
    """What a receiver that ends waits for each donor to confirm that it left."""

    vacate_bytes_per_step: int = 256 << 20
    """Moved between donors in one scheduler step, at most, when memory is asked back."""

    drain_deadline_s: float = 10.0
    """After a donor is lost, blocks in its memory are moved for so long. Prefixes that are still
    there then, and that no request uses, are given up."""

    cold_copy_bytes_per_step: int = 1 << 30
    """Stored in one scheduler step, at most, of what the device would evict next and what has no
    copy yet, on a server whose donors have no room for copies of all that it has."""

    refill_bytes_per_step: int = 32 << 20
    """Copied in one scheduler step, at most, to give blocks the copies that they are short of."""

    refill_retry_s: float = 1.0
    """Before blocks that are short of a copy are looked at again when none found room."""

    stream_bytes_per_step: int = 2 << 30
    """KV that a server with a layer window reads from donors in one decode step, at most, while
    several requests run: at 350 GB/s 6 ms, about as long as such a step takes. A request that alone
    needs more waits until no other runs."""

    window_wait_s: float = 30.0
    """What a request that needs more of the layer window than donors back waits for them."""

    resident_share: float = 0.125
    """Of the regular slots of a server with a layer window, what requests that stream leave to
    those that fit, which run beside them so."""

    status_timeout_s: float = 2.0
    """A donor that has not answered after this is shown as unresponsive."""

    probe_timeout_s: float = 60.0
    """What the check of donor SPECs waits for the CUDA driver to say what the GPUs have."""

    discovery_interval_s: float = 1.0
    """Between two looks for donors that came or came back."""

    owned_end_timeout_s: float = 5.0
    """A donor that its receiver owns is killed when it has not ended after this."""

    owned_restart_s: float = 1.0
    """A donor that its receiver owns, and that ended by itself, is started again after this; after
    twice as long each time that it does not start, or ends again before `owned_restart_max_s`."""

    owned_restart_max_s: float = 60.0
    """The longest such wait."""

    scheduler_end_timeout_s: float = 5.0
    """A server that lends and is interrupted waits so long for its scheduler process to be gone,
    whose donor's sockets it then removes."""

    watchdog_s: float = 60.0
    """Work that waits so long without any progress is a stall; the state is logged then."""

    audit_interval_s: float = 3600.0
    """Between two audits of all books of a server, each of which may take tens of milliseconds."""

    metrics_interval_s: float = 1.0
    """Between two times that a server's `/metrics` are brought up to date."""

    extent_bytes: int = 64 << 20
    """Unit in which memory is lent. Each costs calls of a GPU's driver to hand over and to map, in
    all about a quarter of a millisecond at half this size; larger ones make lending coarser."""

    offer_bytes_max: int = 1 << 30
    """Offered to a receiver at once, or one extent, before it has answered. One that locks the
    memory for a GPU must be done with it well within `offer_timeout_s`."""

    demand_interval_s: float = 0.05
    """Between two looks of a serving engine at how much its receivers would take."""

    lend_quiet_s: float = 5.0
    """A serving engine lends again no sooner than this after it took memory back."""

    cold_after_s: float = 60.0
    """A prefix that nobody has asked for in so long may make room for lending."""

    cold_scan_s: float = 1.0
    """Between two looks through the prefix cache for what is cold."""

    cold_scan_nodes_per_step: int = 256
    """Nodes of the prefix cache that are looked at in one scheduler step, at most: a request that
    comes meanwhile waits for them, about a millisecond."""

    take_back_wait_s: float = 1.0
    """What a request waits for lent memory before prefixes that are not cold are evicted for it."""

    compact_bytes_per_step: int = 64 << 20
    """Moved inside a serving engine's pool in one scheduler step, at most, to empty extents; one
    extent in any case."""

    mapping_slice_s: float = 0.02
    """Spent on mapping or unmapping extents, or on one of them, before other work has its turn."""

    thread_switch_s: float = 0.0001
    """After this a thread of a server must let another in that waits for the interpreter. A
    scheduler that never sleeps would otherwise keep its control thread waiting 5 ms at each step of
    mapping and unmapping, of which an extent takes several."""

    auto_pinned_bytes_max: int = 32 << 30
    """Host memory that `auto` takes for a receiver on a GPU when there is no donor, at most: all
    of it is locked at the start, which this keeps to about 20 s, and is no use to others then.
    `host=SIZE` takes any size."""

    address_space_bytes: int = 1 << 40
    """Addresses a receiver reserves for the extents of its donors, for each kind of memory."""

    message_bytes_max: int = 64 << 10
    """Longest control message that is read."""

    extents_per_message: int = 128
    """Extents named, and descriptors carried, by one message; at most 253."""

    sessions_max: int = 64
    """Receivers that one donor serves at once, and connections that it hears out at once."""

    sessions_per_process_max: int = 8
    """Of those, sessions of one process, and connections of one process that are heard out."""

    queued_messages_max: int = 256
    """Messages that wait for one peer before more are dropped."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value > 0):
                raise SwiftCacheError(
                    f"{_variable(name)} is {value}: expected a finite value over 0"
                )
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise SwiftCacheError(
                f"{_variable('lost_after_s')} is {self.lost_after_s:g} s with a heartbeat every "
                f"{self.heartbeat_s:g} s: expected at least two heartbeats"
            )
        if self.owned_restart_max_s < self.owned_restart_s:
            raise SwiftCacheError(
                f"{_variable('owned_restart_max_s')} is {self.owned_restart_max_s:g} s: expected "
                f"at least {_variable('owned_restart_s')}, {self.owned_restart_s:g} s"
            )
        if self.resident_share >= 1:
            raise SwiftCacheError(
                f"{_variable('resident_share')} is {self.resident_share:g}: expected a fraction "
                f"below 1, such as 0.125"
            )
        if self.extents_per_message > 253:
            raise SwiftCacheError(
                f"{_variable('extents_per_message')} is {self.extents_per_message}: expected at "
                f"most 253, the descriptors that Linux lets one message carry"
            )
        if self.address_space_bytes % GPU_PAGE_BYTES:
            raise SwiftCacheError(
                f"{_variable('address_space_bytes')} is {self.address_space_bytes} bytes: expected "
                f"a multiple of {format_size(GPU_PAGE_BYTES)}, the pages of GPU memory"
            )
        if self.message_bytes_max < 4 << 10:
            raise SwiftCacheError(
                f"{_variable('message_bytes_max')} is {self.message_bytes_max} bytes: expected at "
                f"least 4KiB, which the longest legal message may need"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """The defaults, with what `environ` sets.

        Raises SwiftCacheError naming the variable, also for one that is misspelt.
        """
        _check_names(environ)
        values: dict[str, float] = {}
        for field in fields(cls):
            text = environ.get(_variable(field.name))
            if text is not None:
                values[field.name] = _parse(field.name, isinstance(field.default, int), text)
        return cls(**values)  # type: ignore[arg-type]  # whole numbers are int, see _parse

    def as_env(self) -> dict[str, str]:
        """The environment variables from which `from_env` makes these settings again."""
        return {_variable(name): str(value) for name, value in asdict(self).items()}


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _check_names(environ: Mapping[str, str]) -> None:
    known = {_variable(field.name) for field in fields(Settings)} | _OTHER_VARIABLES
    unknown = min((n for n in environ if n.startswith(_PREFIX) and n not in known), default=None)
    if unknown is not None:
        (nearest,) = difflib.get_close_matches(unknown, sorted(known), n=1, cutoff=0.0)
        raise SwiftCacheError(
            f"environment variable {unknown} is not known: expected one like {nearest}; correct "
            f"its name or unset it"
        )


def _parse(name: str, whole: bool, text: str) -> float:
    try:
        if "_bytes" in name:
            return parse_size(text)
        return int(text) if whole else float(text)
    except (SwiftCacheError, ValueError):
        expected = "a size such as 32MiB" if "_bytes" in name else "a number"
        raise SwiftCacheError(f"{_variable(name)} is {text!r}: expected {expected}") from None
