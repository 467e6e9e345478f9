"""Ending a request that waits for memory which does not come."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

logger = logging.getLogger(__name__)


def abort(scheduler: Any, request: Any, why: str) -> None:
    """End a request that waits, and tell whoever sent it."""
    scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r is not request]
    logger.warning("SwiftCache: aborted request %s: %s", request.rid, why)
    reason = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": why}
    scheduler.ipc_channels.send_to_tokenizer.send_output(
        AbortReq(finished_reason=reason, rid=request.rid), request
    )
