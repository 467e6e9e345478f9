"""Which doors a receiver tries."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.receiver.discovery import Discovery, identity_of


def listen_at(path: Path) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(path))
    return door


def test_who_was_refused_is_not_tried_again_and_who_takes_its_place_is(runtime_dir: Path) -> None:
    paths = donor_paths(runtime_dir, "a")
    discovery = Discovery()
    discovery.watch_folder(runtime_dir)
    with closing(listen_at(paths.door)):
        refused = identity_of(paths.door)
        assert discovery.find(()) == [paths]
        discovery.refuse(paths, refused)
        assert discovery.find(()) == []
        paths.door.unlink()
        with closing(listen_at(paths.door)):
            assert discovery.find(()) == [paths]
            # The refusal of the first comes late: it is not for the second.
            discovery.refuse(paths, refused)
            assert discovery.find(()) == [paths]
    paths.door.unlink()


def test_a_donor_of_the_receivers_own_is_found_once_and_trusted_no_more_than_others(
    runtime_dir: Path,
) -> None:
    paths = donor_paths(runtime_dir, "a")
    discovery = Discovery()
    discovery.expect(paths)
    assert discovery.find(()) == []
    with closing(listen_at(paths.door)):
        assert discovery.find(()) == [paths]
        discovery.watch_folder(runtime_dir)  # as `auto` does, too
        assert discovery.find(()) == [paths]
    paths.door.unlink()
    assert not discovery.is_named(paths)
