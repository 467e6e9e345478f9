"""The comparison with SGLang itself, on the CPU engine with a tiny model: a rehearsal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"

# Six conversations of 400 tokens and more in a pool of 2,048: none of them is still on the device
# when its second turn comes, after the first turns of all the others.
WORKLOAD = "--num-clients 6 --num-rounds 2 --request-length 400 --sub-question-input-length 32"
LOAD = "--output-length 4 --request-rate inf --max-parallel 1 --ready-queue-policy fifo"
SERVER = "--max-total-tokens 2048 --page-size 16 --skip-tokenizer-init"


def test_stock_and_swiftcache_are_compared_on_the_cpu(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK / "compare.py"), "--device", "cpu"]
    command += ["--model-path", str(tiny_model), "--output-dir", str(tmp_path / "out")]
    command += ["--server-args", SERVER, "--donors", "host=64MiB", *WORKLOAD.split(), *LOAD.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    stock, swiftcache = (contender["runs"][0] for contender in result["contenders"])
    assert host_tokens(stock) == 0
    assert host_tokens(swiftcache) > 6 * 300
    assert swiftcache["summary"]["cache_hit_rate"] > stock["summary"]["cache_hit_rate"]
    assert swiftcache["against_baseline"]["outputs"] == {
        "answered": 12,
        "same_prompt": 12,
        "same_output": 12,
    }


def host_tokens(run: dict[str, Any]) -> int:
    tokens: int = run["summary"]["host_hit_tokens"]
    return tokens
