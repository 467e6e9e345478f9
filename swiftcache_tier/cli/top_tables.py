"""The tables of `swiftcache top`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swiftcache_tier.cli.status import DonorReport, lent_bytes
from swiftcache_tier.cli.top_sample import Sample, ServerReport, donor_rates, request_rate
from swiftcache_tier.extents import describe_device
from swiftcache_tier.sizes import format_size

_BAR_COLUMNS = 16
_ALARMING_STATES = ("orphaned", "degraded")


def tables(before: Sample | None, now: Sample) -> RenderableType:
    """Donors, links between servers and donors, and hits, as they are `now`.

    Rates are over the time since `before`; without it they are left out.
    """
    parts: list[RenderableType] = [_donors(now)]
    servers = [server for server in now.servers if server.state is not None]
    if servers:
        parts += [Text(), _links(before, now, servers), Text(), _hits(before, now, servers)]
    parts += [
        Text(f"{name}: {problem}", style="yellow")
        for name, problem in (
            *((report.paths.name, report.problem) for report in now.donors),
            *((server.url, server.problem) for server in now.servers),
        )
        if problem is not None
    ]
    return Group(*parts)


def _donors(now: Sample) -> Table:
    table = Table("DONOR", "DEVICE", "STATE", "LENT", "", "SIZE", "ALARMS", "RECEIVERS", box=None)
    for report in now.donors:
        table.add_row(*_donor_row(report))
    if not now.donors:
        table.add_row(Text("no donor in the runtime directory"))
    return table


def _donor_row(report: DonorReport) -> list[RenderableType]:
    reply = report.reply
    if reply is None:
        return [Text(report.paths.name), Text(), Text(report.state, style="red")]
    size, lent = sum(reply.extents.values()) * reply.extent_bytes, lent_bytes(reply)
    alarms = [f"{n} {s}" for s, n in reply.extents.items() if n and s in _ALARMING_STATES]
    return [
        Text(reply.name),
        Text(describe_device(reply.device, reply.device_uuid, None)),
        Text(report.state),
        Text(format_size(lent), justify="right"),
        ProgressBar(total=max(size, 1), completed=lent, width=_BAR_COLUMNS),
        Text(format_size(size), justify="right"),
        Text(", ".join(alarms), style="red"),
        Text(", ".join(receiver.name for receiver in reply.receivers)),
    ]


def _links(before: Sample | None, now: Sample, servers: list[ServerReport]) -> Table:
    table = Table(box=None)
    for name in ("SERVER", "DONOR", "LINK", "STATE"):
        table.add_column(name)
    for name in ("USED", "RETIRING", "BLOCKS", "LOAD GB/s", "STORE GB/s", "HIT TOKENS"):
        table.add_column(name, justify="right")
    for server in servers:
        for donor in _state(server)["donors"]:
            table.add_row(*_link_row(before, now, server, donor))
    return table


def _link_row(
    before: Sample | None, now: Sample, server: ServerReport, donor: Mapping[str, Any]
) -> list[Text]:
    state = _state(server)
    rates = donor_rates(before, now, server.url, donor["name"])
    blocks = donor["blocks"]
    hit_tokens = state["hit_blocks_by_donor"].get(donor["name"], 0) * state["block_tokens"]
    return [
        Text(server.url),
        Text(donor["name"]),
        Text(donor["link"]),
        Text(donor["state"], style="" if donor["state"] == "joined" else "yellow"),
        Text(str(blocks["used"])),
        Text(str(blocks["retiring"]) if blocks["retiring"] else ""),
        Text(str(blocks["total"])),
        Text("" if rates is None else f"{rates.load_gb_per_s:.2f}"),
        Text("" if rates is None else f"{rates.store_gb_per_s:.2f}"),
        Text(str(hit_tokens)),
    ]


def _hits(before: Sample | None, now: Sample, servers: list[ServerReport]) -> Table:
    table = Table(box=None)
    table.add_column("SERVER")
    for name in (
        *("REQUESTS", "PER s", "ON DEVICE", "FROM DONORS", "COMPUTED"),
        *("LOST BLOCKS", "LATE RECLAIMS", "STALLS"),
    ):
        table.add_column(name, justify="right")
    for server in servers:
        state = _state(server)
        rate = request_rate(before, now, server.url)
        tokens = {**state["hit_tokens"], "computed": state["recomputed_tokens"]}
        table.add_row(
            Text(server.url),
            Text(str(state["requests"])),
            Text("" if rate is None else f"{rate:.1f}"),
            *(Text(_share(tokens[key], tokens)) for key in ("device", "donor", "computed")),
            *(_alarm(state["lost_blocks"]), _alarm(state["reclaims"]["late"])),
            _alarm(state["stalls"]),
        )
    return table


def _state(server: ServerReport) -> Mapping[str, Any]:
    assert server.state is not None
    return server.state


def _share(part: int, tokens: Mapping[str, int]) -> str:
    """Of all prompt tokens so far."""
    total = sum(tokens.values())
    return f"{part / total:.1%}" if total else ""


def _alarm(count: int) -> Text:
    return Text(str(count), style="red" if count else "")
