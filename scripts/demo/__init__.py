"""The demo: conversations with a small chat model whose prefix cache lies in donors' memory.

Run by ``make demo``. It drives the server with the harness that the tests use.
"""
