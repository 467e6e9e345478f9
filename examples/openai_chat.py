#!/usr/bin/env python3
"""A chat of several turns through the OpenAI client, with the cached tokens of every turn.

Start a server first, for instance

    python -m sglang.launch_server --model-path MODEL --swiftcache-donors --enable-cache-report

Without ``--enable-cache-report`` the server does not say how many prompt tokens were cached.
"""

from __future__ import annotations

import argparse

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = (
    "Which month is best for a walk along the coast?",
    "What should I put into my bag?",
    "And if it rains all day?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat with an SGLang server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key="not needed")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Answer in one or two short sentences."}
    ]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=32, temperature=0
        )
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        print(f"you:   {question}\nmodel: {text.strip()}")
        if answer.usage:
            details = answer.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            print(f"       prompt {answer.usage.prompt_tokens} tokens, {cached} cached\n")


if __name__ == "__main__":
    main()
