"""Contexts longer than the device's own KV memory: the same tokens, whatever the donors do.

Between forwards the window is filled with NaN, so that a byte which was not gathered cannot go
unseen. SGLang's own leak checks run whenever a server is idle, and end it when they fail.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang.srt.swiftcache.tier_metrics import SLOT_STATES
from support.donors import Donor
from support.long_prompts import Answer, assert_same, hold
from support.processes import wait_until
from support.server import REQUEST_TIMEOUT_S, Server, ServerFailed

REGULAR, WINDOW = 496, 4096
CHUNK = ("--chunked-prefill-size", "256", "--random-seed", "1")
# In float32 only the cut of batches makes a difference.
TOLERANCE = 2e-3
DONOR_BYTES = "12MiB"
SETTLE_DEADLINE_S = 60.0
# More than the next donor takes to come.
WINDOW_WAIT_S = 20.0
FAULTS = Path(__file__).resolve().parents[1] / "support" / "window_faults"
POISON = {"PYTHONPATH": str(FAULTS), "TEST_POISON_WINDOW": "1"}


def window_flags(runtime_dir: Path, page: int) -> list[str]:
    return [
        *("--page-size", str(page), "--max-total-tokens", str(REGULAR + page), *CHUNK),
        *("--swiftcache-donors", "--swiftcache-runtime-dir", str(runtime_dir)),
        *("--swiftcache-layer-stream", str(WINDOW)),
    ]


@pytest.fixture(scope="module")
def all_regular(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Stock SGLang with R + W slots."""
    with Server(
        tiny_model,
        *("--page-size", "16", "--max-total-tokens", str(REGULAR + WINDOW), *CHUNK),
        tmp_path=tmp_path_factory.mktemp("all-regular"),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def expected(all_regular: Server) -> list[Answer]:
    return hold(all_regular, REGULAR)


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "rt"


@pytest.fixture(scope="module")
def first(runtime_dir: Path) -> Iterator[Donor]:
    with Donor(runtime_dir, "first", size=DONOR_BYTES) as donor:
        yield donor


@pytest.fixture(scope="module")
def streaming(
    tiny_model: Path, runtime_dir: Path, first: Donor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """R regular and W window slots, poisoned; on the donor "first"."""
    with Server(
        tiny_model,
        *window_flags(runtime_dir, 16),
        "--enable-metrics",
        tmp_path=tmp_path_factory.mktemp("streaming"),
        env=POISON,
    ) as server:
        yield server


def layer_stream(server: Server) -> dict[str, Any]:
    state: dict[str, Any] = server.swiftcache()["layer_stream"]
    return state


def idle(server: Server) -> None:
    """Nothing runs any more; then SGLang counts every slot, and a server that lost one ends."""
    wait_until(
        lambda: server.server_info()["internal_states"][0].get("swiftcache") is not None,
        SETTLE_DEADLINE_S,
        "the server answers",
    )
    server.flush()
    slots = layer_stream(server)
    assert slots["window_slots"]["used"] == 0
    assert slots["regular_slots"]["free"] == slots["regular_slots"]["total"]


def check_answers(server: Server, expected: list[Answer]) -> None:
    assert_same(hold(server, REGULAR), expected, TOLERANCE)
    state = layer_stream(server)
    assert state["bytes"]["gathered"] > 0
    assert state["bytes"]["scattered"] > 0
    assert state["host_reads"] == 0, "page ids were read back from the device"
    idle(server)


def check_metrics(server: Server) -> None:
    state = layer_stream(server)
    moved = 'swiftcache_donor_bytes_transferred_total{direction="load",donor="first"}'
    wait_until(
        lambda: server.metrics()[moved] >= state["bytes"]["gathered"],
        SETTLE_DEADLINE_S,
        "/metrics has what was streamed",
    )
    slots = [server.metrics()[f'swiftcache_window_slots{{state="{s}"}}'] for s in SLOT_STATES]
    assert sum(slots) == state["window_slots"]["total"]
    assert server.swiftcache()["stalls"] == 0


def test_long_contexts_give_the_same_tokens(streaming: Server, expected: list[Answer]) -> None:
    check_answers(streaming, expected)
    check_metrics(streaming)


def test_pages_of_64_and_a_donor_of_its_own(
    tiny_model: Path, expected: list[Answer], tmp_path: Path
) -> None:
    flags = window_flags(tmp_path / "rt", 64)
    flags.insert(flags.index("--swiftcache-donors") + 1, f"host={DONOR_BYTES}")
    with Server(tiny_model, *flags, tmp_path=tmp_path, env=POISON) as server:
        check_answers(server, expected)


def test_more_at_once_than_there_are_slots(all_regular: Server, streaming: Server) -> None:
    """Requests wait, are evicted and are retracted, as they would be without a window."""
    prompts = [[(n * 37 + i * (n + 3)) % 480 + 10 for i in range(500)] for n in range(9)]
    expected = [answer["output_ids"] for answer in all_regular.generate(prompts, 100)]
    assert [answer["output_ids"] for answer in streaming.generate(prompts, 100)] == expected
    idle(streaming)


def test_the_longest_prompt_is_that_of_both_kinds_of_slots(streaming: Server) -> None:
    info = streaming.server_info()
    assert info["max_total_num_tokens"] >= REGULAR + WINDOW - 64
    too_long = requests.post(
        streaming.url + "/generate",
        json={"input_ids": [11] * (info["max_total_num_tokens"] + 1)},
        timeout=REQUEST_TIMEOUT_S,
    )
    assert too_long.status_code == 400
    assert "longer than" in too_long.text or "exceeds" in too_long.text, too_long.text
    idle(streaming)


def test_aborted_requests_leave_nothing_behind(streaming: Server) -> None:
    """While they wait, prefill and decode."""
    rids = [uuid.uuid4().hex for _ in range(3)]
    prompts = [[20 + n] * (3 * REGULAR) for n in range(3)]
    threads = [
        _in_background(lambda rid=rid, prompt=prompt: _generate(streaming, rid, prompt, 2000))  # type: ignore[misc]
        for rid, prompt in zip(rids, prompts, strict=True)
    ]
    wait_until(
        lambda: layer_stream(streaming)["window_slots"]["used"] > 2 * REGULAR,
        SETTLE_DEADLINE_S,
        "a request streams",
    )
    for rid in rids:
        requests.post(streaming.url + "/abort_request", json={"rid": rid}, timeout=30)
    for thread in threads:
        thread.join(SETTLE_DEADLINE_S)
        assert not thread.is_alive()
    idle(streaming)


@pytest.mark.parametrize("how", ["killed", "leaves"])
def test_a_donor_that_goes_while_a_request_streams(
    all_regular: Server, streaming: Server, runtime_dir: Path, how: str
) -> None:
    """Its blocks move to the donor that stays, and the request goes on."""
    prompt = [(7 * n) % 480 + 10 for n in range(3 * REGULAR)]
    expected = _long_answer(all_regular, prompt)
    with Donor(runtime_dir, "second", size=DONOR_BYTES) as second:
        _wait_for_donors(streaming, 2)
        answer: list[list[int]] = []
        before = layer_stream(streaming)["bytes"]["gathered"]
        thread = _in_background(lambda: answer.append(_long_answer(streaming, prompt)))
        wait_until(
            lambda: layer_stream(streaming)["bytes"]["gathered"] > before + (64 << 20),
            SETTLE_DEADLINE_S,
            "the request decodes",
        )
        assert thread.is_alive(), "the request ended before the donor could go"
        if how == "killed":
            second.kill()
        else:
            second.leave()
        _wait_for_donors(streaming, 1)
        thread.join(REQUEST_TIMEOUT_S)
        assert answer == [expected]
    idle(streaming)


@pytest.fixture(scope="module")
def deserted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server like ``streaming`` whose donors have gone; those of a test may come."""
    folder = tmp_path_factory.mktemp("deserted")
    server = Server(
        tiny_model,
        *window_flags(folder / "swiftcache", 16),
        tmp_path=folder,
        env=POISON | {"SWIFTCACHE_WINDOW_WAIT_S": str(WINDOW_WAIT_S)},
    )
    with Donor(server.runtime_dir, "early", size=DONOR_BYTES):
        server.start()
    try:
        yield server
    finally:
        server.stop()


def test_without_room_for_its_blocks_a_request_starts_over(
    all_regular: Server, deserted: Server
) -> None:
    """The only donor leaves; the request waits for the next one, and says the same."""
    prompt = [(5 * n) % 480 + 10 for n in range(3 * REGULAR)]
    expected = _long_answer(all_regular, prompt)
    with Donor(deserted.runtime_dir, "only", size=DONOR_BYTES) as only:
        _wait_for_donors(deserted, 1)
        before = layer_stream(deserted)
        answer: list[list[int]] = []
        thread = _in_background(lambda: answer.append(_long_answer(deserted, prompt)))
        wait_until(
            lambda: (
                layer_stream(deserted)["bytes"]["gathered"]
                > before["bytes"]["gathered"] + (64 << 20)
            ),
            SETTLE_DEADLINE_S,
            "the request decodes",
        )
        only.leave()
        _wait_for_retraction(deserted, before)
    _is_answered_with_the_next_donor(deserted, thread, answer, expected)


def test_a_donor_that_leaves_between_two_chunks_of_a_prefill(
    all_regular: Server, deserted: Server
) -> None:
    """What its next chunk was promised is gone; it waits for the next donor, and says the same."""
    prompt = [(11 * n) % 480 + 10 for n in range(8 * REGULAR)]
    expected = all_regular.generate(prompt, 8)[0]["output_ids"]
    with Donor(deserted.runtime_dir, "only", size=DONOR_BYTES) as only:
        _wait_for_donors(deserted, 1)
        before = layer_stream(deserted)
        answer: list[list[int]] = []
        thread = _in_background(
            lambda: answer.append(deserted.generate(prompt, 8)[0]["output_ids"])
        )
        wait_until(
            lambda: layer_stream(deserted)["window_slots"]["used"] > 0,
            SETTLE_DEADLINE_S,
            "the prefill is in the window",
        )
        deserted.pause()
        assert layer_stream(deserted)["window_slots"]["used"] < 7 * REGULAR, "it has ended already"
        only.leave()
        wait_until(
            lambda: layer_stream(deserted)["window_slots"]["retired"] > 0,
            SETTLE_DEADLINE_S,
            "pages retire",
        )
        deserted.go_on()
        _wait_for_retraction(deserted, before)
    _is_answered_with_the_next_donor(deserted, thread, answer, expected)


def test_a_decode_that_finds_no_room_since_a_donor_left(
    all_regular: Server, deserted: Server
) -> None:
    """The donor that stays holds the prompt and not the answer."""
    prompt = [(13 * n) % 480 + 10 for n in range(2400)]
    expected = _long_answer(all_regular, prompt)
    with Donor(deserted.runtime_dir, "stays", size="2MiB"):
        with Donor(deserted.runtime_dir, "leaves", size="2MiB") as leaves:
            _wait_for_donors(deserted, 2)
            before = layer_stream(deserted)
            answer: list[list[int]] = []
            thread = _in_background(lambda: answer.append(_long_answer(deserted, prompt)))
            wait_until(
                lambda: layer_stream(deserted)["window_slots"]["used"] >= 2400 - REGULAR,
                SETTLE_DEADLINE_S,
                "the request decodes",
            )
            leaves.leave()
            _wait_for_retraction(deserted, before)
        _is_answered_with_the_next_donor(deserted, thread, answer, expected, size="2MiB")


def test_a_request_that_donors_cannot_back_holds_nobody_up(deserted: Server) -> None:
    """It waits for them, others pass it, and then it is told what was missing."""
    prompt = [(17 * n) % 480 + 10 for n in range(6 * REGULAR)]
    with Donor(deserted.runtime_dir, "small", size="1MiB"):
        _wait_for_donors(deserted, 1)
        answer: list[requests.Response] = []
        thread = _in_background(
            lambda: answer.append(_generate(deserted, uuid.uuid4().hex, prompt, 8))
        )
        passed = 0
        while thread.is_alive():
            deserted.generate(prompt[:20], 4)
            passed += 1
        assert passed > 0
        assert answer[0].status_code == 503
        assert "the request needs 3000 tokens of KV slots and 1520" in answer[0].text
        idle(deserted)


def test_a_short_request_is_answered_beside_one_that_takes_the_whole_budget(
    tiny_model: Path, tmp_path: Path
) -> None:
    runtime_dir = tmp_path / "rt"
    few_blocks = {"SWIFTCACHE_STREAM_BYTES_PER_STEP": "256KiB"}
    with (
        Donor(runtime_dir, "only", size=DONOR_BYTES),
        Server(
            tiny_model, *window_flags(runtime_dir, 16), tmp_path=tmp_path, env=POISON | few_blocks
        ) as server,
    ):
        rid = uuid.uuid4().hex
        prompt = [(5 * n) % 480 + 10 for n in range(3 * REGULAR)]
        thread = _in_background(lambda: _generate(server, rid, prompt, 2000))
        wait_until(
            lambda: layer_stream(server)["bytes"]["gathered"] > 64 << 20,
            SETTLE_DEADLINE_S,
            "the request decodes",
        )
        for kind in range(3):
            assert len(server.generate([20 + kind] * 20, 4)[0]["output_ids"]) == 4
        assert thread.is_alive(), "they waited for its end"
        requests.post(server.url + "/abort_request", json={"rid": rid}, timeout=30)
        thread.join(SETTLE_DEADLINE_S)
        idle(server)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--swiftcache-layer-stream", "99999999999"), "leaves no regular slots"),
        (("--max-total-tokens", "10"), "--max-total-tokens 10 leaves no regular slots"),
    ],
)
def test_sizes_that_cannot_be_are_one_line_and_exit_code_2(
    tiny_model: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    """Though the process that knows them is not the one that was started."""
    sizes = (*window_flags(tmp_path / "rt", 16), *flags)
    server = Server(tiny_model, *sizes, tmp_path=tmp_path)
    with pytest.raises(ServerFailed, match="ended with exit code 2 before"):
        server.start()
    log = server.log_path.read_text()
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if line.startswith("swiftcache: ")]
    assert said in line


def _long_answer(server: Server, prompt: list[int]) -> list[int]:
    output: list[int] = server.generate(prompt, 400)[0]["output_ids"]
    return output


def _generate(server: Server, rid: str, prompt: list[int], tokens: int) -> requests.Response:
    body = {
        "rid": rid,
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens},
    }
    return requests.post(server.url + "/generate", json=body, timeout=REQUEST_TIMEOUT_S)


def _in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _is_answered_with_the_next_donor(
    server: Server,
    thread: threading.Thread,
    answer: list[list[int]],
    expected: list[int],
    size: str = DONOR_BYTES,
) -> None:
    """A donor comes, and the request that ``thread`` has sent ends as if none had left."""
    with Donor(server.runtime_dir, "next", size=size):
        thread.join(REQUEST_TIMEOUT_S)
        assert answer == [expected]
        idle(server)


def _wait_for_retraction(server: Server, before: dict[str, Any]) -> None:
    wait_until(
        lambda: layer_stream(server)["retracted"] > before["retracted"],
        SETTLE_DEADLINE_S,
        "it is retracted",
    )


def _wait_for_donors(server: Server, count: int) -> None:
    def settled() -> bool:
        state = server.swiftcache()
        joined = [donor for donor in state["donors"] if donor["state"] == "joined"]
        return len(joined) == count == len(state["donors"]) and state["blocks"]["retiring"] == 0

    wait_until(settled, SETTLE_DEADLINE_S, f"{count} donor(s) are joined")
