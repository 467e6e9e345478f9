"""The folder of sockets: whose it is, who has which name in it."""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.control.door import (
    NoDonor,
    clear_door,
    connect_door,
    leave_door,
    take_door,
    was_left,
)
from swiftcache_tier.control.runtime_dir import (
    DonorPaths,
    check_runtime_dir,
    default_runtime_dir,
    donor_paths,
    donor_paths_at,
    ensure_runtime_dir,
    list_donors,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.spec import parse_specs


def take(folder: Path, name: str) -> socket.socket:
    return take_door(donor_paths(folder, name), backlog=1, mode=0o600, lock_timeout_s=5.0)


def test_where_it_is_by_default(tmp_path: Path) -> None:
    chosen = {"SWIFTCACHE_RUNTIME_DIR": "/chosen", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert default_runtime_dir(chosen) == Path("/chosen")
    assert default_runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "swiftcache"
    own = Path(f"/tmp/swiftcache-{os.geteuid()}")
    assert default_runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}) == own
    assert default_runtime_dir({}) == own
    assert list(tmp_path.iterdir()) == []


def test_it_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "rt"
    ensure_runtime_dir(folder)
    ensure_runtime_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_one_that_is_absent_passes_the_check(tmp_path: Path) -> None:
    check_runtime_dir(tmp_path / "absent")
    assert list_donors(tmp_path / "absent") == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o1770, 0o702])
def test_one_that_others_may_write_is_refused(tmp_path: Path, one_line: Any, mode: int) -> None:
    """It is to be closed only where that takes nothing from anybody."""
    tmp_path.chmod(mode)
    line = one_line(lambda: check_runtime_dir(tmp_path))
    assert f"{mode:04o}" in line
    assert "name another runtime directory (SWIFTCACHE_RUNTIME_DIR)" in line
    assert (f"chmod 700 {tmp_path}" in line) == (mode == 0o770)


def test_one_that_holds_more_than_donors_is_not_to_be_closed(tmp_path: Path, one_line: Any) -> None:
    tmp_path.chmod(0o770)
    for path in donor_paths(tmp_path, "a"):
        path.touch()
    assert "chmod 700" in one_line(lambda: check_runtime_dir(tmp_path))
    (tmp_path / "letters.txt").touch()
    assert "chmod" not in one_line(lambda: check_runtime_dir(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_one_of_another_user_is_refused(tmp_path: Path, one_line: Any) -> None:
    os.chown(tmp_path, pwd.getpwnam("nobody").pw_uid, -1)
    line = one_line(lambda: ensure_runtime_dir(tmp_path))
    assert "owned by user nobody" in line
    assert "SWIFTCACHE_RUNTIME_DIR" in line


def test_a_file_in_its_place_is_refused(tmp_path: Path, one_line: Any) -> None:
    (tmp_path / "rt").touch()
    for path in (tmp_path / "rt", tmp_path / "rt" / "below"):
        line = one_line(lambda path=path: ensure_runtime_dir(path))
        assert str(path) in line
        assert "SWIFTCACHE_RUNTIME_DIR" in line


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "a\n", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, one_line: Any, name: str) -> None:
    line = one_line(lambda: donor_paths(tmp_path, name))
    assert repr(name).strip("'") in line
    assert "expected" in line


def test_a_path_that_is_too_long_for_a_socket_is_refused(one_line: Any) -> None:
    longest = Path("/" + "d" * 99)
    assert len(str(donor_paths(longest, "ab").door)) == 107
    line = one_line(lambda: donor_paths(longest, "abc"))
    assert "107" in line
    assert "shorter" in line


def test_a_spec_may_name_the_donor_or_either_socket(tmp_path: Path) -> None:
    paths = donor_paths(tmp_path, "gpu1.5")
    assert paths.name == "gpu1.5"
    assert paths.spec == f"ipc://{tmp_path}/gpu1.5"
    for path in (tmp_path / "gpu1.5", *paths):
        (spec,) = parse_specs(f"ipc://{path}")
        assert spec.path is not None
        assert donor_paths_at(spec.path) == paths


def test_live_and_ended_donors_are_listed(runtime_dir: Path) -> None:
    with closing(take(runtime_dir, "b")), closing(take(runtime_dir, "a")):
        (runtime_dir / "notes.txt").touch()
        assert [paths.name for paths in list_donors(runtime_dir)] == ["a", "b"]
    assert [paths.name for paths in list_donors(runtime_dir)] == ["a", "b"]
    for paths in list_donors(runtime_dir):
        leave_door(paths)
    (runtime_dir / "notes.txt").unlink()


def test_a_name_is_taken_while_its_donor_lives(runtime_dir: Path, one_line: Any) -> None:
    paths = donor_paths(runtime_dir, "a")
    with closing(take(runtime_dir, "a")):
        line = one_line(lambda: take(runtime_dir, "a"))
        assert "'a' is taken" in line
        assert "--name" in line
        connect_door(paths).close()
    with pytest.raises(NoDonor, match="has ended"):
        connect_door(paths)
    with closing(take(runtime_dir, "a")):
        connect_door(paths).close()
    leave_door(paths)


def test_a_name_is_taken_even_if_its_donor_is_too_busy_to_answer(
    runtime_dir: Path, one_line: Any
) -> None:
    paths = donor_paths(runtime_dir, "a")
    with closing(take(runtime_dir, "a")):
        waiting: list[socket.socket] = []

        def fill() -> None:
            while True:
                waiting.append(connect_door(paths))

        with pytest.raises(NoDonor, match="stopped or stuck"):
            fill()
        assert "'a' is taken" in one_line(lambda: take(runtime_dir, "a"))
        for connection in waiting:
            connection.close()
    leave_door(paths)


def test_what_is_no_donor_is_not_replaced(runtime_dir: Path, one_line: Any) -> None:
    path = donor_paths(runtime_dir, "a").door
    path.write_text("somebody's letters")
    assert "no donor's socket" in one_line(lambda: take(runtime_dir, "a"))
    assert path.read_text() == "somebody's letters"
    path.unlink()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as stream:
        stream.bind(str(path))
        stream.listen()
        assert "no donor's socket" in one_line(lambda: take(runtime_dir, "a"))
    path.unlink()


def leave(runtime_dir: Path) -> DonorPaths:
    """Both sockets of a donor that was killed."""
    paths = donor_paths(runtime_dir, "a")
    take(runtime_dir, "a").close()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as control:
        control.bind(str(paths.control))
    return paths


def test_what_a_killed_donor_left_is_cleared(runtime_dir: Path) -> None:
    paths = leave(runtime_dir)
    assert was_left(paths)
    assert clear_door(paths, lock_timeout_s=5.0)
    assert list(runtime_dir.iterdir()) == []
    assert not was_left(paths)
    assert clear_door(paths, lock_timeout_s=5.0)
    assert not was_left(donor_paths(runtime_dir / "absent", "a"))
    with pytest.raises(FileNotFoundError):
        clear_door(donor_paths(runtime_dir / "absent", "a"), lock_timeout_s=5.0)


def test_the_sockets_of_a_live_donor_are_not_cleared(runtime_dir: Path) -> None:
    paths = leave(runtime_dir)
    with closing(take(runtime_dir, "a")):
        paths.control.touch()
        assert not was_left(paths)
        assert not clear_door(paths, lock_timeout_s=5.0)
        assert set(runtime_dir.iterdir()) == set(paths)
    leave_door(paths)


def test_what_is_no_donor_is_not_cleared(runtime_dir: Path) -> None:
    paths = donor_paths(runtime_dir, "a")
    paths.door.write_text("somebody's letters")
    assert not was_left(paths)
    assert not clear_door(paths, lock_timeout_s=5.0)
    assert paths.door.read_text() == "somebody's letters"
    paths.door.unlink()


def test_nothing_is_cleared_while_a_donor_starts(runtime_dir: Path) -> None:
    """It may have replaced what was vacant a moment ago."""
    paths = leave(runtime_dir)
    folder = os.open(runtime_dir, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(SwiftCacheError, match="another donor has been starting"):
        clear_door(paths, lock_timeout_s=0.02)
    assert set(runtime_dir.iterdir()) == set(paths)
    os.close(folder)
    assert clear_door(paths, lock_timeout_s=5.0)
