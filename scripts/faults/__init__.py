"""The fault matrix: each fault in each phase of the server, and what it cost.

    make test-faults                                            # all cells, half an hour
    PYTHONPATH=scripts:test python -m faults --faults killed --phases idle decoding
    PYTHONPATH=scripts:test python -m faults --faults killed --write docs/reliability.md

Real servers with a tiny model on the CPU engine and real donors: of host memory, and a server that
lends its own. A cell fails if a request fails, a token differs from what the same server answered
before any fault, or something is left over: a block, a lease, a descriptor, a donor that does not
come back. The time to recover runs from the fault until the server's books are settled without what
was lost.
"""
