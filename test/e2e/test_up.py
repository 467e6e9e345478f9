"""`swiftcache up` with real servers of two different models: one lends to the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import requests

from support.processes import end_tree, free_port, started_by, wait_until
from support.server import CPU_FLAGS
from support.tiny_model import TinyShape, build_tiny_model
from swiftcache_tier.process_tree import alive

REPOSITORY = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 400.0
STOP_DEADLINE_S = 120.0

SHAPES = {
    "chat": TinyShape(),
    "code": TinyShape(layers=2, hidden=48, heads=6, kv_heads=3),
}


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    """Models of other layers and heads; `chat` borrows, and has a pool of 512 tokens."""
    lines = [
        f"args: {' '.join(CPU_FLAGS)} --page-size 16 --max-total-tokens 2048",
        "env:",
        "  {OMP_NUM_THREADS: '1', SWIFTCACHE_EXTENT_BYTES: 64KiB, SWIFTCACHE_LEND_QUIET_S: '0.2'}",
        "donors: {attic: {device: host, size: 64MiB}}",
        "servers:",
    ]
    for name, shape in SHAPES.items():
        build_tiny_model(tmp_path / name, shape)
        ours = "role: receiver, args: --max-total-tokens 512" if name == "chat" else "role: donor"
        lines.append(f"  {name}: {{model: ./{name}, port: {free_port()}, {ours}}}")
    path = tmp_path / "cluster.yaml"
    path.write_text("\n".join(lines))
    return path


def test_both_serve_and_the_receiver_uses_the_donor_until_ctrl_c(
    cluster_file: Path, tmp_path: Path
) -> None:
    log_path = tmp_path / "up.log"
    runtime_dir = tmp_path / "run"
    with log_path.open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "swiftcache_tier", "up", str(cluster_file)],
            env=os.environ | {"SWIFTCACHE_RUNTIME_DIR": str(runtime_dir)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    members: list[psutil.Process] = []
    try:
        wait_until(
            lambda: "swiftcache up: ready: " in log_path.read_text() or up.poll() is not None,
            START_DEADLINE_S,
            "all servers are ready",
        )
        assert up.poll() is None, log_path.read_text()[-5000:]
        members = psutil.Process(up.pid).children(recursive=True)
        (line,) = [line for line in log_path.read_text().splitlines() if " ready: " in line]
        urls = dict(part.split(" at ") for part in line.partition("ready: ")[2].split(", "))
        assert set(urls) == set(SHAPES)
        for url in urls.values():
            assert len(_generate(url, list(range(20, 40)))["output_ids"]) == 4
        _check_that_donors_are_used(urls["chat"])
        for name in SHAPES:
            assert f"{name:5} | " in log_path.read_text()
    finally:
        up.send_signal(signal.SIGINT)
        try:
            code = up.wait(STOP_DEADLINE_S)
        finally:
            left = alive(members) + started_by(up)
            end_tree(up)
            for process in left:
                process.kill()
    assert code == 0
    assert left == []
    assert not list(runtime_dir.glob("*.fds")), "the donor has left its socket behind"


def _check_that_donors_are_used(url: str) -> None:
    prompts = [[start, *range(100, 339)] for start in (11, 12, 13)]
    for prompt in prompts:
        _generate(url, prompt)
    again = _generate(url, prompts[0])
    assert again["meta_info"]["cached_tokens_details"]["host"] >= 200
    wait_until(lambda: _lenders(url) == {"attic", "engine"}, STOP_DEADLINE_S, "the engine lends")


def _lenders(url: str) -> set[str]:
    """Whose memory the server has: plain donors by name, other servers as "engine"."""
    info = requests.get(f"{url}/server_info", timeout=60).json()
    donors = info["internal_states"][0]["swiftcache"]["donors"]
    return {donor["name"].partition("-")[0] for donor in donors if donor["bytes"]}


def _generate(url: str, prompt: list[int]) -> dict[str, object]:
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4}
    body = {"input_ids": prompt, "sampling_params": sampling}
    answer = requests.post(f"{url}/generate", json=body, timeout=120)
    assert answer.ok, answer.text
    result: dict[str, object] = answer.json()
    return result
