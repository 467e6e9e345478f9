"""With copies on two donors, memory that is really gone costs no recompute."""

from __future__ import annotations

from pathlib import Path

from e2e.conftest import SMALL_POOL

from support.conversations import Turn, donor_tokens, hold, outputs
from support.donors import Donor
from support.processes import wait_until
from support.server import Server

DEADLINE_S = 60.0


def computed_tokens(turns: list[Turn]) -> int:
    return sum(turn.prompt_tokens - turn.device_tokens - turn.donor_tokens for turn in turns)


def wait_for_copies(server: Server, *names: str) -> None:
    """Until the server's donors are these, and each block has as many copies as it can."""

    def settled() -> bool:
        tier = server.swiftcache()
        short = tier["replicas"]["short_blocks"]
        return {d["name"] for d in tier["donors"] if d["state"] == "joined"} == set(names) and (
            len(tier["donors"]) == len(names) and (len(names) < 2 or short == 0)
        )

    wait_until(settled, DEADLINE_S, f"every block has its copies on {names}")


def test_a_donor_and_its_memory_are_lost_and_every_hit_stays_a_hit(
    tiny_model: Path, tmp_path: Path, expected_outputs: list[list[int]]
) -> None:
    runtime_dir = tmp_path / "rt"
    with (
        Donor(runtime_dir, "ada") as ada,
        Donor(runtime_dir, "bob") as bob,
        Server(
            tiny_model,
            *SMALL_POOL,
            *("--page-size", "16", "--chunked-prefill-size", "128"),
            *("--swiftcache-donors", "--swiftcache-replicas", "2", "--swiftcache-verify"),
            *("--swiftcache-runtime-dir", str(runtime_dir)),
            tmp_path=tmp_path,
        ) as server,
    ):
        wait_for_copies(server, "ada", "bob")
        assert outputs(hold(server)) == expected_outputs
        turns = hold(server)
        assert outputs(turns) == expected_outputs
        usual = computed_tokens(turns)
        copies = server.swiftcache()["replicas"]["copies"]
        assert copies * 2 == server.swiftcache()["blocks"]["used"]

        # A donor that dies with its memory.
        bob.overwrite_memory(0xA5)
        bob.kill()
        wait_for_copies(server, "ada")
        turns = hold(server)
        assert outputs(turns) == expected_outputs
        assert computed_tokens(turns) == usual
        tier = server.swiftcache()
        assert tier["lost_blocks"] == tier["moved_blocks"] == 0

        # Copies are made again on the next that comes, good enough to live on alone.
        with Donor(runtime_dir, "cid") as cid:
            wait_for_copies(server, "ada", "cid")
            assert server.swiftcache()["replicas"]["refilled_blocks"] > 0
            ada.overwrite_memory(0x11)
            ada.kill()
            wait_for_copies(server, "cid")
            turns = hold(server)
            assert outputs(turns) == expected_outputs
            assert computed_tokens(turns) == usual
            assert server.swiftcache()["lost_blocks"] == 0

            # A donor whose every byte is wrong: what it is asked for is read from the other.
            with Donor(runtime_dir, "dan"):
                wait_for_copies(server, "cid", "dan")
                cid.overwrite_memory(0x5A)
                turns = hold(server)
                assert outputs(turns) == expected_outputs
                assert donor_tokens(turns) > 0
                assert computed_tokens(turns) == usual
                assert server.swiftcache()["corrupt_blocks"] > 0
