"""Evict, restore, abort and flip bytes of donor memory at random, and compare every token.

    PYTHONPATH=scripts:test python -m stress                      # a tiny model on the CPU
    PYTHONPATH=scripts:test python -m stress -- --device cuda     # the same; flags for the server
    PYTHONPATH=scripts:test python -m stress --url http://127.0.0.1:30000 --seconds 300

``--flips-per-s 0`` leaves donor memory alone and starts the server without ``--swiftcache-verify``,
so that loads overlap the prefill; ``-- --swiftcache-verify`` gives the flag all the same.

The first answer to each prompt, given by an empty cache before anything is disturbed, is what all
later ones must equal, so the server must compute the same in any batch: in float32 on the CPU or
with ``--dtype float32``, else with ``--enable-deterministic-inference``.
"""
