"""Runs a fake server in this process, beside the client under test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from benchmark.fake_server import FakeServer


@contextlib.asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[str]:
    """The URL of ``server`` while the block runs."""
    runner = web.AppRunner(server.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
