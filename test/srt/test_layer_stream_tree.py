"""The tree with a layer window: right content in every layer, nothing lost, order of use."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang.srt.swiftcache.expiry import Expiry
from sglang.srt.swiftcache.layer_stream import wiring
from sglang.srt.swiftcache.layer_stream.admission import streams
from sglang.srt.swiftcache.state_dump import StateDump
from support.kv_tree import vacated
from support.slow_streams import SlowLife, SlowStreams
from support.stream_tree import LAYERS, PAGE, Request, StreamTree


def prompt(kind: int, tokens: int) -> list[int]:
    """Prompts of one kind are prefixes of each other; different kinds part after eight tokens."""
    return ([1, 2, 3, 4, 5, 6, 7, 8] + [100 + kind] * tokens)[:tokens]


@pytest.fixture
def tree() -> StreamTree:
    """28 regular tokens (7 pages) and 96 window tokens."""
    return StreamTree(2, 6)


def window_tokens(tree: StreamTree) -> int:
    return tree.allocator.book.used_window * PAGE


def test_what_fits_uses_no_window(tree: StreamTree) -> None:
    for kind in range(8):
        assert tree.run(prompt(kind, 20)) is not None
        tree.check()
    assert window_tokens(tree) == 0
    assert tree.streamer.gathered_bytes == 0


@pytest.mark.parametrize("chunk", [None, 8, 13])
def test_a_prompt_beyond_the_regular_slots_is_computed(tree: StreamTree, chunk: int | None) -> None:
    request = tree.start(prompt(1, 100), chunk)
    assert request is not None
    tree.check()
    assert window_tokens(tree) >= 100 - 28
    for token in range(9):
        assert tree.decode([request], token)
        tree.check()
    tree.finish(request)
    tree.check()


def test_streamed_and_resident_requests_share_a_forward(tree: StreamTree) -> None:
    resident, streamed = tree.start(prompt(2, 12)), tree.start(prompt(1, 60))
    assert resident is not None
    assert streamed is not None
    for token in range(5):
        assert tree.decode([resident, streamed], token)
        tree.check()
    third = tree.start(prompt(3, 21), 8, beside=[streamed, resident])
    assert third is not None, "prefilled beside what decodes"
    tree.check()
    assert tree.decode([third, resident, streamed], 1)
    for request in (streamed, third, resident):
        tree.finish(request)
        tree.check()


def test_the_next_turn_finds_it_again(tree: StreamTree) -> None:
    assert tree.run(prompt(1, 90)) == 0
    assert tree.run(prompt(1, 110)) == 88
    tree.check()


def test_cold_regular_pages_go_before_a_window_page_is_used(tree: StreamTree) -> None:
    assert tree.run(prompt(1, 24)) is not None
    assert tree.run(prompt(2, 24)) is not None
    assert window_tokens(tree) == 0
    tree.check()
    # what was cold is with donors, and comes back
    assert tree.run(prompt(1, 24)) == 20


def test_evicted_window_nodes_come_back_without_a_copy(tree: StreamTree) -> None:
    assert tree.run(prompt(1, 110)) == 0
    tree.cache.check_hicache_events()  # writes that have completed hold nothing any more
    tree.cache.evict(EvictParams(num_tokens=tree.tokens_total))
    assert tree.allocator.available_size() == tree.tokens_total
    tree.check()
    assert tree.run(prompt(1, 110)) == 108
    loaded = tree.cache.tier_pool.loaded_bytes
    assert loaded <= 28 * tree.cache.tier_pool.size_per_token, "only regular slots are copied to"
    hits = tree.cache.tier_pool.traffic.hit_blocks_by_donor
    assert sum(hits.values()) * tree.cache.page_size == 108, "those taken over count as well"
    tree.check()


def test_a_shared_prefix_is_streamed_once_for_all_that_read_it(tree: StreamTree) -> None:
    first = tree.start(prompt(1, 72))
    second = tree.start(prompt(1, 72))
    assert first is not None
    assert second is not None
    before = tree.streamer.gathered_bytes
    assert tree.decode([first], 1)
    alone = tree.streamer.gathered_bytes - before
    before = tree.streamer.gathered_bytes
    assert tree.decode([first, second], 1)
    together = tree.streamer.gathered_bytes - before
    page_bytes = tree.cache.tier_pool.block_layout.block_bytes
    # apart from the last page of each, they have all pages in common
    assert alone > 8 * page_bytes
    assert together <= alone + 2 * page_bytes
    for request in (first, second):
        tree.finish(request)
    tree.check()


def test_what_is_read_again_moves_to_regular_slots_that_have_come_free(tree: StreamTree) -> None:
    short = tree.start(prompt(2, 24))
    assert short is not None
    assert tree.run(prompt(1, 40)) == 8
    assert window_tokens(tree) >= 28
    tree.finish(short, insert=False)
    tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=16))
    assert tree.allocator.book.free_regular >= 4
    tree.check()
    assert tree.run(prompt(1, 40)) == 36
    tree.check()
    assert tree.cache.promoted_tokens >= 16
    gathered = tree.streamer.gathered_bytes
    request = tree.start(prompt(1, 20))
    assert request is not None
    assert tree.decode([request], 5)
    assert tree.streamer.gathered_bytes == gathered, "it is on regular slots"


def waiting(tree: StreamTree, tokens: int, output: int = 4, prefix: Request | None = None) -> Any:
    """A request that SGLang's scheduler is about to look at; its prefix is another one's prompt."""
    cached = len(prefix.origin_input_ids) // PAGE * PAGE if prefix is not None else 0
    return SimpleNamespace(
        last_node=tree.cache.root_node if prefix is None else prefix.last_node,
        full_untruncated_fill_ids=[3] * tokens,
        prefix_indices=torch.zeros(cached, dtype=torch.int64),
        sampling_params=SimpleNamespace(max_new_tokens=output),
        output_ids=[],
    )


def adder(tree: StreamTree, admitted: Sequence[Any] = (), ratio: float = 1.0) -> Any:
    """SGLang's, in a round in which it has admitted these. ratio: its estimate of outputs."""
    running = SimpleNamespace(reqs=list(tree.running))
    return SimpleNamespace(
        running_batch=running, can_run_list=list(admitted), new_token_ratio=ratio
    )


def may_run(tree: StreamTree, tokens: int, output: int = 4, **more: Any) -> bool:
    return tree.cache.admission.may_run(adder(tree), waiting(tree, tokens, output, **more))


def add_one_req(tree: StreamTree, request: Any, says: Any = AddReqResult.NO_TOKEN) -> Any:
    """What SGLang is told, which itself admits a request only if it ``says`` CONTINUE."""

    def original(adder: Any, request: Any) -> Any:
        if says == AddReqResult.CONTINUE:
            adder.can_run_list.append(request)
            adder.tree_cache.inc_lock_ref(request.last_node)
        return says

    asked = adder(tree)
    asked.tree_cache = tree.cache
    return wiring.add_one_req(original, asked, request)


def test_what_is_not_admitted_is_not_promoted() -> None:
    """A load starts with a batch; without one it would keep its blocks from their donor."""
    tree = StreamTree(2, 6)
    short = tree.start(prompt(2, 24))
    assert short is not None
    assert tree.run(prompt(1, 40)) is not None
    tree.finish(short, insert=False)
    tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=16))
    request = waiting(tree, 44)
    key = RadixKey(token_ids=array("q", prompt(1, 39)), extra_key=None)
    match = tree.cache.match_prefix(MatchPrefixParams(key=key))
    request.last_node, request.prefix_indices = match.last_device_node, match.device_indices
    assert add_one_req(tree, request, AddReqResult.NO_TOKEN) == AddReqResult.NO_TOKEN
    assert not tree.cache.ongoing_load_back
    assert tree.cache.promoted_tokens == 0
    tree.check()
    assert add_one_req(tree, request, AddReqResult.CONTINUE) == AddReqResult.CONTINUE
    assert tree.cache.promoted_tokens > 0
    assert tree.cache.ready_to_load_host_cache() >= 0, "the batch starts"
    tree.cache.dec_lock_ref(request.last_node)
    tree.tier.ask_back(1, range(64))
    for _ in range(6):
        tree.cache.check_hicache_events()
    assert not tree.tier.waiting, "the donor did not get its memory back"
    tree.check()


def with_budget(pages: int, regular_units: int = 2, window_units: int = 6) -> StreamTree:
    """28 regular tokens of which four are kept, 96 window tokens; so many pages a step."""
    budget_bytes = pages * LAYERS * 2 * PAGE * 256
    return StreamTree(regular_units, window_units, donor_extents=400, budget_bytes=budget_bytes)


def test_what_streams_beyond_the_budget_waits_for_what_runs() -> None:
    tree = with_budget(4)
    assert may_run(tree, 100), "alone it may take what it likes"
    short = tree.start(prompt(2, 8))
    assert short is not None
    assert may_run(tree, 8), "it fits in regular slots"
    assert may_run(tree, 24), "it streams within the budget"
    assert not may_run(tree, 60)
    tree.finish(short)
    assert may_run(tree, 60)


def test_what_running_requests_will_yet_take_counts() -> None:
    tree = with_budget(4)
    assert tree.start(prompt(2, 8), output=24) is not None
    assert not may_run(tree, 24), "regular slots that the other wants are not there for it"
    ended = waiting(tree, 24)
    assert tree.cache.admission.may_run(adder(tree, ratio=0.1), ended), "it will stop early"


def test_requests_that_were_admitted_in_the_same_round_count() -> None:
    tree = with_budget(8)
    assert tree.start(prompt(2, 8), output=4) is not None
    admitted: list[Any] = []
    for _ in range(12):
        request = waiting(tree, 24)
        if not tree.cache.admission.may_run(adder(tree, admitted), request):
            break
        admitted.append(request)
    assert len(admitted) == 1, "4 of its 7 pages are regular, and the next one would stream 7"


@pytest.mark.parametrize("budget", [1, 3, 8, 15])
def test_the_budget_holds_until_all_have_written_their_last_token(budget: int) -> None:
    tree = with_budget(budget)
    admitted: list[Any] = []
    for tokens in (6, 20, 9, 30, 5, 5, 13):
        request = waiting(tree, tokens, output=6)
        if tree.cache.admission.may_run(adder(tree, admitted), request):
            admitted.append(request)
    assert len(admitted) > 1
    for at, request in enumerate(admitted):
        tokens = [50 + at] * len(request.full_untruncated_fill_ids)
        assert tree.start(tokens, streams=streams(request), output=6) is not None
    most = tree.allocator.book.used_window
    for token in range(6):
        assert tree.decode(tree.running, token)
        tree.check()
        most = max(most, tree.allocator.book.used_window)
    assert most <= budget


def test_short_requests_run_beside_one_that_takes_the_whole_budget() -> None:
    tree = with_budget(4, regular_units=8)
    book = tree.allocator.book
    assert (book.regular_pages, tree.allocator.kept_pages) == (31, 4)
    long = waiting(tree, 180, output=8)
    assert tree.cache.admission.may_run(adder(tree), long)
    assert tree.start([1] * 180, 16, streams=streams(long), output=8) is not None
    assert book.free_regular == 4
    assert book.used_window > 4
    assert may_run(tree, 5, output=3)
    first = tree.start([2] * 5, output=3)
    assert first is not None
    assert may_run(tree, 4, output=4)
    second = tree.start([3] * 4, output=4)
    assert second is not None
    assert not may_run(tree, 4, output=4), "what is kept is taken"
    assert not may_run(tree, 4, output=200), "it would stream"
    for token in range(3):
        assert tree.decode(tree.running, token)
        tree.check()
    held = tree.allocator.rows.get(first.req_pool_idx, first.computed)
    assert not book.is_window(held).any()
    tree.finish(first)
    tree.finish(second)
    assert add_one_req(tree, waiting(tree, 16)) == AddReqResult.OTHER, "copies are being made"
    tree.cache.check_hicache_events()
    assert may_run(tree, 12), "what is cold may be evicted for it"
    assert add_one_req(tree, waiting(tree, 16)) == AddReqResult.NO_TOKEN


def test_one_that_fits_takes_all_regular_slots() -> None:
    tree = with_budget(4)
    near = waiting(tree, 24)
    assert tree.cache.admission.may_run(adder(tree), near)
    assert not streams(near)
    assert tree.start(prompt(1, 24)) is not None
    assert window_tokens(tree) == 0


@pytest.mark.parametrize("chunk", [None, 12])
def test_one_that_streams_takes_kept_slots_rather_than_none(chunk: int | None) -> None:
    tree = with_budget(4)
    tokens = tree.tokens_total - PAGE
    request = tree.start(prompt(1, tokens), chunk, streams=True)
    assert request is not None
    tree.check()
    tree.finish(request)
    tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=tree.tokens_total))
    # all of it is loaded back, which takes all slots too
    again = tree.start(prompt(1, tokens), chunk, streams=True)
    assert again is not None
    assert again.cached == tokens - PAGE  # type: ignore[attr-defined]
    tree.check()


def test_what_is_loaded_into_kept_slots_is_worth_a_load() -> None:
    tree = with_budget(4)
    assert tree.run(prompt(1, 101)) == 0
    tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=tree.tokens_total))
    # HiCache loads no less; 25 pages are one more than the window has
    tree.cache.load_back_threshold = 3 * PAGE - 2
    tree.allocator.kept_pages = 7
    again = tree.start(prompt(1, 101), streams=True)
    assert again is not None
    assert again.cached == 100  # type: ignore[attr-defined]
    assert window_tokens(tree) == 23 * PAGE
    tree.check()


def test_in_a_batch_of_both_kinds_those_that_fit_come_first() -> None:
    tree = with_budget(100, regular_units=8)
    rows, book = tree.allocator.rows, tree.allocator.book
    stream, short = tree.start([7] * 124, streams=True), tree.start([8] * 4)
    assert stream is not None
    assert short is not None
    assert book.free_regular == 3
    assert tree.decode([stream, short], 1), "a page for each"
    tree.check()
    assert book.free_regular == 2
    assert book.is_window(rows.get(stream.req_pool_idx, 125))[-1]
    assert not book.is_window(rows.get(short.req_pool_idx, 5)).any()


def test_a_shared_prefix_counts_once_against_the_budget() -> None:
    tree = with_budget(20)
    first = tree.start(prompt(1, 80))
    assert first is not None
    held = tree.allocator.book.used_window
    assert held >= 13
    second = tree.start(prompt(1, 80))
    assert second is not None
    assert may_run(tree, 84, prefix=first)
    assert not may_run(tree, 84)


def test_running_out_is_told_not_raised(tree: StreamTree) -> None:
    request = tree.start(prompt(1, 100))
    assert request is not None
    assert tree.start(prompt(2, 60)) is None
    tree.check()
    tree.finish(request)
    assert tree.start(prompt(2, 60)) is not None


def test_homes_move_to_another_donor_while_a_request_streams() -> None:
    tree = StreamTree(2, 6, donor_extents=48)
    request = tree.start(prompt(1, 100))
    assert request is not None
    tree.tier.join(2, 48)
    tree.tier.ask_back(1, range(48))
    for token in range(6):
        tree.cache.check_hicache_events()
        assert tree.cache.stranded(tree.running) is None
        assert tree.decode([request], token)
        tree.check()
    assert not tree.tier.waiting, "the donor did not get its memory back"
    assert tree.cache.stats.moved_blocks > 0
    tree.finish(request)
    tree.check()


def test_homes_with_nowhere_to_go_cost_a_request_its_place_and_nothing_else() -> None:
    tree = StreamTree(2, 6, donor_extents=48)
    request = tree.start(prompt(1, 100))
    assert request is not None
    assert tree.decode([request], 3)
    tree.tier.ask_back(1, range(48))
    for _ in range(6):
        tree.cache.check_hicache_events()
        tree.retract_stranded()
        lost = tree.allocator.book.pages_with_homes_in(tree.tier.must_vacate())
        assert tree.allocator.book.in_use(lost).all(), "another request could get it"
        tree.check()
    assert not tree.running
    assert not tree.tier.waiting
    assert tree.allocator.book.retired == 24
    # 28 tokens are left until there is a donor again
    assert tree.start(prompt(1, 100)) is None
    tree.tier.join(2, 48)
    tree.cache.check_hicache_events()
    assert tree.allocator.book.retired == 0
    assert tree.run(prompt(1, 100)) == 28, "what was on regular slots is still there"
    tree.check()


def fill_with_cold_copies(tree: StreamTree) -> None:
    for kind in range(20):
        assert tree.run([1000 + kind] * 24) is not None
        tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=tree.tokens_total))
    assert tree.tier.free_blocks < 4


def test_what_is_logged_of_memory_asked_back_adds_up(caplog: pytest.LogCaptureFixture) -> None:
    """Also where part of it are homes, which move or retire after the copies."""
    caplog.set_level(logging.INFO)
    tree = StreamTree(2, 6, donor_extents=36)
    tree.tier.join(2, 36)
    fill_with_cold_copies(tree)
    assert tree.run(prompt(1, 100)) is not None
    for key in (1, 2):
        tree.tier.ask_back(key, range(36))
        for _ in range(6):
            tree.cache.check_hicache_events()
            tree.check()
    vacated(caplog.records, tree.cache.stats.lost_blocks)


def test_cold_copies_make_room_for_homes_that_must_move() -> None:
    tree = StreamTree(2, 6, donor_extents=36)
    tree.tier.join(2, 36)
    fill_with_cold_copies(tree)
    tree.tier.ask_back(1, range(36))
    for _ in range(6):
        tree.cache.check_hicache_events()
        tree.check()
    assert not tree.tier.waiting
    assert tree.allocator.book.retired == 0
    assert tree.run(prompt(1, 100)) is not None


def test_a_prefill_whose_promised_pages_went_with_a_donor_starts_over() -> None:
    """Between two of its chunks; SGLang takes the next one without looking for room."""
    tree = StreamTree(2, 6, donor_extents=48)
    request = tree.start_in_chunks(prompt(1, 100))
    assert request is not None
    assert tree.next_chunk(8)
    tree.tier.ask_back(1, range(48))
    chunks = 1
    while tree.next_chunk(8):
        tree.check()
        chunks += 1
    assert 8 * chunks <= 28, "it went on as long as there were slots"
    tree.check()
    assert not tree.running
    tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    tree.tier.join(2, 48)
    tree.cache.check_hicache_events()
    assert tree.run(prompt(1, 100)) == 8 * chunks, "what it had computed is still there"
    tree.check()


def test_a_prefill_whose_pages_lose_their_homes_starts_over() -> None:
    tree = StreamTree(2, 6, donor_extents=48)
    assert tree.start_in_chunks(prompt(1, 100)) is not None
    assert tree.next_chunk(80)
    assert window_tokens(tree) > 0
    tree.tier.ask_back(1, range(48))
    assert not tree.next_chunk(8)
    for _ in range(3):
        tree.cache.check_hicache_events()
        tree.check()
    assert not tree.tier.waiting


def test_a_chunk_leaves_room_for_the_decodes_in_its_forward() -> None:
    tree = StreamTree(2, 6, donor_extents=48)
    others = [tree.start(prompt(kind, 8)) for kind in (2, 3)]
    assert tree.start_in_chunks(prompt(1, 100)) is not None
    tree.tier.ask_back(1, range(48))
    tree.cache.check_hicache_events()
    free = tree.allocator.available_size()
    assert tree.allocator.book.free_window == 0
    assert not tree.next_chunk(free, [other for other in others if other])
    tree.check()


def test_a_tier_with_no_spare_block_still_evicts() -> None:
    tree = StreamTree(2, 6, donor_extents=31, extent_bytes=8192)
    assert tree.tier.free_blocks < 24
    for kind in range(6):
        assert tree.run(prompt(kind, 90)) is not None
        tree.check()


def test_a_missed_gather_would_be_seen(tree: StreamTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the window is poisoned, so what is not gathered is not there."""
    request = tree.start(prompt(1, 100))
    assert request is not None
    monkeypatch.setattr(tree.streamer._mover, "gather", lambda layer: None)
    with pytest.raises(AssertionError, match="wrong KV"):
        tree.decode([request], 1)


def test_a_missed_scatter_would_be_seen(tree: StreamTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree.streamer._mover, "scatter", lambda layer: None)
    request = tree.start(prompt(1, 100))
    assert request is not None
    with pytest.raises(AssertionError, match="wrong KV"):
        tree.decode([request], 1)


def test_a_model_that_leaves_a_layer_out_is_told(tree: StreamTree) -> None:
    request = tree.start(prompt(1, 100))
    assert request is not None
    plan = tree.cache.plan(tree._batch([request], torch.tensor([100]), [1], decode=True))
    with tree.streamer.planned(plan), tree.streamer.forward():
        with pytest.raises(RuntimeError, match="left out"):
            tree.streamer.wrap_model(lambda: [tree.pool.get_key_buffer(n) for n in (0, 2)])()
        with pytest.raises(RuntimeError, match=f"expected {LAYERS - 1}"):
            tree.streamer.wrap_model(lambda: tree.pool.get_key_buffer(0))()


class StreamMachine(RuleBasedStateMachine):
    """Requests short and long, chunks, aborts, evictions, flushes; donors that come and go."""

    streams: SlowStreams | None = None

    @initialize(
        policy=st.sampled_from(("write_through", "write_through_selective")),
        window=st.integers(1, 5),
        extent_bytes=st.sampled_from([4096, 12288]),
        extents=st.integers(20, 60),
    )
    def begin(self, policy: str, window: int, extent_bytes: int, extents: int) -> None:
        self.tree = StreamTree(
            2,
            window,
            policy,
            donor_extents=extents,
            extent_bytes=extent_bytes,
            streams=self.streams,
        )
        self.lent = {1: set(range(extents))}

    @rule(prompts=st.lists(st.tuples(st.integers(0, 4), st.integers(2, 110)), max_size=4))
    def whole_requests(self, prompts: Sequence[tuple[int, int]]) -> None:
        for kind, tokens in prompts:
            self.tree.run(prompt(kind, tokens))

    @rule(
        kind=st.integers(0, 4),
        tokens=st.integers(2, 110),
        tail=st.integers(0, 2),
        chunk=st.sampled_from([None, 8, 11]),
        streams=st.booleans(),
    )
    def request(self, kind: int, tokens: int, tail: int, chunk: int | None, streams: bool) -> None:
        ids = prompt(kind, tokens)
        ids[len(ids) // 2 :] = [t + tail for t in ids[len(ids) // 2 :]]
        if len(self.tree.running) < 3:
            beside = self.tree.decoding[:1] if tail else ()
            self.tree.start(ids, chunk, beside=beside, streams=streams)

    @rule(kind=st.integers(0, 4), tokens=st.integers(20, 110))
    def request_in_chunks(self, kind: int, tokens: int) -> None:
        self.tree.start_in_chunks(prompt(kind, tokens))

    @precondition(lambda self: self.tree.chunked)
    @rule(tokens=st.sampled_from([8, 11, 32]), mixed=st.booleans())
    def chunk(self, tokens: int, mixed: bool) -> None:
        self.tree.next_chunk(tokens, self.tree.decoding if mixed else ())

    @precondition(lambda self: self.tree.decoding)
    @rule(steps=st.integers(1, 6), token=st.integers(1, 3))
    def decode(self, steps: int, token: int) -> None:
        for _ in range(steps):
            self.tree.decode(self.tree.decoding, token)

    @precondition(lambda self: self.tree.running)
    @rule(abort=st.booleans())
    def end(self, abort: bool) -> None:
        first = self.tree.running[0]
        self.tree.finish(first, insert=not abort and first is not self.tree.chunked)

    @rule(key=st.integers(1, 3), extents=st.integers(1, 40))
    def join(self, key: int, extents: int) -> None:
        if key not in self.lent:
            self.tree.tier.join(key, extents)
            self.lent[key] = set(range(extents))

    @rule(key=st.integers(1, 3), count=st.integers(1, 30))
    def ask_back(self, key: int, count: int) -> None:
        slots = sorted(self.lent.get(key, ()))[:count]
        if slots:
            self.tree.tier.ask_back(key, slots)
            self.lent[key] -= set(slots)

    @rule()
    def step(self) -> None:
        self.tree.cache.check_hicache_events()
        self.tree.retract_stranded()

    @rule(share=st.floats(0, 1))
    def expire(self, share: float) -> None:
        """The older part of all nodes, or every one, has not been used for the TTL."""
        times_s = [*sorted(node.last_access_time for node in self.tree.nodes()), time.monotonic()]
        oldest_left_s = times_s[round(share * (len(times_s) - 1))]
        Expiry(self.tree.cache, self.tree.cache._vacater, 1.0).forget_older_than(oldest_left_s)

    @rule(tokens=st.integers(1, 120))
    def evict_device(self, tokens: int) -> None:
        self.tree.cache.evict(EvictParams(num_tokens=tokens))

    @rule(tokens=st.integers(1, 60))
    def evict_host(self, tokens: int) -> None:
        self.tree.cache.evict_host(tokens)

    @rule()
    def flush(self) -> None:
        if not self.tree.running and self.tree.tier.free_blocks + self.tree.tier.used_blocks:
            self.tree.cache.reset()
            self.tree.allocator.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()

    @invariant()
    def the_watchdog_finds_no_fault_with_blocks(self) -> None:
        if not hasattr(self, "tree"):
            return
        idle = SimpleNamespace(
            running_batch=None,
            last_batch=None,
            cur_batch_for_debug=None,
            chunked_req=None,
            max_total_num_tokens=0,
        )
        found = [v for v in StateDump(idle, self.tree.cache).violations() if "block" in v.invariant]
        assert found == []

    def all_goes_on(self) -> None:
        """What takes its time has had it."""

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        while self.tree.running:
            self.end(abort=False)
        for key, slots in self.lent.items():
            if slots:
                self.tree.tier.ask_back(key, sorted(slots))
        for _ in range(4):
            self.all_goes_on()
            self.tree.cache.check_hicache_events()
        assert not self.tree.tier.waiting, "memory that was asked back never came"
        self.tree.check()


class SlowStreamMachine(SlowLife, StreamMachine):
    """The same life, in which loads and stores are done as late as a rule says, or when somebody
    waits for them; a forward waits for loads."""

    @rule(key=st.integers(1, 3), count=st.integers(1, 60))
    def all_back(self, key: int, count: int) -> None:
        self.ask_back(key, count)
        for _ in range(2):
            self.step()


TestStreamMachine = StreamMachine.TestCase
TestSlowStreamMachine = SlowStreamMachine.TestCase
for machine in (TestStreamMachine, TestSlowStreamMachine):
    machine.settings = settings(
        max_examples=15,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
