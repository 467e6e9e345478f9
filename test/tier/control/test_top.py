"""`swiftcache top`: rates between two looks, alarms, and servers that do not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from swiftcache_tier.cli.status import DonorReport
from swiftcache_tier.cli.top_sample import (
    Rates,
    Sample,
    ServerReport,
    donor_rates,
    request_rate,
    take_sample,
)
from swiftcache_tier.cli.top_tables import tables
from swiftcache_tier.control.messages import PROTOCOL, StatusReply
from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.settings import Settings

URL = "http://127.0.0.1:8000"


def server_state(requests: int, loaded: int, stored: int) -> dict[str, Any]:
    return {
        "requests": requests,
        "hit_tokens": {"device": 25, "donor": 50},
        "recomputed_tokens": 25,
        "hit_blocks_by_donor": {"attic": 3},
        "block_tokens": 16,
        "bytes_by_donor": {"attic": {"load": loaded, "store": stored}},
        "lost_blocks": 0,
        "stalls": 0,
        "reclaims": {"late": 2},
        "donors": [
            {
                "name": "attic",
                "link": "nvlink",
                "state": "joined",
                "blocks": {"used": 7, "free": 2, "retiring": 1, "total": 10},
            }
        ],
    }


def donor(extents: dict[str, int]) -> DonorReport:
    paths = DonorPaths(Path("/run/attic.door"), Path("/run/attic.control"))
    reply = StatusReply(
        protocol=PROTOCOL,
        name="attic",
        device="host",
        device_uuid=None,
        device_model=None,
        pid=1,
        owner_pid=None,
        state="serving",
        extent_bytes=1 << 30,
        extents=extents,
        bytes_untaken=0,
        receivers=[],
    )
    return DonorReport(paths, "serving", None, reply)


def sample(at_s: float, state: dict[str, Any] | None, **extents: int) -> Sample:
    problem = "answered 401: it wants an API key" if state is None else None
    return Sample(at_s, [donor(extents)], [ServerReport(URL, state, problem)])


def shown(before: Sample | None, now: Sample) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(tables(before, now))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = sample(10.0, server_state(5, 1_000_000_000, 0))
    now = sample(12.0, server_state(9, 7_000_000_000, 500_000_000))
    assert donor_rates(before, now, URL, "attic") == Rates(3.0, 0.25)
    assert request_rate(before, now, URL) == 2.0


def test_a_donor_that_is_new_to_the_server_moved_nothing_before() -> None:
    before = sample(10.0, server_state(5, 0, 0) | {"bytes_by_donor": {}})
    now = sample(11.0, server_state(5, 2_000_000_000, 0))
    assert donor_rates(before, now, URL, "attic") == Rates(2.0, 0.0)


def test_there_is_no_rate_without_two_looks_at_one_server() -> None:
    now = sample(12.0, server_state(9, 5, 5))
    assert donor_rates(None, now, URL, "attic") is None
    assert donor_rates(sample(10.0, None), now, URL, "attic") is None
    restarted = sample(10.0, server_state(50, 1000, 1000))
    assert donor_rates(restarted, now, URL, "attic") is None
    assert request_rate(restarted, now, URL) is None


def test_the_tables_have_lent_memory_links_hits_and_alarms() -> None:
    before = sample(10.0, server_state(5, 0, 0), free=1, lent=3)
    now = sample(12.0, server_state(9, 7_000_000_000, 0), free=1, lent=2, orphaned=1)
    text = shown(before, now)
    assert "3 GiB" in text
    assert "4 GiB" in text
    assert "1 orphaned" in text
    assert "3.50" in text, "GB/s of loads"
    assert "nvlink" in text
    assert "48" in text, "tokens of three blocks"
    for share in ("25.0%", "50.0%"):
        assert share in text


def test_a_server_that_refuses_is_named_with_its_reason() -> None:
    text = shown(None, sample(12.0, None, lent=4))
    assert f"{URL}: answered 401: it wants an API key" in text
    assert "attic" in text


class _Answers(BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_GET(self) -> None:
        assert self.path == "/server_info"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"", "answered 401: it wants an API key"),
        (200, b"<html>", "does not answer"),
        (200, b'{"internal_states": [{}]}', "is no server with --swiftcache-donors"),
    ],
)
def test_what_is_no_server_is_said_in_a_line(
    url: str,
    status: int,
    body: bytes,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Answers, "status", status)
    monkeypatch.setattr(_Answers, "body", body)
    (found,) = take_sample(tmp_path, [url], Settings()).servers
    assert found.state is None
    assert words in str(found.problem)


def test_a_server_that_answers_is_read(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = server_state(5, 1, 2)
    body = orjson.dumps({"internal_states": [{"swiftcache": state}]})
    monkeypatch.setattr(_Answers, "status", 200)
    monkeypatch.setattr(_Answers, "body", body)
    (found,) = take_sample(tmp_path, [url], Settings()).servers
    assert found == ServerReport(url.rstrip("/"), state, None)


def test_nobody_listening_is_said_in_a_line(tmp_path: Path) -> None:
    (found,) = take_sample(tmp_path, ["http://127.0.0.1:9"], Settings()).servers
    assert "does not answer" in str(found.problem)
