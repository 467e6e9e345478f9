"""Notices a server that makes no progress with work waiting, and logs how it stands.

The scheduler thread notes at each step how far each kind of work has come; a thread of the
watchdog's own looks now and then whether anything has moved. If not for ``stall_s``, the state is
read on the scheduler thread, between two steps; where that is stuck inside one, on the watchdog's,
with the stack that it is stuck in. While its user has paused the engine, nothing needs to move, nor
do requests that wait for donors: they are refused in time.
Nothing is ended or repaired: SGLang's own watchdog ends a server whose forward does not come back.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from sglang.srt.swiftcache.state_dump import StateDump, Violation, summary

if TYPE_CHECKING:
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

logger = logging.getLogger(__name__)

LOOKS_PER_STALL = 10
STEP_PATIENCE_S = 2.0
"""What the scheduler thread is given to read its own state; a step that takes longer is a stall."""


class Work(NamedTuple):
    """How far one kind of work has come; nothing has moved while ``mark`` stays the same."""

    waiting: bool
    mark: Any


class Watchdog:
    """Watches one scheduler. Its own thread never touches the scheduler's data while that moves."""

    def __init__(self, scheduler: Any, cache: DonorRadixCache, stall_s: float) -> None:
        """Starts the thread, a daemon; must be called on the scheduler thread."""
        self.stalls = 0
        """How often work was seen to stand still; one that goes on standing counts once."""
        self._scheduler = scheduler
        self._cache = cache
        self._stall_s = stall_s
        self._steps = 0
        self._work: dict[str, Work] = {}
        self._dump_wanted = threading.Event()
        self._dumped = threading.Event()
        self._stalled: list[str] = []
        self._watched = threading.get_ident()
        threading.Thread(target=self._watch, name="swiftcache-watchdog", daemon=True).start()

    def step(self) -> None:
        """Scheduler thread, at every step: note how things stand, and dump if that was asked."""
        scheduler, cache = self._scheduler, self._cache
        tier = cache.tier_pool.tier
        self._steps += 1
        to_return = tier.extents_to_return()
        self._work = {
            "requests": Work(
                not scheduler.running_batch.is_empty()
                or scheduler.chunked_req is not None
                or not all(cache.waits_for_donors(req) for req in scheduler.waiting_queue),
                scheduler.forward_ct,
            ),
            "stores": Work(
                bool(cache.ongoing_write_through), next(iter(cache.ongoing_write_through), None)
            ),
            "loads": Work(bool(cache.ongoing_load_back), next(iter(cache.ongoing_load_back), None)),
            "reclaims": Work(
                to_return > 0, (to_return, tier.must_vacate().size) if to_return else None
            ),
        }
        if self._dump_wanted.is_set():
            self._dump_wanted.clear()
            self._dump(stack=None)
            self._dumped.set()

    def _watch(self) -> None:
        # Looks are counted, not seconds: a process that was stopped and goes on did not stall.
        pause = threading.Event()
        still: dict[str, int] = {}
        before: dict[str, Work] = {}
        reported: set[str] = set()
        while not pause.wait(self._stall_s / LOOKS_PER_STALL):
            # the loop turns even when idle, every second at least
            now = {**self._work, "scheduler": Work(self._steps > 0, self._steps)}
            paused = self._scheduler._engine_paused
            for name, work in now.items():
                stands = work.waiting and before.get(name) == work and not paused
                still[name] = still.get(name, 0) + 1 if stands else 0
                if not stands:
                    reported.discard(name)
            before = now
            stalled = [name for name, looks in still.items() if looks >= LOOKS_PER_STALL]
            if not set(stalled) <= reported:
                reported.update(stalled)
                self._report(stalled)

    def _report(self, stalled: list[str]) -> None:
        self.stalls += 1
        self._stalled = stalled
        self._dumped.clear()
        self._dump_wanted.set()
        if self._dumped.wait(STEP_PATIENCE_S):
            return
        self._dump_wanted.clear()
        frame = sys._current_frames().get(self._watched)
        self._dump([] if frame is None else traceback.format_stack(frame))

    def _dump(self, stack: list[str] | None) -> None:
        """``stack``: of the scheduler thread, where it is stuck; None on that thread itself."""
        violations: list[Violation] = []
        state: dict[str, Any] = {"stalled": self._stalled, "scheduler_stack": stack}
        try:
            dump = StateDump(self._scheduler, self._cache)
            violations = dump.violations()
            state |= dump.as_dict()
            state["violated"] = [violation._asdict() for violation in violations]
        except Exception as error:  # a dump that is cut short is better than none
            logger.exception("SwiftCache watchdog: part of the state cannot be read")
            state["unreadable"] = repr(error)
        logger.error(
            "SwiftCache watchdog: no progress for %g s of %s, with work waiting; invariants that "
            "do not hold%s: %s; state: %s",
            self._stall_s,
            ", ".join(self._stalled),
            "" if stack is None else " (in the midst of a step)",
            summary(violations),
            orjson.dumps(state, default=str).decode(),
            extra={"event": "stalled", "stalled": self._stalled, "state": state},
        )
