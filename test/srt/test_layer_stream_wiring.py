"""What the hooks of the layer stream do to SGLang, and that they do nothing without a window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.swiftcache import one_line_exit
from sglang.srt.swiftcache.layer_stream import sizes, wiring
from support.donors import Donor
from swiftcache_tier.receiver.offered import offered_bytes
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import parse_specs

STOCK = SimpleNamespace(
    tree_cache=object(), model_runner=SimpleNamespace(token_to_kv_pool=object())
)


class Streamer:
    """Notes what is captured; has a plan or not."""

    def __init__(self) -> None:
        self.has_plan = False
        self.captures = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.captures = True
        yield
        self.captures = False


@pytest.fixture
def streamer() -> Streamer:
    return Streamer()


@pytest.fixture
def runner(streamer: Streamer) -> Any:
    pool = SimpleNamespace(streamer=streamer)
    return SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool))


def test_without_a_window_attention_stays_the_class_s() -> None:
    stock = SimpleNamespace(token_to_kv_pool=object(), attn_backend=object())
    wiring.follow_attention(None, stock)  # has no attribute `forward` to be read


def test_without_a_window_nothing_is_changed() -> None:
    def original(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert wiring.run_batch(original, STOCK, "batch") == ((STOCK, "batch"), {})
    assert wiring.run_forward(original, STOCK, 1, a=2) == ((STOCK, 1), {"a": 2})
    assert wiring.add_one_req(original, STOCK, "req", x=1) == ((STOCK, "req"), {"x": 1})
    assert wiring.update_running_batch(original, STOCK, "batch") == ((STOCK, "batch"), {})
    assert wiring.add_chunked_req(original, STOCK, "req") == ((STOCK, "req"), {})
    assert wiring.retract_decode(original, STOCK, "args") == ((STOCK, "args"), {})
    assert wiring.can_run_prefill_graph(original, STOCK, 3) == ((STOCK, 3), {})
    assert wiring.graph_key(original, STOCK, 8) == ((STOCK, 8, None, None), {})
    assert wiring.build_pool(original, STOCK, mha_pool_class=int)[1] == {"mha_pool_class": int}
    assert wiring.build_allocator(original, STOCK, token_to_kv_pool=1)[1] == {"token_to_kv_pool": 1}
    args = SimpleNamespace(swiftcache_layer_stream="off")
    configurator = SimpleNamespace(server_args=args)
    assert wiring.size_pool(original, configurator, 5) == ((configurator, 5), {})
    wiring.after_admission(None, STOCK)
    assert wiring.alloc_for_extend(original, STOCK) == ((STOCK,), {})
    assert wiring.alloc_for_decode(original, STOCK, token_per_req=1) == (
        (STOCK,),
        {"token_per_req": 1},
    )
    wiring.attach_streamer(None, STOCK.model_runner)


def test_each_decode_graph_is_captured_with_and_without_the_copies(
    runner: Any, streamer: Streamer
) -> None:
    captured = []

    def capture(_: Any, size: int, forward: Any, stream_idx: Any, label: str | None) -> None:
        captured.append((size, label, streamer.captures))

    wiring.capture_shape(capture, runner, 8, lambda: None)
    assert captured == [(8, None, False), (8, "streamed", True)]


def test_the_plan_chooses_the_graph(runner: Any, streamer: Streamer) -> None:
    def key(_: Any, size: int, stream_idx: Any, label: str | None) -> tuple[int, str | None]:
        return size, label

    assert wiring.graph_key(key, runner, 8) == (8, None)
    assert wiring.can_run_prefill_graph(lambda *_: True, runner) is True
    streamer.has_plan = True
    assert wiring.graph_key(key, runner, 8) == (8, "streamed")
    assert wiring.can_run_prefill_graph(lambda *_: True, runner) is False


def configurator(page: int = 16) -> Any:
    """That of the tiny model: 4 layers, 256 bytes of K and V a token and layer."""
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        kv_cache_dtype=torch.float32,
        pool_page_size=page,
        layer_info=SimpleNamespace(num_effective_layers=4),
        model_config=SimpleNamespace(
            get_num_kv_heads=lambda _: 2, head_dim=16, v_head_dim=16, context_len=8192
        ),
    )


def arguments(tmp_path: Path, window: str, donors: list[str], limit: int | None = None) -> Any:
    return SimpleNamespace(
        swiftcache_layer_stream=window,
        swiftcache_donors=donors,
        swiftcache_runtime_dir=str(tmp_path / "rt"),
        max_total_tokens=limit,
    )


def test_tokens_set_the_window_and_the_limit_the_regular_slots(tmp_path: Path) -> None:
    args = arguments(tmp_path, "1000", ["host=16MiB"], limit=512)
    plan = sizes.plan_pool(args, configurator(), 1 << 30, 512)
    assert plan is not None
    assert (plan.regular_tokens, plan.window_tokens) == (496, 1024)
    assert plan.blocks == (1024,)


def test_auto_keeps_to_the_bytes_that_stock_would_take(tmp_path: Path) -> None:
    args = arguments(tmp_path, "auto", ["host=16MiB"], limit=2048)
    plan = sizes.plan_pool(args, configurator(), 1 << 30, 2048)
    assert plan is not None
    assert plan.total_tokens > 1.4 * 2048
    local = plan.regular_bytes + plan.window_bytes
    assert local <= 2048 * plan.shape.regular_slot_bytes


def test_auto_makes_no_window_that_donors_could_not_back(tmp_path: Path) -> None:
    args = arguments(tmp_path, "auto", ["host=64KiB"], limit=2048)
    assert sizes.plan_pool(args, configurator(), 1 << 30, 2048) is None


@pytest.mark.parametrize("window", ["1000", "auto"])
@pytest.mark.parametrize(
    ("limit", "budget_bytes", "said"),
    [
        (8, 1 << 30, "--max-total-tokens 8 leaves no regular slots"),
        (None, 0, "0 B for KV is too little"),
    ],
)
def test_where_there_is_no_room_the_server_ends_with_one_line(
    tmp_path: Path,
    window: str,
    limit: int | None,
    budget_bytes: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def original(*_: Any) -> Any:
        raise RuntimeError("Not enough memory")  # as SGLang does of no token at all

    small = configurator()
    small.server_args = arguments(tmp_path, window, ["host=16MiB"], limit)
    with pytest.raises(SystemExit) as ended:
        wiring.size_pool(original, small, budget_bytes)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(("exit_code", "raised"), [(2, SystemExit), (1, RuntimeError)])
def test_the_main_process_ends_as_its_scheduler_did(
    exit_code: int, raised: type[BaseException]
) -> None:
    def original(readers: Any, processes: Any) -> Any:
        if readers:
            return readers
        raise RuntimeError("Rank 0 scheduler died")

    processes = [SimpleNamespace(exitcode=None), SimpleNamespace(exitcode=exit_code)]
    assert one_line_exit.end_as_scheduler(original, ["ready"], processes) == ["ready"]
    with pytest.raises(raised):
        one_line_exit.end_as_scheduler(original, [], processes)


def test_what_running_donors_have_free_counts(tmp_path: Path) -> None:
    settings, runtime_dir = Settings(status_timeout_s=20), tmp_path / "rt"
    with Donor(runtime_dir, "one", size="1MiB") as one, Donor(runtime_dir, "two", size="2MiB"):
        both = offered_bytes(parse_specs([]), runtime_dir, settings)
        assert sorted(both) == [1 << 20, 2 << 20]
        assert offered_bytes(parse_specs([one.spec]), runtime_dir, settings) == (1 << 20,)
    gone = offered_bytes(parse_specs([one.spec, "host=3MiB"]), runtime_dir, settings)
    assert gone == (0, 3 << 20)
