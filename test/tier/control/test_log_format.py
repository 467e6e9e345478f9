"""Log lines as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.log_format import JsonFormatter, json_wanted

START_DEADLINE_S = 30.0


def formatted(record: logging.LogRecord) -> dict[str, object]:
    line: dict[str, object] = json.loads(JsonFormatter(donor="attic").format(record))
    return line


def test_a_line_has_its_message_its_fields_and_its_time() -> None:
    record = logging.getLogger("a.b").makeRecord(
        *("a.b", logging.WARNING, __file__, 1, "%d of %s\n", (3, "four"), None),
        extra={"event": "counted", "blocks": 3},
    )
    line = formatted(record)
    assert line["message"] == "3 of four\n"
    assert (line["level"], line["logger"]) == ("WARNING", "a.b")
    assert (line["event"], line["blocks"], line["donor"]) == ("counted", 3, "attic")
    assert datetime.fromisoformat(str(line["time"])).timestamp() == pytest.approx(record.created)


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("no room")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    assert "ValueError: no room" in str(formatted(record)["exception"])


def test_another_format_is_refused() -> None:
    with pytest.raises(SwiftCacheError, match="SWIFTCACHE_LOG_FORMAT is 'xml': expected text or"):
        json_wanted({"SWIFTCACHE_LOG_FORMAT": "xml"})


def test_every_line_of_a_donor_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTCACHE_LOG_FORMAT", "json")
    # not a whole number of extents, which is worth a line
    command = [sys.executable, "-m", "swiftcache_tier", "donor", "--device", "host", "--name", "a"]
    command += ["--size", "1000KiB", "--extent-size", "256KiB", "--runtime-dir", str(tmp_path)]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stderr=stderr, stdout=subprocess.PIPE) as donor,
    ):
        try:
            assert donor.stdout is not None
            assert donor.stdout.readline().startswith(b"swiftcache donor a:"), "it is ready"
            donor.terminate()
            assert donor.wait(START_DEADLINE_S) == 0
        finally:
            donor.kill()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert "rounded down to 3 extents" in lines[0]["message"]
    assert {line["donor"] for line in lines} == {"a"}
