"""Requests while donors back less of the window than SGLang was told of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang.srt.swiftcache.layer_stream import wiring
from support.stream_tree import StreamTree
from swiftcache_tier.settings import Settings

EXTENTS = 48


@pytest.fixture
def tree() -> StreamTree:
    """28 regular tokens and 96 window tokens, on one donor."""
    return StreamTree(2, 6, donor_extents=EXTENTS)


def leave(tree: StreamTree) -> None:
    tree.tier.ask_back(1, range(EXTENTS))
    tree.cache.check_hicache_events()


def come_back(tree: StreamTree) -> None:
    tree.tier.join(2, EXTENTS)
    tree.cache.check_hicache_events()


def waiting(rid: str, tokens: int, output: int = 4) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[3] * tokens,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=output),
        to_finish=None,
    )


class Scheduler:
    """What the hooks use of SGLang's scheduler."""

    def __init__(self, tree: StreamTree, *queue: Any) -> None:
        self.tree_cache = tree.cache
        self.waiting_queue = list(queue)
        self.running_batch = SimpleNamespace(batch_is_full=True)
        self.aborted: list[Any] = []
        self.counted: list[dict[str, int]] = []
        sender = SimpleNamespace(send_output=lambda message, _: self.aborted.append(message))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=sender)
        self.metrics_reporter = SimpleNamespace(
            num_retracted_reqs=0,
            enable_metrics=True,
            metrics_collector=SimpleNamespace(
                increment_retracted_reqs=lambda **counts: self.counted.append(counts)
            ),
        )

    def step(self, now_s: float) -> None:
        self.tree_cache.shortage.step(self, self.running_batch, now_s)

    def _add_request_to_queue(self, request: Any, is_retracted: bool) -> None:
        assert is_retracted
        self.waiting_queue.append(request)


def add(tree: StreamTree, request: Any) -> Any:
    return wiring.add_one_req(
        lambda *_: pytest.fail("SGLang looked at it"),
        SimpleNamespace(tree_cache=tree.cache),
        request,
    )


def test_who_needs_more_than_is_backed_lets_others_pass(tree: StreamTree) -> None:
    shortage = tree.cache.shortage
    assert not shortage.is_beyond(waiting("huge", 500)), "SGLang has its own word for that"
    leave(tree)
    assert shortage.backed_tokens == 28
    assert not shortage.is_beyond(waiting("small", 19))
    assert add(tree, waiting("large", 20)) == AddReqResult.CONTINUE
    come_back(tree)
    assert not shortage.is_beyond(waiting("large", 20))


def test_who_has_waited_too_long_for_donors_is_told_what_is_missing(tree: StreamTree) -> None:
    wait_s = Settings().window_wait_s
    large, small = waiting("large", 60), waiting("small", 8)
    scheduler = Scheduler(tree, large, small)
    leave(tree)
    scheduler.step(0.0)
    come_back(tree)
    scheduler.step(wait_s - 1)
    tree.tier.ask_back(2, range(EXTENTS))
    tree.cache.check_hicache_events()
    scheduler.step(wait_s)
    scheduler.step(2 * wait_s - 1)
    assert scheduler.waiting_queue == [large, small], "donors came meanwhile: it waits anew"
    scheduler.step(2 * wait_s)
    assert scheduler.waiting_queue == [small]
    (message,) = scheduler.aborted
    assert message.rid == "large"
    assert message.finished_reason["status_code"] == 503
    assert (
        "needs 68 tokens of KV slots and 28 of this server's 124 have memory: donors lent "
        "240 KiB too little" in message.finished_reason["message"]
    )


def test_pages_that_come_back_open_admission(tree: StreamTree) -> None:
    scheduler = Scheduler(tree)
    leave(tree)
    scheduler.step(0.0)
    assert scheduler.running_batch.batch_is_full
    come_back(tree)
    scheduler.step(1.0)
    assert not scheduler.running_batch.batch_is_full


def test_the_last_request_that_finds_no_room_is_retracted_while_donors_are_missing(
    tree: StreamTree,
) -> None:
    other, last = waiting("other", 8), waiting("last", 8)
    batch = SimpleNamespace(tree_cache=tree.cache, reqs=[other, last])

    def retract(batch: Any, _: Any) -> tuple[list[Any], float, list[Any]]:
        last.to_finish = "out of memory"
        return [other], 0.5, [last]

    assert wiring.retract_decode(retract, batch, None) == ([other], 0.5, [last])
    leave(tree)
    last.to_finish = None
    assert wiring.retract_decode(retract, batch, None) == ([other, last], 0.5, [])
    assert last.to_finish is None
    assert tree.cache.status()["layer_stream"]["retracted"] == 1


def test_a_prefill_that_is_stopped_waits_behind_the_others(
    tree: StreamTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = waiting("stopped", 100)
    stopped.output_ids = [1, 2]
    stopped.reset_for_retract = lambda: None
    monkeypatch.setattr(
        "sglang.srt.swiftcache.layer_stream.shortage.release_kv_cache",
        lambda req, cache, is_insert: None,
    )
    monkeypatch.setattr(tree.cache.shortage, "may_go_on", lambda *_: False)
    scheduler = Scheduler(tree, waiting("other", 8))
    adder = SimpleNamespace(tree_cache=tree.cache)
    assert wiring.add_chunked_req(lambda *_: pytest.fail("it went on"), adder, stopped) is None
    assert stopped not in scheduler.waiting_queue, "not before the queue was looked through"
    wiring.after_admission(SimpleNamespace(running_batch=scheduler.running_batch), scheduler)
    assert [request.rid for request in scheduler.waiting_queue] == ["other", "stopped"]
    assert scheduler.counted == [
        {
            "num_retracted_reqs": 1,
            "num_retracted_input_tokens": 100,
            "num_retracted_output_tokens": 2,
        }
    ]
    assert scheduler.metrics_reporter.num_retracted_reqs == 1
    assert tree.cache.status()["layer_stream"]["retracted"] == 1
