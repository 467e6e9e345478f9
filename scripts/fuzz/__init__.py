"""Throw hostile and broken input at donors and receivers, and see that they go on.

    PYTHONPATH=scripts:test python -m fuzz                    # 100,000 inputs, a few minutes
    PYTHONPATH=scripts:test python -m fuzz --inputs 5000 --seed 7

Three attacks, each by a process of its own on real processes: on a donor's door, on a donor's
control socket, and by a donor on a receiver. Inputs are random bytes; real messages with bits
flipped, cut off, joined, too long, nested, or with fields of other messages and wrong numbers;
messages repeated and out of order; tokens, grants and extents of others; descriptors of all kinds
where none, one or more are expected; connections that say nothing, say half, or close at once.

A peer that behaves uses the victim all the while. The run fails if a victim ends, stops answering,
keeps memory or descriptors, or if a byte of what the peer keeps there changes.
"""
