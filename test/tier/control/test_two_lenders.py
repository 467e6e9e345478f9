"""Two servers that lend to each other: every reachable state of a small model, all looked at.

Leases run by the tables of the protocol, messages arrive in order, load comes whenever it likes. A
server with requests asks its own memory back, and holds them, in the queue or in the middle of an
answer, while some is on its way. It must never hold them for ever, whatever the other waits for:
what is not back by the deadline is degraded and not waited for, and nobody waits for longer than
`take_back_wait_s`. Memory that requests of the borrower read from is not given back before they
have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

import pytest

from swiftcache_tier.lease import LeaseEvent, LeaseState, next_state

SERVERS = 2


class Load(StrEnum):
    IDLE = "idle"
    HELD = "held"  # its requests wait for its own memory: admission, or the next token
    RUNNING = "running"


class Rules(NamedTuple):
    """What the servers of a model do."""

    extents: int = 1
    """Of each server."""
    pins: bool = True
    """Requests read what was borrowed, which stays until they have ended."""
    deadline: bool = True
    """A reclaim that is not answered in time degrades the extent."""
    patience: bool = True
    """Requests are held for some time only."""
    answers_while_held: bool = True
    """A server gives back to the other while its own requests are held."""


class Lease(NamedTuple):
    """One extent of a server, which the other may borrow."""

    donor: LeaseState = LeaseState.FREE
    receiver: LeaseState = LeaseState.FREE
    pinned: bool = False
    to_receiver: tuple[str, ...] = ()
    to_donor: tuple[str, ...] = ()

    @property
    def is_awaited(self) -> bool:
        return self.donor not in (LeaseState.FREE, LeaseState.DEGRADED)


class Server(NamedTuple):
    load: Load
    leases: tuple[Lease, ...]
    """Of its own extents."""

    @property
    def is_held(self) -> bool:
        return self.load is Load.HELD

    @property
    def awaits(self) -> bool:
        return any(lease.is_awaited for lease in self.leases)


State = tuple[Server, ...]
Graph = dict[State, list[State]]


def load_changes(state: State, rules: Rules) -> Iterator[State]:
    """What the world does: requests come, fit or are held, or read what was borrowed."""
    for owner, server in enumerate(state):
        if server.load is Load.IDLE:
            yield put(state, owner, server._replace(load=Load.RUNNING))
        if not server.is_held:
            yield put(state, owner, server._replace(load=Load.HELD))
        if not rules.pins or state[1 - owner].load is not Load.RUNNING:
            continue
        for place, lease in enumerate(server.leases):
            if lease.receiver is LeaseState.LENT and not lease.pinned:
                yield put_lease(state, owner, place, lease._replace(pinned=True))


def steps(state: State, rules: Rules) -> Iterator[State]:
    """What the servers and the messages between them do next, in any order."""
    for owner, server in enumerate(state):
        if server.is_held and (rules.patience or not server.awaits):
            yield put(state, owner, server._replace(load=Load.RUNNING))
        if server.load is Load.RUNNING:
            yield finish(state, owner)
        vacates = rules.answers_while_held or not state[1 - owner].is_held
        for place, lease in enumerate(server.leases):
            for after in lease_steps(lease, server.load, vacates, rules):
                yield put_lease(state, owner, place, after)


def finish(state: State, number: int) -> State:
    """The requests of a server end, and let go of what they read."""
    other = state[1 - number]
    unpinned = tuple(lease._replace(pinned=False) for lease in other.leases)
    state = put(state, 1 - number, other._replace(leases=unpinned))
    return put(state, number, state[number]._replace(load=Load.IDLE))


def lease_steps(lease: Lease, load: Load, vacates: bool, rules: Rules) -> Iterator[Lease]:
    donor, receiver = lease.donor, lease.receiver
    if load is Load.IDLE and donor is LeaseState.FREE:
        yield lease._replace(
            donor=next_state(donor, LeaseEvent.OFFER), to_receiver=(*lease.to_receiver, "offer")
        )
    if load is Load.HELD and next_state(donor, LeaseEvent.RECLAIM) is not donor:
        yield lease._replace(
            donor=next_state(donor, LeaseEvent.RECLAIM),
            to_receiver=(*lease.to_receiver, "reclaim"),
        )
    if rules.deadline and next_state(donor, LeaseEvent.EXPIRE) is not donor:
        yield lease._replace(donor=next_state(donor, LeaseEvent.EXPIRE))
    if lease.to_receiver:
        message, *rest = lease.to_receiver
        yield receive(lease._replace(to_receiver=tuple(rest)), message)
    if lease.to_donor:
        answer, *rest = lease.to_donor
        event = {"accept": LeaseEvent.ACCEPT, "released": LeaseEvent.RELEASE}[answer]
        yield lease._replace(donor=next_state(donor, event), to_donor=tuple(rest))
    if vacates and receiver is LeaseState.RECLAIMING and not lease.pinned:
        yield lease._replace(
            receiver=next_state(receiver, LeaseEvent.RELEASE),
            to_donor=(*lease.to_donor, "released"),
        )


def receive(lease: Lease, message: str) -> Lease:
    if message == "offer":
        mapped = next_state(next_state(lease.receiver, LeaseEvent.OFFER), LeaseEvent.ACCEPT)
        return lease._replace(receiver=mapped, to_donor=(*lease.to_donor, "accept"))
    if lease.receiver is LeaseState.FREE:
        return lease._replace(to_donor=(*lease.to_donor, "released"))
    return lease._replace(receiver=next_state(lease.receiver, LeaseEvent.RECLAIM))


def put(state: State, number: int, server: Server) -> State:
    return (*state[:number], server, *state[number + 1 :])


def put_lease(state: State, owner: int, place: int, lease: Lease) -> State:
    server = state[owner]
    leases = (*server.leases[:place], lease, *server.leases[place + 1 :])
    return put(state, owner, server._replace(leases=leases))


def reachable(rules: Rules) -> Graph:
    """Every state that can be reached, with what may follow of itself, without a change of load."""
    found: Graph = {}
    left: list[State] = [(Server(Load.IDLE, (Lease(),) * rules.extents),) * SERVERS]
    while left:
        state = left.pop()
        if state in found:
            continue
        found[state] = list(steps(state, rules))
        left += found[state]
        left += load_changes(state, rules)
    return found


def never(graph: Graph, good: Callable[[State], bool]) -> list[State]:
    """States that no good one can follow, whatever happens.

    Found from the other end: from those that are good, backwards.
    """
    before: Graph = {state: [] for state in graph}
    for state, following in graph.items():
        for after in following:
            before[after].append(state)
    reaching = {state for state in graph if good(state)}
    left = list(reaching)
    while left:
        for earlier in before[left.pop()]:
            if earlier not in reaching:
                reaching.add(earlier)
                left.append(earlier)
    return [state for state in graph if state not in reaching]


def deadlocks(graph: Graph) -> list[State]:
    """States in which requests are held, for ever."""
    return never(graph, lambda state: not any(server.is_held for server in state))


def has_cycle(graph: Graph) -> bool:
    """Whether servers that wait could go round in a circle, with no change of load."""
    done: set[State] = set()
    on_path: set[State] = set()
    stack: list[tuple[State, Iterator[State]]] = []
    for start in graph:
        if start in done:
            continue
        stack.append((start, iter(graph[start])))
        on_path.add(start)
        while stack:
            state, following = stack[-1]
            after = next(following, None)
            if after is None:
                stack.pop()
                on_path.remove(state)
                done.add(state)
            elif after in on_path:
                return True
            elif after not in done:
                on_path.add(after)
                stack.append((after, iter(graph[after])))
    return False


WITHOUT_TIMERS = Rules(deadline=False, patience=False)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return reachable(Rules())


def test_nobody_waits_for_ever(graph: Graph) -> None:
    assert any(all(server.is_held for server in state) for state in graph), "both wait at once"
    assert any(lease.pinned for state in graph for lease in state[0].leases)
    assert len(graph) > 1000
    assert deadlocks(graph) == []


def test_nobody_goes_round_in_circles(graph: Graph) -> None:
    assert not has_cycle(graph)


def test_no_extent_is_used_by_both(graph: Graph) -> None:
    for state in graph:
        for server in state:
            for lease in server.leases:
                if lease.donor is LeaseState.FREE:
                    assert lease.receiver is LeaseState.FREE


def test_what_is_degraded_comes_back(graph: Graph) -> None:
    def none_is(state: State) -> bool:
        return all(x.donor is not LeaseState.DEGRADED for server in state for x in server.leases)

    assert not all(none_is(state) for state in graph)
    assert never(graph, none_is) == []


@pytest.mark.parametrize(
    "rules",
    [
        Rules(patience=False),
        Rules(deadline=False),
        Rules(answers_while_held=False),
        WITHOUT_TIMERS._replace(pins=False, extents=2),
    ],
    ids=["the deadline", "patience", "both", "answers, where nothing is pinned"],
)
def test_each_of_these_is_enough(rules: Rules) -> None:
    assert deadlocks(reachable(rules)) == []


@pytest.mark.parametrize(
    "rules",
    [WITHOUT_TIMERS, WITHOUT_TIMERS._replace(pins=False, answers_while_held=False)],
    ids=["answers in progress that read from each other", "a server that answers no reclaim"],
)
def test_the_model_finds_a_deadlock_where_there_is_one(rules: Rules) -> None:
    """The controls: servers that hold their requests for as long as it takes."""
    assert deadlocks(reachable(rules))
