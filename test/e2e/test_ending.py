"""Servers that start at once and are ended by Ctrl-C, in each phase: nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import requests
from e2e.conftest import SMALL_POOL

from support.donors import Donor
from support.processes import started_by, wait_until
from support.server import Server, ServerFailed
from swiftcache_tier.control.door import connect_door
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.settings import Settings

DEADLINE_S = 240.0
PROMPT = [7] * 40


def processes_of(server: Server, runtime_dir: Path, donor: Donor) -> list[psutil.Process]:
    """What a server has started and still runs, owned donors included."""
    found = started_by(server.process)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            is_of_it = str(runtime_dir) in process.cmdline() and process.pid != donor.process.pid
            if is_of_it and "--owner-pid" in process.cmdline():
                found.append(process)
    return found


def press_ctrl_c(server: Server) -> None:
    """As a terminal does: every process of the foreground group gets it."""
    os.killpg(server.process.pid, signal.SIGINT)


def decode_for_long(server: Server, began: threading.Event) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        "stream": True,
    }
    with (
        contextlib.suppress(requests.RequestException),  # the server ends under it
        requests.post(f"{server.url}/generate", json=body, stream=True, timeout=DEADLINE_S) as r,
    ):
        for line in r.iter_lines():
            if line.startswith(b"data: {"):
                began.set()


def test_ctrl_c_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    runtime_dir = tmp_path / "rt"

    def new_server(name: str, *flags: str) -> Server:
        folder = tmp_path / name
        folder.mkdir()
        donors = (donor.spec, "host=4MiB")
        return Server(
            tiny_model,
            *(*SMALL_POOL, "--page-size", "16"),
            *("--swiftcache-donors", *donors, "--swiftcache-runtime-dir", str(runtime_dir)),
            *flags,
            env={"SWIFTCACHE_EXTENT_BYTES": "256KiB"},
            tmp_path=folder,
        )

    def has_ended(server: Server) -> bool:
        server.process.poll()
        return server.process.returncode is not None and not started_by(server.process)

    with Donor(runtime_dir, "shared") as donor, contextlib.ExitStack() as cleanup:
        paths = donor_paths(runtime_dir, "shared")
        decoding, starting = new_server("decoding"), new_server("starting")
        idle = new_server("idle", "--swiftcache-donate", "auto")
        for server in (decoding, idle, starting):
            cleanup.callback(server.stop)

        # Two that start at once share the donor, and each has one of its own.
        with ThreadPoolExecutor(2) as pool:
            for started in [pool.submit(server.start) for server in (decoding, idle)]:
                started.result()
        for server in (decoding, idle):
            assert len(server.swiftcache()["donors"]) == 2
            assert server.generate(PROMPT, 4)
        lent_at = donor_paths(runtime_dir, idle.swiftcache()["donation"]["name"])
        connect_door(lent_at).close()
        wait_until(
            lambda: {r.extents["lent"] for r in query_status(paths, Settings()).receivers} == {16},
            DEADLINE_S,
            "each has half of the donor",
        )

        began = threading.Event()
        asking = threading.Thread(target=decode_for_long, args=(decoding, began))
        asking.start()
        assert began.wait(DEADLINE_S)
        press_ctrl_c(decoding)
        # Its main process alone: SGLang kills the scheduler before that could leave its own door.
        idle.process.send_signal(signal.SIGINT)
        asking.join(DEADLINE_S)

        # The third is interrupted while it starts: it has joined its donors, and is not ready.
        with ThreadPoolExecutor(1) as pool:
            start = pool.submit(starting.start)
            wait_until(
                lambda: "SwiftCache tier:" in starting.log() or start.done(),
                DEADLINE_S,
                "the third has joined its donors",
            )
            assert not start.done(), "it was ready before it could be interrupted"
            press_ctrl_c(starting)
            failed = start.exception(DEADLINE_S)
            # It may have become ready while the signal was on its way.
            assert isinstance(failed, ServerFailed | None)

        for server in (decoding, idle) if failed else (decoding, idle, starting):
            wait_until(lambda server=server: has_ended(server), DEADLINE_S, "all processes end")  # type: ignore[misc]
            # Its own donor ends once it has taken its memory back.
            wait_until(
                lambda server=server: not processes_of(server, runtime_dir, donor),  # type: ignore[misc]
                DEADLINE_S,
                "its own donor has ended",
            )
        wait_until(
            lambda: query_status(paths, Settings()).extents["free"] == 32,
            DEADLINE_S,
            "the donor has all its memory back",
        )
        wait_until(
            lambda: {p for p in runtime_dir.iterdir() if p.suffix != ".killed"} == set(paths),
            DEADLINE_S,
            "only the sockets of the donor are left, and the mark of the server that lent",
        )
        assert query_status(paths, Settings()).receivers == []
        assert donor.memory_is_zero()
