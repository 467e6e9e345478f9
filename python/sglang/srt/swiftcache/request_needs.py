"""What the requests of a scheduler may yet take of the KV pool, as its admission reckons it."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, match_prefix_for_req

# More of them do not run at once in a pool that is short of memory.
WAITING_LOOKED_AT = 64


def match_waiting(scheduler: Any, again: bool) -> None:
    """Have SGLang find what is cached of those that wait, which it does itself as it admits them.

    Each is looked up once, or ``again``: the tree changes while a request waits, and what it is
    about to use must not become cold.
    """
    for request in scheduler.waiting_queue[:WAITING_LOOKED_AT]:
        if again or request.last_node is None:
            match_prefix_for_req(scheduler.tree_cache, request, include_req=True)


def decoding_next(scheduler: Any, running_batch: Any, last_batch: Any) -> list[Any]:
    """Requests that run, with those of a prefill in flight, which SGLang has yet to merge."""
    running: list[Any] = running_batch.reqs
    if last_batch is None or not last_batch.forward_mode.is_extend():
        return running
    return running + [r for r in last_batch.reqs if r is not scheduler.chunked_req]


def tokens_in_all(request: Any, page_size: int) -> int:
    """What a request takes, cached or not: prompt, answer, and the page that SGLang adds.

    It is admitted where there is more than that.
    """
    prompt = len(request.origin_input_ids) + len(request.output_ids)
    return prompt + _new_tokens(request) + page_size


def tokens_of_waiting(request: Any, page_size: int) -> int:
    """What a request takes that is admitted now, beyond what is cached of its prompt."""
    return tokens_in_all(request, page_size) - len(request.prefix_indices)


def tokens_needed(scheduler: Any, decoding: list[Any]) -> int:
    """Of all requests that run or wait, beyond what they have; see `match_waiting`."""
    page_size = scheduler.page_size
    waiting = scheduler.waiting_queue[:WAITING_LOOKED_AT]
    if scheduler.chunked_req is not None:
        waiting = [scheduler.chunked_req, *waiting]
    ratio = scheduler.new_token_ratio_tracker.current
    needed = int(sum(_new_tokens(request) for request in decoding) * ratio)
    return needed + sum(tokens_of_waiting(request, page_size) for request in waiting)


def _new_tokens(request: Any) -> int:
    left = request.sampling_params.max_new_tokens - len(request.output_ids)
    return max(0, min(left, CLIP_MAX_NEW_TOKENS))
