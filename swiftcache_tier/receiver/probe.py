"""What GPUs have to give, asked in a process of its own.

A process that has started the CUDA driver cannot fork children that use it. A server's main process
checks its donors before it starts any child, so it must not ask the driver itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import arena_for
from swiftcache_tier.receiver.reach import Reach
from swiftcache_tier.settings import Settings

_CHILD = "from swiftcache_tier.receiver.probe import answer; answer()"


class Question(NamedTuple):
    """About one donor, on a GPU."""

    device: str
    uuid: str | None
    """Of the GPU where the donor that runs lies; None for one that would be started."""


class Answer(NamedTuple):
    """What a receiver would find."""

    problem: str | None
    """Why the donor cannot be used, in one line."""
    available_bytes: int = 0
    """For a donor that would be started."""
    uuid: str | None = None
    """Of the GPU where it would be started."""


def probe(receiver_device: str, questions: Sequence[Question], settings: Settings) -> list[Answer]:
    """Answers for a receiver on "cuda:N". Blocks for `settings.probe_timeout_s` at most.

    Raises SwiftCacheError when no answer could be had.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, receiver_device],
            input=msgspec.json.encode(questions),
            capture_output=True,
            timeout=settings.probe_timeout_s,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=list[Answer])
    except subprocess.TimeoutExpired:
        problem = f"the CUDA driver has not answered for {settings.probe_timeout_s:g} s"
    except subprocess.CalledProcessError as error:
        last_lines = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        problem = f"asking the CUDA driver ended with status {error.returncode}"
        problem += "".join(f" ({line})" for line in last_lines)
    except (OSError, msgspec.MsgspecError) as error:
        problem = f"the CUDA driver cannot be asked: {error}"
    raise SwiftCacheError(f"{problem}; see whether nvidia-smi works, or use host memory")


def answer() -> None:
    """In the child: questions on stdin, the receiver's device in argv, answers on stdout."""
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    answers = [_answer(sys.argv[1], question) for question in questions]
    sys.stdout.buffer.write(msgspec.json.encode(answers))


def _answer(receiver_device: str, question: Question) -> Answer:
    try:
        reach = Reach(receiver_device)
        if question.uuid is not None:
            reach.link_to(question.device, question.uuid)
            return Answer(None)
        arena = arena_for(question.device)
        reach.link_to(arena.device, arena.uuid)
        return Answer(None, arena.available_bytes(), arena.uuid)
    except (SwiftCacheError, OSError) as error:
        return Answer(str(error))
