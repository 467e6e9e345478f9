"""Programs that are no donors, where a donor should be."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import donor_paths

DEADLINE_S = 60.0


@contextmanager
def program_at(path: Path, times: int, serve: Callable[[socket.socket], Any]) -> Iterator[None]:
    """Lets `serve` answer `times` connections, all of which come before this is left."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as door:
        door.bind(str(path))
        door.listen()
        door.settimeout(DEADLINE_S)

        def serve_all() -> None:
            for _ in range(times):
                with door.accept()[0] as connection:
                    serve(connection)

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve_all)
            yield
            served.result()
    path.unlink()


@pytest.mark.parametrize("by", ["status", "tier"])
def test_an_answer_that_is_none_is_told_with_its_place(
    runtime_dir: Path, start_tier: Any, one_line: Any, settings: Any, by: str
) -> None:
    paths = donor_paths(runtime_dir, "other")

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.send(b"x" * (settings.message_bytes_max + 1))

    ask = {
        "status": lambda: query_status(paths, settings),
        "tier": lambda: start_tier(paths.spec),
    }[by]
    with program_at(paths.door, 1, answer):
        line = one_line(ask)
    assert f"the donor at {paths.spec} " in line
    assert "is longer than" in line


def test_one_that_hangs_up_is_logged_once_however_often_it_is_tried(
    runtime_dir: Path, start_tier: Any, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    paths = donor_paths(runtime_dir, "other")
    # The start takes three: to join it, and twice to ask what it has promised. Then come looks.
    with program_at(paths.door, 6, lambda _: None):
        start_tier(settings=replace(settings, address_space_bytes=1 << 40))
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and paths.spec in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "not joined: " in warnings[0]


def test_a_donor_that_was_killed_is_no_foreign_program(
    start_donor: Any, start_tier: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What it leaves behind is tried again at each look, and is nothing to warn about."""
    donor, other = start_donor("a", "1MiB"), start_donor("b", "1MiB")
    donor.process.kill()
    donor.wait()
    user = start_tier()
    assert list(user.tier.donor_names().values()) == [other.paths.name]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == []
