"""``make demo``: one server, two donors, three conversations at once, and the same without donors.

The server's own KV pool holds less than two of the three conversations. They take turns, so by the
time one goes on, its prefix has been pushed out of the pool. With donors it comes back from their
memory; without, it is computed again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import prepare_model
import requests
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo.asking import Answer, ask
from demo.conversations import CONVERSATIONS
from demo.ending import clean_ending
from demo.prompts import PromptEncoder
from demo.report import print_summary
from support.donors import Donor
from support.processes import end_tree
from support.server import CPU_FLAGS, Server

LOG_TAIL_LINES = 20
POOL_TOKENS = 1024
ANSWER_TOKENS = 24
DONOR_SIZE = {"size": "128MiB", "extent_size": "32MiB"}
TURNS = len(CONVERSATIONS[0].questions)
SYSTEM = "Answer in one or two short sentences, from this text:\n\n"

SERVER_FLAGS = ("--max-total-tokens", str(POOL_TOKENS), "--page-size", "16")
# Two threads that spin while they wait for each other slow each other down on a busy machine.
SERVER_ENV = {"OMP_NUM_THREADS": None, "OMP_WAIT_POLICY": "passive"}

console = Console(highlight=False)


def main() -> int:
    with (
        clean_ending(),
        tempfile.TemporaryDirectory(prefix="swiftcache-demo-") as scratch_name,
    ):
        scratch = Path(scratch_name)
        model = _prepare_model()
        prompts = PromptEncoder(model)
        with_donors = _run_with_donors(model, prompts, scratch)
        without = _run_without(model, prompts, scratch)
        console.rule("Summary", align="left")
        verdict = print_summary(console, with_donors, without, first_turns=len(CONVERSATIONS))
    return 0 if verdict.good else 1


def _run_with_donors(model: Path, prompts: PromptEncoder, scratch: Path) -> list[Answer]:
    console.rule("With two donors", align="left")
    runtime_dir = scratch / "run"
    with ExitStack() as donors:
        for name in ("ada", "bob"):
            with _phase(f"starting donor {name}"):
                donor = donors.enter_context(Donor(runtime_dir, name, **DONOR_SIZE))
            console.print(donor.log().strip(), soft_wrap=True)
        flags = ("--swiftcache-donors", "--swiftcache-runtime-dir", str(runtime_dir))
        with _server(model, scratch, *flags) as server:
            answers = _converse(server, prompts)
            console.print("\n[dim]$ swiftcache status[/]")
            command = [sys.executable, "-m", "swiftcache_tier", "status"]
            subprocess.run([*command, "--runtime-dir", str(runtime_dir)], check=True)
        return answers


def _run_without(model: Path, prompts: PromptEncoder, scratch: Path) -> list[Answer]:
    console.rule("The same without donors", align="left")
    with _server(model, scratch) as server:
        return _converse(server, prompts)


@contextmanager
def _server(model: Path, scratch: Path, *flags: str) -> Iterator[Server]:
    command = ["sglang.launch_server", "--model-path", model.name]
    command += [*CPU_FLAGS, *SERVER_FLAGS, *flags]
    console.print(f"[dim]$ python -m {' '.join(command)}[/]", soft_wrap=True)
    server = Server(model, *SERVER_FLAGS, *flags, tmp_path=scratch, env=SERVER_ENV)
    with _phase("loading the model into the server (about 30 s)"):
        server.start()
    try:
        yield server
    except requests.RequestException as error:
        tail = "\n".join(server.log().splitlines()[-LOG_TAIL_LINES:])
        raise RuntimeError(f"{error}\nThe end of the server's log:\n{tail}") from error
    finally:
        server.stop()


def _converse(server: Server, prompts: PromptEncoder) -> list[Answer]:
    """Ask all questions, one conversation after the other within each turn."""
    histories: list[list[dict[str, str]]] = [
        [{"role": "system", "content": SYSTEM + conversation.text}]
        for conversation in CONVERSATIONS
    ]
    answers = []
    for turn in range(TURNS):
        for conversation, history in zip(CONVERSATIONS, histories, strict=True):
            question = conversation.questions[turn]
            history.append({"role": "user", "content": question})
            console.print(
                f"\n[bold]{conversation.title}[/], turn {turn + 1}: [cyan]{question}[/]",
                soft_wrap=True,
            )
            answer = ask(server.url, prompts.encode(history), ANSWER_TOKENS, _show_piece)
            history.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
            console.print(
                f"\n  [dim]prompt {answer.prompt_tokens} tokens: {answer.device_tokens} on the "
                f"device, [/][green]{answer.donor_tokens} from donors[/][dim], "
                f"{answer.recomputed_tokens} computed; first token after {answer.ttft_s:.2f} s[/]",
                soft_wrap=True,
            )
    return answers


def _show_piece(piece: str) -> None:
    console.print(piece, end="", markup=False, soft_wrap=True)


def _prepare_model() -> Path:
    """Run prepare_model.py, showing its phases; returns the model's folder."""
    folder = prepare_model.model_folder()
    with _phase(f"preparing {folder.name}") as say:
        process = subprocess.Popen(
            [sys.executable, prepare_model.__file__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        last = ""
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.decode().strip()
                say(last)
            if process.wait() != 0:
                raise RuntimeError(last)
        finally:
            end_tree(process, grace_s=5.0)
    console.print(f"Model: {folder}", soft_wrap=True)
    return folder


@contextmanager
def _phase(what: str) -> Iterator[Callable[[str], None]]:
    """Show that something takes its time; yields a function that says what it is doing now."""
    if not console.is_terminal:
        console.print(f"[dim]{what}[/]")
        yield lambda now: console.print(f"[dim]  {escape(now)}[/]")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what)
        yield lambda now: progress.update(task, description=escape(now))


if __name__ == "__main__":
    try:
        code = main()
    except (RuntimeError, AssertionError, requests.RequestException) as error:
        console.print(f"[red]demo:[/] {escape(str(error))}", soft_wrap=True)
        code = 1
    sys.exit(code)
