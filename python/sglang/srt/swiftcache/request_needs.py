"""What the requests of a scheduler may yet take of the KV pool, as its admission reckons it."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

# More of them do not run at once in a pool that is short of memory.
WAITING_LOOKED_AT = 64


def tokens_of_running(requests: list[Any], new_token_ratio: float) -> int:
    """What requests that decode may yet write. ``new_token_ratio``: the scheduler's estimate."""
    return int(sum(_new_tokens(request) for request in requests) * new_token_ratio)


def tokens_of_waiting(request: Any, page_size: int) -> int:
    """What a request takes that is admitted now: prompt, less what is cached of it, and answer."""
    cached = 0 if request.prefix_indices is None else len(request.prefix_indices)
    return tokens_at_end(request, page_size) - cached


def tokens_at_end(request: Any, page_size: int) -> int:
    """What a request has when it ends, and a page as SGLang reckons: prompt and answer."""
    prompt = len(request.origin_input_ids) + len(request.output_ids)
    return prompt + _new_tokens(request) + page_size


def tokens_needed(scheduler: Any, running: list[Any]) -> int:
    """Of all requests that run or wait, beyond what they have."""
    page_size = scheduler.page_size
    waiting = scheduler.waiting_queue[:WAITING_LOOKED_AT]
    if scheduler.chunked_req is not None:
        waiting = [scheduler.chunked_req, *waiting]
    needed = tokens_of_running(running, scheduler.new_token_ratio_tracker.current)
    return needed + sum(tokens_of_waiting(request, page_size) for request in waiting)


def _new_tokens(request: Any) -> int:
    left = request.sampling_params.max_new_tokens - len(request.output_ids)
    return max(0, min(left, CLIP_MAX_NEW_TOKENS))
