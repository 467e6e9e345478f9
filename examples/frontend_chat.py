#!/usr/bin/env python3
"""A program in SGLang's frontend language: a conversation of several turns that forks in two.

Start a server first, for instance

    python -m sglang.launch_server --model-path MODEL --swiftcache-donors --enable-cache-report

Every turn sends the whole conversation so far, and both forks begin with it: that shared prefix is
what the server keeps, on the device while there is room and with the donors when there is none.
"""

from __future__ import annotations

import argparse

import sglang as sgl

AUDIENCES = ("a child", "an engineer")


@sgl.function
def explain(s: sgl.ProgramState, topic: str) -> None:
    """Two turns about ``topic``, then one more for each audience, side by side."""
    s += sgl.system("You are a patient teacher. Answer in one or two short sentences.")
    s += sgl.user(f"What is {topic}?")
    s += sgl.assistant(sgl.gen("definition", max_tokens=32, temperature=0))
    s += sgl.user("Why does it matter?")
    s += sgl.assistant(sgl.gen("reason", max_tokens=32, temperature=0))
    forks = s.fork(len(AUDIENCES))
    for fork, audience in zip(forks, AUDIENCES, strict=True):
        fork += sgl.user(f"Now explain it to {audience}.")
        fork += sgl.assistant(sgl.gen(audience, max_tokens=32, temperature=0))
    forks.join()
    for fork, audience in zip(forks, AUDIENCES, strict=True):
        show(fork, audience)


def show(state: sgl.ProgramState, name: str) -> None:
    """Print a generated piece and how much of its prompt the server did not have to compute."""
    meta = state.get_meta_info(name)
    cached = meta["cached_tokens_details"] or {"device": 0, "host": 0}
    print(f"{name}: {state[name].strip()}")
    print(
        f"  prompt {meta['prompt_tokens']} tokens, "
        f"{cached['device']} from the device, {cached['host']} from donors"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A forking conversation with an SGLang server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--topic", default="a prefix cache")
    args = parser.parse_args()

    # By the model's path SGLang would guess; SmolLM2 and Qwen speak ChatML.
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.base_url, chat_template_name="chatml"))
    state = explain.run(topic=args.topic)
    for name in ("definition", "reason"):
        show(state, name)


if __name__ == "__main__":
    main()
