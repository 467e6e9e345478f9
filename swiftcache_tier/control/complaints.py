"""Log lines about peers that speak nonsense, kept few however much they speak."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

_PEERS_MAX = 64


class Complaints:
    """Logs one warning for each peer and second; the next one says how many it stands for.

    Peers beyond the first 64 of a second share a line. Used by one thread.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._logged_s: dict[Hashable, float] = {}
        self._kept_back: dict[Hashable, int] = {}

    def note(self, peer: Hashable, complaint: str) -> None:
        """Log `complaint`, unless a line about this peer was logged less than a second ago."""
        now_s = self._clock()
        if peer not in self._logged_s and len(self._logged_s) >= _PEERS_MAX:
            self._forget_quiet(now_s)
            if len(self._logged_s) >= _PEERS_MAX:
                peer = None
        if now_s - self._logged_s.get(peer, -self._interval_s) < self._interval_s:
            self._kept_back[peer] = self._kept_back.get(peer, 0) + 1
            return
        self._logged_s[peer] = now_s
        more = self._kept_back.pop(peer, 0)
        self._logger.warning(
            "%s%s", complaint, f" (and {more} more like it since the last line)" if more else ""
        )

    def _forget_quiet(self, now_s: float) -> None:
        for peer, logged_s in list(self._logged_s.items()):
            if now_s - logged_s >= self._interval_s:
                del self._logged_s[peer]
                self._kept_back.pop(peer, None)
