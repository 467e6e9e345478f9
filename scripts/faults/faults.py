"""What goes wrong, when it has been got over, and how the stage is put right again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from faults.stage import VICTIM, Stage
from support.processes import wait_until
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.settings import Settings

DEADLINE_S = 60.0
DAMAGE = 0xA5


class Fault(NamedTuple):
    """One row of the matrix. All functions are given the stage."""

    title: str
    inject: Callable[[Stage], None]
    recovered: Callable[[Stage], bool]
    repair: Callable[[Stage], None]
    copies: bool = False
    """Needs a server that keeps copies and verifies what it restores."""
    engine: bool = False
    """The donor is a serving engine that lends its own KV memory."""
    ends_server: bool = False
    """Requests that are running end with the server, and are not counted."""


def _kill(stage: Stage) -> None:
    stage.kill_victim()


def _kill_and_restart(stage: Stage) -> None:
    stage.kill_victim()
    stage.restart_victim()


def _stop(stage: Stage) -> None:
    stage.stop_victim()


def _go_on(stage: Stage) -> None:
    stage.continue_victim()


def _leave(stage: Stage) -> None:
    assert stage.victim.leave() == 0, stage.victim.log()


def _damage(stage: Stage) -> None:
    stage.victim.overwrite_memory(DAMAGE)


def _kill_with_memory(stage: Stage) -> None:
    _damage(stage)
    stage.victim.kill()


def _hang_the_server(stage: Stage) -> None:
    """Long enough for both donors to give it up as silent."""
    scheduler = stage.scheduler()
    paths = donor_paths(stage.runtime_dir, VICTIM)
    scheduler.suspend()
    try:
        wait_until(
            lambda: query_status(paths, Settings()).extents["orphaned"] == stage.extents(),
            DEADLINE_S,
            "the donor has noticed that its receiver hangs",
        )
    finally:
        scheduler.resume()


def _kill_the_server(stage: Stage) -> None:
    stage.server.stop()


def _is_clean(stage: Stage) -> bool:
    """Donors have all their memory back, and nothing of the server is left in it."""
    return all(
        query_status(donor_paths(stage.runtime_dir, donor.name), Settings()).extents["free"]
        == stage.extents()
        and donor.memory_is_zero()
        for donor in (stage.stays, stage.victim)
    )


def _start_the_server(stage: Stage) -> None:
    stage.start_server()
    stage.take_stock()


def _nothing(stage: Stage) -> None:
    pass


def _replace(stage: Stage) -> None:
    """A donor whose memory is damaged leaves, and a new one comes."""
    _leave(stage)
    stage.restart_victim()


def _restart(stage: Stage) -> None:
    stage.restart_victim()


FAULTS = {
    "killed": Fault(
        "donor is killed (SIGKILL, as the out-of-memory killer does)",
        _kill,
        Stage.without_victim,
        _restart,
    ),
    "restarted": Fault(
        "donor is killed and started again at once", _kill_and_restart, Stage.whole, _nothing
    ),
    "stopped": Fault("donor hangs (SIGSTOP)", _stop, Stage.without_victim, _go_on),
    "leaves": Fault("donor ends (SIGTERM)", _leave, Stage.without_victim, _restart),
    "engine-killed": Fault(
        "donor engine is killed (SIGKILL of all its processes)",
        _kill,
        Stage.without_victim,
        _restart,
        engine=True,
    ),
    "engine-restarted": Fault(
        "donor engine is killed and started again at once",
        _kill_and_restart,
        Stage.whole,
        _nothing,
        engine=True,
    ),
    "engine-stopped": Fault(
        "donor engine hangs (SIGSTOP of all its processes), then goes on",
        _stop,
        Stage.without_victim,
        _go_on,
        engine=True,
    ),
    "server-hangs": Fault(
        "server hangs until its donors give it up, then goes on",
        _hang_the_server,
        Stage.whole,
        _nothing,
    ),
    "server-killed": Fault(
        "server and all its processes are killed (SIGKILL)",
        _kill_the_server,
        _is_clean,
        _start_the_server,
        ends_server=True,
    ),
    "memory-gone": Fault(
        "donor is killed and its memory is destroyed (with 2 copies)",
        _kill_with_memory,
        Stage.without_victim,
        _restart,
        copies=True,
    ),
    "corrupt": Fault(
        "all bytes of a donor change (with 2 copies and verification)",
        _damage,
        Stage.whole,
        _replace,
        copies=True,
    ),
}
