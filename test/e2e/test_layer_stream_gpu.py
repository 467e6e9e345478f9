"""On a GPU: what streams says what all-regular slots say, in order also when copies come late.

One server at a time, about a minute each: choose with -k, as in `-k "triton and late"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from support.long_prompts import Answer, assert_same, hold
from support.server import Server
from support.tiny_model import TinyShape, build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(700),
]

# A layer's K and V of Qwen3-8B, in eight layers: 1024 slots are 2 MiB of each.
SHAPE = TinyShape(
    layers=8, hidden=1024, heads=32, kv_heads=8, head_dim=128, intermediate=512, context=65536
)
WINDOW = 16 * 1024
FLAGS = (
    *("--device", "cuda", "--dtype", "bfloat16", "--random-seed", "1"),
    *("--chunked-prefill-size", "2048"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--cuda-graph-max-bs-decode", "16", "--mem-fraction-static", "0.3"),
    "--cuda-graph-backend-prefill=disabled",
)
# A bfloat16 has eight bits of mantissa, and batches may be cut at other places.
TOLERANCE = 0.15
FACTORS = (0.5, 1.5, 4.0, 8.0)
FAULTS = Path(__file__).resolve().parents[1] / "support" / "window_faults"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "wide-qwen3", SHAPE)


def regular_tokens(page: int) -> int:
    return 2 * 1024 - page


@contextmanager
def serving(model: Path, tmp_path: Path, page: int, *flags: str, **env: str) -> Iterator[Server]:
    server = Server(
        model,
        *("--page-size", str(page)),
        *flags,
        tmp_path=tmp_path,
        env=env,
        base_flags=FLAGS,
        deadline_s=300,
    )
    with server:
        yield server


def all_regular(
    model: Path, tmp_path: Path, page: int, *flags: str
) -> AbstractContextManager[Server]:
    """With R + W regular slots, and no window."""
    total = ("--max-total-tokens", str(regular_tokens(page) + WINDOW))
    return serving(model, tmp_path, page, *total, *flags)


def streaming(
    model: Path, tmp_path: Path, page: int, *flags: str, **env: str
) -> AbstractContextManager[Server]:
    """With R regular and W window slots, and a donor."""
    donor = f"cuda:{torch.cuda.device_count() - 1}=4GiB"
    return serving(
        model,
        tmp_path,
        page,
        *("--max-total-tokens", str(regular_tokens(page))),
        *("--swiftcache-layer-stream", str(WINDOW), "--swiftcache-donors", donor),
        *("--swiftcache-runtime-dir", str(tmp_path / "r")),
        *flags,
        **env,
    )


def answers(server: Server) -> list[Answer]:
    return hold(server, regular_tokens(16), factors=FACTORS, at_once=0)


def assert_streamed(server: Server) -> None:
    state = server.swiftcache()["layer_stream"]
    assert state["bytes"]["gathered"] > 0
    assert state["host_reads"] == 0


_expected: dict[tuple[str, ...], list[Answer]] = {}


@pytest.fixture(params=["triton", "fa3", "flashinfer"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(model: Path, tmp_path: Path, flags: tuple[str, ...]) -> list[Answer]:
    """What the same server says with all slots regular; once for the same flags."""
    if flags not in _expected:
        with all_regular(model, tmp_path, 16, *flags) as server:
            _expected[flags] = answers(server)
    return _expected[flags]


@pytest.mark.parametrize(
    ("cycles", "graphs"), [(0, True), (0, False), (200_000, True)], ids=["graphs", "eager", "late"]
)
def test_streamed_contexts_give_the_same_tokens(
    model: Path, tmp_path: Path, backend: str, cycles: int, graphs: bool
) -> None:
    # FA3 splits a context by its length without graphs, with them by the longest there may be.
    flags = ("--attention-backend", backend, *(() if graphs else ("--disable-cuda-graph",)))
    env = {}
    if cycles:
        # SGLang itself may lie on this path.
        path = os.pathsep.join(filter(None, (str(FAULTS), os.environ.get("PYTHONPATH"))))
        env = {"PYTHONPATH": path, "TEST_DELAY_CYCLES": str(cycles)}
    with streaming(model, tmp_path, 16, *flags, **env) as server:
        found = answers(server)
        assert_streamed(server)
    assert_same(found, expected(model, tmp_path, flags), TOLERANCE)


@pytest.mark.parametrize(
    ("page", "flags"),
    [
        # As many requests at once change a batch's rounding otherwise.
        (16, ("--enable-deterministic-inference",)),
        (64, ("--enable-deterministic-inference",)),
        (16, ("--kv-cache-dtype", "fp8_e5m2", "--enable-deterministic-inference")),
    ],
    ids=["16", "64", "fp8"],
)
def test_sixteen_requests_share_a_streamed_prefix(
    model: Path,
    tmp_path: Path,
    page: int,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Deterministic, SGLang cuts prompts at multiples of this alone: with its 4096, and chunks of
    # 2048, a longer prompt would wait for good.
    monkeypatch.setenv("SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE", "512")
    found = {}
    for place in (all_regular, streaming):
        with place(model, tmp_path, page, "--attention-backend", "triton", *flags) as server:
            found[place] = hold(server, regular_tokens(page), factors=(1.0,))
            if place is streaming:
                assert_streamed(server)
    assert_same(found[streaming], found[all_regular], TOLERANCE)
