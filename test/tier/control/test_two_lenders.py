"""Two servers that lend to each other: every reachable state of a small model, all looked at.

Leases run by the tables of the protocol, messages arrive in order, load comes and goes whenever it
likes. A server under load waits until all of its own memory is at home. It must never wait for
ever, whatever the other waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from swiftcache_tier.lease import LeaseEvent, LeaseState, next_state

EXTENTS = 2
SERVERS = 2


class Lease(NamedTuple):
    """One extent of a server, which the other may borrow."""

    donor: LeaseState = LeaseState.FREE
    receiver: LeaseState = LeaseState.FREE
    to_receiver: tuple[str, ...] = ()
    to_donor: tuple[str, ...] = ()


class Server(NamedTuple):
    loaded: bool
    leases: tuple[Lease, ...]
    """Of its own extents."""

    @property
    def waits(self) -> bool:
        return self.loaded and any(x.donor is not LeaseState.FREE for x in self.leases)


State = tuple[Server, ...]
START: State = tuple(Server(False, (Lease(),) * EXTENTS) for _ in range(SERVERS))


def load_changes(state: State) -> Iterator[State]:
    """What the world does: requests come to a server, or it has answered them all."""
    for number, server in enumerate(state):
        if not server.loaded or not server.waits:
            yield put(state, number, server._replace(loaded=not server.loaded))


def steps(state: State, *, vacates_while_waiting: bool) -> Iterator[State]:
    """What the servers and the messages between them do next, in any order."""
    for owner, server in enumerate(state):
        borrower = state[1 - owner]
        for place, lease in enumerate(server.leases):
            for after in lease_steps(
                lease,
                lends=not server.loaded,
                asks=server.loaded,
                vacates=vacates_while_waiting or not borrower.waits,
            ):
                leases = (*server.leases[:place], after, *server.leases[place + 1 :])
                yield put(state, owner, server._replace(leases=leases))


def lease_steps(lease: Lease, *, lends: bool, asks: bool, vacates: bool) -> Iterator[Lease]:
    donor, receiver = lease.donor, lease.receiver
    if lends and donor is LeaseState.FREE:
        yield lease._replace(
            donor=next_state(donor, LeaseEvent.OFFER), to_receiver=(*lease.to_receiver, "offer")
        )
    if asks and next_state(donor, LeaseEvent.RECLAIM) is not donor:
        yield lease._replace(
            donor=next_state(donor, LeaseEvent.RECLAIM),
            to_receiver=(*lease.to_receiver, "reclaim"),
        )
    if lease.to_receiver:
        message, *rest = lease.to_receiver
        yield receive(lease._replace(to_receiver=tuple(rest)), message)
    if lease.to_donor:
        answer, *rest = lease.to_donor
        event = {"accept": LeaseEvent.ACCEPT, "released": LeaseEvent.RELEASE}[answer]
        yield lease._replace(donor=next_state(donor, event), to_donor=tuple(rest))
    if vacates and receiver is LeaseState.RECLAIMING:
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


def reachable(*, vacates_while_waiting: bool) -> dict[State, list[State]]:
    """Every state that can be reached, with what may follow of itself, without a change of load."""
    found: dict[State, list[State]] = {}
    left = [START]
    while left:
        state = left.pop()
        if state in found:
            continue
        found[state] = list(steps(state, vacates_while_waiting=vacates_while_waiting))
        left += found[state]
        left += load_changes(state)
    return found


def deadlocks(graph: dict[State, list[State]]) -> list[State]:
    """States in which somebody waits and from which, whatever happens, they wait for ever.

    Found from the other end: a state is good if nobody waits, or if a good one can follow.
    """
    before: dict[State, list[State]] = {state: [] for state in graph}
    for state, following in graph.items():
        for after in following:
            before[after].append(state)
    good = {state for state in graph if not any(server.waits for server in state)}
    left = list(good)
    while left:
        for earlier in before[left.pop()]:
            if earlier not in good:
                good.add(earlier)
                left.append(earlier)
    return [state for state in graph if state not in good]


def has_cycle(graph: dict[State, list[State]]) -> bool:
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


@pytest.fixture(scope="module")
def graph() -> dict[State, list[State]]:
    return reachable(vacates_while_waiting=True)


def test_nobody_waits_for_ever(graph: dict[State, list[State]]) -> None:
    assert any(all(server.waits for server in state) for state in graph), "both wait at once"
    assert len(graph) > 1000
    assert deadlocks(graph) == []


def test_nobody_goes_round_in_circles(graph: dict[State, list[State]]) -> None:
    assert not has_cycle(graph)


def test_no_extent_is_used_by_both(graph: dict[State, list[State]]) -> None:
    for state in graph:
        for server in state:
            for lease in server.leases:
                if lease.donor is LeaseState.FREE:
                    assert lease.receiver is LeaseState.FREE


def test_the_model_finds_a_deadlock_where_there_is_one() -> None:
    """The control: a server that answers no reclaim while it waits for its own memory."""
    assert deadlocks(reachable(vacates_while_waiting=False))
