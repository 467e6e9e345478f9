"""What is wrong with SPECs is said in one line, before anything is allocated."""

from __future__ import annotations

import os
import pwd
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from swiftcache_tier.control.messages import PROTOCOL
from swiftcache_tier.memory import available_host_bytes
from swiftcache_tier.receiver import check_specs
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import parse_specs

SETTINGS = Settings()


@pytest.fixture
def complaint(runtime_dir: Path, one_line: Any) -> Any:
    """The line about SPECs that are wrong; nothing may come of the check."""

    def complain(*specs: str, folder: Path = runtime_dir, settings: Settings = SETTINGS) -> str:
        before = sorted(runtime_dir.iterdir()), psutil.Process().children()
        line: str = one_line(lambda: check_specs(parse_specs(specs), folder, settings))
        assert (sorted(runtime_dir.iterdir()), psutil.Process().children()) == before
        return line

    return complain


def test_what_is_right_passes_and_leaves_nothing(runtime_dir: Path) -> None:
    absent = runtime_dir / "absent"
    check_specs(parse_specs([]), absent, SETTINGS)
    check_specs(parse_specs(["host=1MiB"]), absent, SETTINGS)
    check_specs(parse_specs(None), absent, SETTINGS)
    assert not absent.exists()


def test_a_running_donor_passes(lasting_donor: Any, lasting_user: Any) -> None:
    """Also when others hold all of its memory: it shares."""
    check_specs(parse_specs(lasting_donor.spec), Path("/nowhere"), lasting_donor.settings)
    assert lasting_donor.extents("lent") == 2


def test_more_memory_than_there_is(complaint: Any) -> None:
    line = complaint("host=100TiB")
    assert "donor SPEC host=100TiB: " in line
    assert "available now" in line
    assert available_host_bytes() < 100 << 40


def test_more_extents_than_open_files(complaint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (300, 300))
    line = complaint("host=45MiB", settings=replace(SETTINGS, extent_bytes=1 << 20))
    assert "donor SPEC host=45MiB: 45 extents of 1 MiB need 301 open files" in line
    assert "larger extents with SWIFTCACHE_EXTENT_BYTES" in line


@pytest.mark.parametrize(
    ("spec", "device", "page"),
    [
        ("host=1B", "cpu", "4 KiB"),
        ("host=1KiB", "cpu", "4 KiB"),
        ("host=4095", "cuda:0", "4 KiB"),
        ("cuda:1=1MiB", "cuda:0", "2 MiB"),
    ],
)
def test_less_than_any_extent(
    runtime_dir: Path, one_line: Any, spec: str, device: str, page: str
) -> None:
    line = one_line(lambda: check_specs(parse_specs([spec]), runtime_dir, SETTINGS, device))
    assert f"donor SPEC {parse_specs([spec])[0]}: " in line
    assert f"less than one page of {'host' if 'host' in spec else 'cuda'} memory, {page}" in line
    assert "--extent-size" not in line
    check_specs(parse_specs(["host=4KiB"]), runtime_dir, SETTINGS)


def test_a_device_that_cannot_be_mapped(complaint: Any) -> None:
    line = complaint("cuda:1=40GiB")
    assert "donor SPEC cuda:1=40GiB: " in line
    assert "cannot be mapped" in line


def test_a_donor_that_does_not_exist(complaint: Any, runtime_dir: Path) -> None:
    line = complaint(f"ipc://{runtime_dir}/gone")
    assert f"donor SPEC ipc://{runtime_dir}/gone: " in line
    assert "does not exist" in line
    assert "swiftcache status" in line


def test_a_path_that_is_no_donor(complaint: Any, runtime_dir: Path) -> None:
    path = runtime_dir / "file.fds"
    path.touch()
    assert "file.fds" in complaint(f"ipc://{path}")
    path.unlink()
    path.mkdir()
    assert "file.fds" in complaint(f"ipc://{path}")
    path.rmdir()


def test_a_donor_that_has_ended(complaint: Any, start_donor: Any) -> None:
    donor = start_donor("a", "1MiB")
    donor.signal(signal.SIGKILL)
    donor.wait()
    assert "has ended and left its sockets behind" in complaint(donor.spec)


def test_a_donor_that_is_ending(complaint: Any, start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "1MiB")
    user = start_tier(donor.spec)
    user.take_all()
    donor.signal(signal.SIGTERM)
    user.poll_for(lambda: donor.status().state == "draining", "the donor drains")
    assert "draining" in complaint(donor.spec)


def test_a_donor_that_is_stuck(complaint: Any, start_donor: Any) -> None:
    donor = start_donor("a", "1MiB")
    donor.signal(signal.SIGSTOP)
    line = complaint(donor.spec, settings=replace(SETTINGS, status_timeout_s=0.1))
    assert "has not answered for 0.1 s" in line


def test_a_donor_that_somebody_owns(complaint: Any, start_receiver: Any, runtime_dir: Path) -> None:
    owner = start_receiver("owner", "host=1MiB")
    (door,) = runtime_dir.glob("*.fds")
    line = complaint(f"ipc://{door}")
    assert f"owned by process {owner.process.pid}" in line


@pytest.mark.parametrize("body", [{"type": "StatusReply", "protocol": PROTOCOL + 1}, "nonsense"])
def test_a_donor_that_speaks_otherwise(complaint: Any, runtime_dir: Path, body: Any) -> None:
    path = runtime_dir / "other.fds"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as door:
        door.bind(str(path))
        door.listen()

        def serve() -> None:
            connection, _ = door.accept()
            with connection:
                connection.recv(1 << 16)
                connection.send(msgspec.msgpack.encode(body))

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            line = complaint(f"ipc://{path}")
            served.result()
    path.unlink()
    assert f"ipc://{path}".removesuffix(".fds") in line
    assert f"version {PROTOCOL + 1}" in line or "malformed" in line


def test_a_runtime_directory_that_is_not_safe(complaint: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    for specs in ((), ("host=1MiB",)):
        assert "chmod 700" in complaint(*specs, folder=tmp_path)


@pytest.mark.parametrize("folder", ["/proc", "/proc/x", "/proc/x/y"])
def test_a_runtime_directory_where_nothing_can_be_made(complaint: Any, folder: str) -> None:
    """Whatever its mode says, and even to root."""
    for specs in ((), ("host=1MiB",)):
        line = complaint(*specs, folder=Path(folder))
        assert f"runtime directory {folder} cannot be used" in line
        assert "SWIFTCACHE_RUNTIME_DIR" in line


def test_a_runtime_directory_that_can_be_made_is_not_left(runtime_dir: Path) -> None:
    check_specs(parse_specs([]), runtime_dir / "a" / "b", SETTINGS)
    check_specs(parse_specs([]), runtime_dir, SETTINGS)
    assert list(runtime_dir.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_runtime_directory_of_another_user(complaint: Any, tmp_path: Path) -> None:
    os.chown(tmp_path, pwd.getpwnam("nobody").pw_uid, -1)
    assert "owned by user nobody" in complaint(folder=tmp_path)


def test_a_runtime_directory_that_cannot_be_made(complaint: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in complaint(folder=tmp_path / "file" / "rt")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_runtime_directory_that_may_not_be_made(complaint: Any, runtime_dir: Path) -> None:
    runtime_dir.parent.chmod(0o755)
    runtime_dir.chmod(0o755)
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        line = complaint(folder=runtime_dir.parent / "new")
    finally:
        os.seteuid(0)
    assert "may not be written by user nobody" in line


def test_a_runtime_directory_that_is_too_long_for_sockets(complaint: Any) -> None:
    for specs in ((), ("host=1MiB",)):
        assert "shorter" in complaint(*specs, folder=Path("/tmp/" + "d" * 100))


def test_less_than_one_block_is_told_at_the_start(start_tier: Any, one_line: Any) -> None:
    """How large a block is, the check cannot know."""
    line = one_line(lambda: start_tier("host=4KiB", block_bytes=1 << 17))
    assert "granted 4 KiB, which has no room for one block of 128 KiB" in line
    assert "as in host=8GiB" in line
