"""Which receiver holds what, and what it is told: the donor's decisions.

No input or output, and no clock: times are passed in, and what is to be sent goes to a port.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from swiftcache_tier.control.messages import (
    Accept,
    Bye,
    Decline,
    ErrorCode,
    Farewell,
    MessageError,
    Ping,
    Pong,
    ReceiverStatus,
    Reclaim,
    Released,
    ToDonor,
    ToReceiver,
)
from swiftcache_tier.donor.limits import Limits
from swiftcache_tier.donor.parties import SHARING, Engine, Receiver
from swiftcache_tier.donor.shares import Claim, fair_shares
from swiftcache_tier.lease import LeaseEvent, LeaseState, LeaseTable
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import count_extents, format_size

logger = logging.getLogger(__name__)

_ENDING = "the donor is ending"
_DRAINED = "an operator drains the donor"
_LIMITED = "an operator has set a limit"
_ENGINE = "the donor needs it for its own requests"
_CLOSED = "the connection has closed"
_UNANSWERED = "the offer was not answered in time"


class Lender:
    """Divides a donor's extents between its receivers. Used by the event loop's thread."""

    def __init__(
        self,
        extents: int,
        extent_bytes: int,
        settings: Settings,
        dirtied: Callable[[], None],
        *,
        engine: Engine | None = None,
    ) -> None:
        """`dirtied` is called when there are extents to scrub (`table.dirty`).

        With an `engine` every extent is its own until it calls `lend`, and goes back to it,
        unscrubbed, whenever a receiver has released it.
        """
        self._table = LeaseTable(extents, kept=engine is not None)
        self._engine = engine
        self._target = extents if engine is None else 0
        self._extents = extents
        self.limits = Limits()
        self.drained = False
        """By an operator, who may lift that again; `draining` is for good."""
        self._extent_bytes = extent_bytes
        self._settings = settings
        self._dirtied = dirtied
        # In the descriptors that one record carries, and in the memory that a receiver may have to
        # lock before it answers.
        self._extents_per_offer = min(
            settings.extents_per_message, max(1, settings.offer_bytes_max // extent_bytes)
        )
        self._receivers: dict[str, Receiver] = {}
        self._ticked_s: float | None = None
        self.draining = False

    @property
    def table(self) -> LeaseTable:
        """For reading."""
        return self._table

    @property
    def is_elastic(self) -> bool:
        """The memory is that of an engine, which takes it back when it needs it."""
        return self._engine is not None

    @property
    def idle(self) -> bool:
        """No receiver holds anything."""
        return self._table.counts()[LeaseState.FREE] == self._extents

    def join(self, receiver: Receiver) -> None:
        """Open a session. Raises MessageError while draining, or when there are too many."""
        if self.draining or self.drained:
            why = "ending" if self.draining else "being drained"
            raise MessageError(ErrorCode.DRAINING, f"this donor is {why}: choose another")
        if len(self._receivers) >= self._settings.sessions_max:
            raise MessageError(
                ErrorCode.FULL,
                f"this donor already serves {len(self._receivers)} receivers, its most: raise "
                f"SWIFTCACHE_SESSIONS_MAX where it is started, or choose another",
            )
        of_process = sum(other.pid == receiver.pid for other in self._receivers.values())
        if of_process >= self._settings.sessions_per_process_max:
            raise MessageError(
                ErrorCode.FULL,
                f"process {receiver.pid} has {of_process} sessions with this donor, its most: end "
                f"one, or raise SWIFTCACHE_SESSIONS_PER_PROCESS_MAX where the donor is started",
            )
        self._receivers[receiver.token] = receiver
        logger.info("%s of user %d joined", receiver, receiver.uid)

    def hear(self, message: ToDonor, now_s: float) -> ToReceiver | None:
        """Act on a message; returns the answer, if it has one.

        Raises MessageError when the message's token belongs to no session. Only `Bye` is right
        then too: it is repeated until it is answered, and the session may have ended before it.
        """
        receiver = self._receivers.get(message.token)
        if receiver is None and isinstance(message, Bye):
            return Farewell()
        if receiver is None:
            raise MessageError(
                ErrorCode.NO_SESSION,
                f"{type(message).__name__} for a session that this donor does not have: it has "
                f"ended, or never was; say Hello first",
            )
        receiver.heard_s = now_s
        if receiver.silent:
            receiver.silent = False
            self._table.apply_to_all(LeaseEvent.RESUME, receiver.token, now_s)
            logger.info(
                "%s speaks again: it keeps %s", receiver, self._amount(self._held(receiver))
            )
        match message:
            case Ping():
                receiver.wanted = message.wanted
                receiver.link, receiver.gb_per_s = message.link, message.gb_per_s
                self._rebalance(now_s)
                return Pong(target=receiver.target)
            case Accept():
                self._apply(LeaseEvent.ACCEPT, receiver, message, now_s)
                self._offer_missing(receiver, now_s)
            case Decline():
                # Whatever kept it from mapping them will keep it from mapping the next at once.
                receiver.no_offer_before_s = now_s + self._settings.offer_timeout_s
                logger.warning("%s declined %s", receiver, self._amount(len(message.slots)))
                self._apply(LeaseEvent.DECLINE, receiver, message, now_s)
            case Released():
                self._apply(LeaseEvent.RELEASE, receiver, message, now_s)
            case Bye():
                self._end(receiver, LeaseEvent.RELEASE, "left", now_s)
                return Farewell()
        return None

    def door_closed(self, token: str, now_s: float) -> None:
        """Nothing can be handed to this receiver any more.

        Its extents stay its own: the end of a connection may precede the end of its accesses.
        """
        receiver = self._receivers.get(token)
        if receiver is None:
            return
        receiver.door_open = False
        if not self._held(receiver):
            self._end(receiver, LeaseEvent.RELEASE, "closed its connection", now_s)

    def gone(self, token: str, now_s: float) -> None:
        """The receiver's process has ended, and its mappings with it."""
        receiver = self._receivers.get(token)
        if receiver is not None:
            self._end(receiver, LeaseEvent.GONE, "has ended", now_s)

    def scrubbed(self, slots: Iterable[int], now_s: float) -> None:
        """Dirty extents were scrubbed, and may be offered again."""
        for slot in slots:
            self._table.scrubbed(slot)
        self._rebalance(now_s)

    def drain(self, now_s: float) -> None:
        """Ask everything back and lend no more."""
        self.draining = True
        self._rebalance(now_s)

    def limit(self, receiver: str | None, each: bool, extents: int | None, now_s: float) -> None:
        """Set or lift (None) a limit, see `Limits.set`; lending in all goes on after a drain."""
        self.limits.set(receiver, each, extents)
        self.drained = self.drained and (receiver is not None or each)
        self._rebalance(now_s)

    def drain_for_operator(self, now_s: float) -> None:
        """Ask everything back and lend no more until a limit is set or lifted."""
        self.drained = True
        self._rebalance(now_s)

    def lend(self, slots: Iterable[int], target: int, now_s: float) -> None:
        """The engine hands over extents that it kept, which read as zeros; see `aim`."""
        for slot in slots:
            self._table.put(slot)
        self.aim(target, now_s)

    def aim(self, target: int, now_s: float) -> None:
        """The engine means to have this many extents lent; what is over is asked back."""
        self._target = target
        self._rebalance(now_s)

    @property
    def demand(self) -> int:
        """Extents that receivers could be lent beyond those that the engine has handed over."""
        if self.draining or self.drained:
            return 0
        heard = [r for r in self._receivers.values() if not r.silent]
        most = sum(fair_shares(self.limits.of_all(self._extents), self._claims(heard)))
        lent = sum(self._held(r) for r in self._receivers.values())
        return max(0, most - lent - self._table.clean)

    def tick(self, now_s: float) -> None:
        """See to time-outs; called at each heartbeat."""
        stalled_s = now_s - (self._ticked_s if self._ticked_s is not None else now_s)
        self._ticked_s = now_s
        if stalled_s > self._settings.lost_after_s / 2:
            # This process was stopped or starved. What its peers said meanwhile waits to be read.
            for receiver in self._receivers.values():
                receiver.heard_s = now_s
        for receiver in list(self._receivers.values()):
            self._see_to(receiver, now_s)
        self._rebalance(now_s)

    def receivers(self, now_s: float) -> list[ReceiverStatus]:
        """All sessions, for status."""
        return [
            ReceiverStatus(
                name=receiver.name,
                pid=receiver.pid,
                uid=receiver.uid,
                extents=self._states(receiver),
                bytes=self._held(receiver) * self._extent_bytes,
                heartbeat_age_s=max(0.0, now_s - receiver.heard_s),
                link=receiver.link,
                gb_per_s=receiver.gb_per_s,
            )
            for receiver in self._receivers.values()
        ]

    def _see_to(self, receiver: Receiver, now_s: float) -> None:
        settings, token = self._settings, receiver.token
        silent_s = now_s - receiver.heard_s
        if not receiver.silent and silent_s > settings.lost_after_s:
            receiver.silent = True
            self._table.apply_to_all(LeaseEvent.SILENCE, token, now_s)
            logger.warning(
                "%s has been silent for %.1f s: %s orphaned until it speaks or its process ends",
                receiver,
                silent_s,
                self._amount(self._held(receiver)),
            )
        if self._table.withdraw_offers(token, settings.offer_timeout_s, now_s):
            receiver.no_offer_before_s = now_s + settings.offer_timeout_s
            receiver.reclaim_reason = _UNANSWERED
            self._send_reclaims(receiver, now_s)
        elif now_s - receiver.reclaim_sent_s >= settings.heartbeat_s:
            self._send_reclaims(receiver, now_s)
        if late := self._table.expire(token, settings.reclaim_deadline_s, now_s):
            logger.warning(
                "%s has not released %s within %.1f s: degraded, not used until it does or its "
                "process ends",
                receiver,
                self._amount(len(late)),
                settings.reclaim_deadline_s,
            )

    def _rebalance(self, now_s: float) -> None:
        """Move towards equal shares: ask back what is over, offer what is missing."""
        heard = [r for r in self._receivers.values() if not r.silent]
        stuck = sum(self._held(r) for r in self._receivers.values() if r.silent)
        if self._engine is not None:
            # It needs so much, and from whom is all one; an operator's limit is nobody's need.
            stuck += sum(self._states(r)[LeaseState.DEGRADED] for r in heard)
        lendable = min(self._extents - self._table.kept, self._target)
        room = max(0, self.limits.of_all(lendable) - stuck)
        shares = fair_shares(room, self._claims(heard))
        crowded = sum(self._keeps(r) for r in heard) > room
        for receiver, share in zip(heard, shares, strict=True):
            receiver.target = share
            self._take_back(receiver, now_s, crowded)
        for receiver in heard:
            self._offer_missing(receiver, now_s)
        if self._engine is not None:
            self._return_idle(self._engine, heard)

    def _claims(self, receivers: Iterable[Receiver]) -> list[Claim]:
        closed = self.draining or self.drained
        return [
            # Without a door it can be lent no more, and is about to find out.
            Claim(
                0 if closed or not r.door_open else self.limits.of(r.name, r.wanted),
                self._keeps(r),
            )
            for r in receivers
        ]

    def _return_idle(self, engine: Engine, heard: Iterable[Receiver]) -> None:
        """Give the engine back what no receiver is about to get."""
        missing = sum(max(0, r.target - self._keeps(r)) for r in heard)
        idle = self._table.keep_clean(max(0, self._table.clean - missing))
        if idle:
            engine.take_returned(idle)

    def _take_back(self, receiver: Receiver, now_s: float, crowded: bool) -> None:
        over = self._keeps(receiver) - receiver.target
        if over <= 0:
            return
        reason = self._reason(receiver, crowded)
        slots = self._table.reclaim(receiver.token, over, now_s)
        if self.draining:
            slots += self._table.withdraw_offers(receiver.token, 0.0, now_s)
        if not slots:
            return
        receiver.reclaim_reason = reason
        logger.info("asked %s back from %s: %s", self._amount(len(slots)), receiver, reason)
        self._send_reclaims(receiver, now_s)

    def _reason(self, receiver: Receiver, crowded: bool) -> str:
        """Why `receiver` is to hold less. `crowded`: all together hold more than is lent now.

        Read off how things stand: one that was silent may hear of a limit long after it was set.
        """
        keeps, total = self._keeps(receiver), self.limits.total
        if self.draining:
            return _ENDING
        if not receiver.door_open:
            return _CLOSED
        if self.drained:
            return _DRAINED
        if self.limits.of(receiver.name, keeps) < keeps:
            return _LIMITED
        if not crowded:
            return SHARING
        return _ENGINE if total is None or self._target < total else _LIMITED

    def _offer_missing(self, receiver: Receiver, now_s: float) -> None:
        """Offer a part of what is missing, unless a part that was offered is not answered yet.

        A receiver may take a second to map a part; those behind it would be overdue meanwhile.
        """
        waits = not receiver.door_open or now_s < receiver.no_offer_before_s
        if waits or self._states(receiver)[LeaseState.OFFERED]:
            return
        missing = receiver.target - self._keeps(receiver)
        if missing > 0:
            most = min(missing, self._extents_per_offer)
            grant = self._table.offer(receiver.token, most, now_s)
            if grant is not None:
                receiver.port.offer(grant)

    def _send_reclaims(self, receiver: Receiver, now_s: float) -> None:
        asked_s = self._table.asked_since_s(receiver.token)
        receiver.reclaim_sent_s = now_s
        left_s = 0.0
        if asked_s is not None:
            left_s = max(0.0, asked_s + self._settings.reclaim_deadline_s - now_s)
        for grant, slots in self._table.reclaiming(receiver.token).items():
            receiver.port.tell(
                Reclaim(grant=grant, slots=slots, deadline_s=left_s, reason=receiver.reclaim_reason)
            )

    def _apply(
        self,
        event: LeaseEvent,
        receiver: Receiver,
        message: Accept | Decline | Released,
        now_s: float,
    ) -> None:
        if self._table.apply(event, receiver.token, message.grant, message.slots, now_s):
            self._freed()

    def _freed(self) -> None:
        """Extents have become free, and are dirty."""
        if self._engine is not None:
            self._engine.take_returned(self._table.keep_dirty())
        self._dirtied()

    def _end(self, receiver: Receiver, event: LeaseEvent, how: str, now_s: float) -> None:
        logger.info("%s %s: %s back", receiver, how, self._amount(self._held(receiver)))
        del self._receivers[receiver.token]
        receiver.port.close()
        if self._table.apply_to_all(event, receiver.token, now_s):
            self._freed()
        self._rebalance(now_s)

    def _states(self, receiver: Receiver) -> dict[str, int]:
        counts = self._table.counts_of(receiver.token)
        return {state: n for state, n in counts.items() if state is not LeaseState.FREE}

    def _held(self, receiver: Receiver) -> int:
        return sum(self._states(receiver).values())

    def _keeps(self, receiver: Receiver) -> int:
        """Extents that it holds, less those asked back."""
        states = self._states(receiver)
        return states[LeaseState.OFFERED] + states[LeaseState.LENT]

    def _amount(self, extents: int) -> str:
        return f"{count_extents(extents)} ({format_size(extents * self._extent_bytes)})"
