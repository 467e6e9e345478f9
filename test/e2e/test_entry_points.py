"""Every way of starting SGLang takes the flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import wait_until

FLAGS = (
    "--swiftcache-donors",
    "--swiftcache-runtime-dir",
    "--swiftcache-io-backend",
    "--swiftcache-verify",
)
DEADLINE_S = 240.0


def run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-m", "sglang.launch_server", "--help"),
        (str(Path(sys.executable).with_name("sglang")), "serve", "--help"),
    ],
    ids=["launch_server", "serve"],
)
def test_help_shows_the_flags(command: tuple[str, ...]) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stderr[-2000:]
    for flag in FLAGS:
        assert flag in done.stdout


def test_a_bad_flag_is_one_line_and_exit_code_2(tiny_model: Path, tmp_path: Path) -> None:
    done = run(
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(tiny_model)),
        *("--device", "cpu", "--swiftcache-donors", "ipc:///nowhere/at-all"),
        *("--swiftcache-runtime-dir", str(tmp_path / "rt")),
    )
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if line.startswith("swiftcache: ")]
    assert len(ours) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "rt").exists()


ENGINE = """
import json, sys
import sglang

def main():
    model, runtime_dir = sys.argv[1:]
    engine = sglang.Engine(
        model_path=model, device="cpu", attention_backend="torch_native", disable_cuda_graph=True,
        dtype="float32", max_total_tokens=512, page_size=16, random_seed=1,
        swiftcache_donors=["host=32MiB"], swiftcache_runtime_dir=runtime_dir,
        swiftcache_donate="auto",
    )
    prompts = [[100 + i] * 200 for i in range(4)]
    answers = [
        engine.generate(input_ids=p, sampling_params={"temperature": 0, "max_new_tokens": 4})
        for p in prompts + prompts
    ]
    info = engine.get_server_info()
    print("RESULT" + json.dumps({
        "outputs": [a["output_ids"] for a in answers],
        "donor_tokens": sum(
            (a["meta_info"].get("cached_tokens_details") or {}).get("host", 0) for a in answers
        ),
        "flag": info["swiftcache_donors"],
        "donors": len(info["internal_states"][0]["swiftcache"]["donors"]),
        "lends": "donation" in info["internal_states"][0]["swiftcache"],
    }))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""

RUNTIME = """
import json, sys
import sglang

@sglang.function
def chat(s, question):
    s += sglang.user(question)
    s += sglang.assistant(sglang.gen("answer", max_tokens=4, temperature=0))

def main():
    model, runtime_dir = sys.argv[1:]
    runtime = sglang.Runtime(
        model_path=model, device="cpu", attention_backend="torch_native", disable_cuda_graph=True,
        dtype="float32", max_total_tokens=512, page_size=16, random_seed=1,
        swiftcache_donors=["host=32MiB"], swiftcache_runtime_dir=runtime_dir,
        swiftcache_donate="auto",
    )
    runtime.endpoint.chat_template = sglang.lang.chat_template.get_chat_template("chatml")
    sglang.set_default_backend(runtime)
    answer = chat.run(question="What is a cache?")["answer"]
    info = runtime.endpoint.get_server_info()
    print("RESULT" + json.dumps({
        "answer": answer,
        "flag": info["swiftcache_donors"],
        "donors": len(info["internal_states"][0]["swiftcache"]["donors"]),
        "lends": "donation" in info["internal_states"][0]["swiftcache"],
    }))
    runtime.shutdown()

if __name__ == "__main__":
    main()
"""


def result(tmp_path: Path, program: str, model: Path) -> dict[str, object]:
    """Run ``program`` as a user's own file; what it printed, and nothing may stay behind."""
    script = tmp_path / "program.py"
    script.write_text(program)
    runtime_dir = tmp_path / "rt"
    extents = {"SWIFTCACHE_EXTENT_BYTES": "256KiB"}  # of which its small pool holds several
    done = run(sys.executable, str(script), str(model), str(runtime_dir), env=extents)
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    # the owned donor ends when its server has, and takes its sockets with it; those of the one in
    # the server itself have gone before the program has ended
    wait_until(
        lambda: all(path.suffix == ".killed" for path in runtime_dir.iterdir()),
        30.0,
        "nothing is left of the donors but the mark of the server that lent",
    )
    found: dict[str, object] = json.loads(lines[-1].removeprefix("RESULT"))
    return found


def test_engine_takes_the_flags_as_keyword_arguments(tiny_model: Path, tmp_path: Path) -> None:
    found = result(tmp_path, ENGINE, tiny_model)
    outputs = found["outputs"]
    assert isinstance(outputs, list)
    assert outputs[:4] == outputs[4:]
    assert isinstance(found["donor_tokens"], int)
    assert found["donor_tokens"] > 0
    assert (found["flag"], found["donors"], found["lends"]) == (["host=32MiB"], 1, True)


def test_runtime_takes_the_flags_as_keyword_arguments(tiny_model: Path, tmp_path: Path) -> None:
    found = result(tmp_path, RUNTIME, tiny_model)
    assert found["answer"]
    assert (found["flag"], found["donors"], found["lends"]) == (["host=32MiB"], 1, True)
