"""Show what a lab measured and counted, as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from .network import Network, links
from .rates import OFF, Measured

Traffic = dict[str, tuple[int, int]]


def title(network: Network) -> str:
    parts = [f"{network.hosts} hosts, {network.gbit:g} Gbit/s"]
    if network.node:
        parts = [
            f"{network.hosts} hosts in nodes of {network.node}, {network.inside_gbit:g} Gbit/s"
            f" inside, {network.gbit:g} Gbit/s between"
        ]
    if network.delay_us:
        parts.append(f"{network.delay_us:g} us one way")
    return ", ".join(parts)


def checked(network: Network, found: list[Measured]) -> Table:
    table = Table(title=f"checked: {title(network)}")
    for name in ("link", "direction", "by"):
        table.add_column(name)
    for name in ("asked Gbit/s", "measured", "asked us", "round trip us"):
        table.add_column(name, justify="right")
    for one in found:
        way = one.way
        pair = f"host {way.sender} to {way.receiver}"
        rates, times = (f"{way.asked:g}", f"{one.gbit:.4g}"), (way.delay_us, one.round_trip_us)
        table.add_row(way.link, way.direction, pair, *rates, *(f"{us:.0f}" for us in times))
    return table


def warnings(found: list[Measured], together: tuple[float, float] | None) -> list[str]:
    said = [
        f"{one.way.link} {one.way.direction} {one.gbit:.3g} Gbit/s, not {one.way.asked:g}"
        for one in found
        if one.off
    ]
    said += [
        f"{one.way.link} {one.way.direction} with a round trip of {one.round_trip_us:.0f} us, not"
        f" {one.way.delay_us:g}"
        for one in found
        if one.late
    ]
    if together and abs(together[1] / together[0] - 1) > OFF:
        said.append(
            f"all hosts at once send {together[1]:.3g} Gbit/s, not {together[0]:g}: this machine"
            " cannot carry more"
        )
    return said


def counted(network: Network, before: Traffic, after: Traffic, seconds: float) -> list[dict]:
    """Return a row for each link; shares are of what its rate carries in the given seconds."""
    rows = []
    for link in links(network):
        sent, received = (b - a for a, b in zip(before[link.name], after[link.name], strict=True))
        most = link.gbit * 1e9 / 8 * seconds
        rows.append(
            {
                "link": link.name,
                "gbit": link.gbit,
                "sent_bytes": sent,
                "received_bytes": received,
                "sent_share": sent / most,
                "received_share": received / most,
            }
        )
    return rows


def traffic(rows: list[dict[str, Any]], seconds: float) -> Table:
    table = Table(title=f"sent and received in {seconds:.2f} s")
    table.add_column("link")
    for name in ("Gbit/s", "sent MB", "share", "received MB", "share"):
        table.add_column(name, justify="right")
    for row in rows:
        ways = [
            text
            for way in ("sent", "received")
            for text in (f"{row[f'{way}_bytes'] / 1e6:.3f}", f"{row[f'{way}_share']:.1%}")
        ]
        table.add_row(row["link"], f"{row['gbit']:g}", *ways)
    return table


def as_json(found: list[Measured]) -> list[dict[str, Any]]:
    return [
        asdict(one.way) | {"gbit": one.gbit, "round_trip_us": one.round_trip_us} for one in found
    ]


def show(table: Table) -> None:
    """Print to stderr: stdout belongs to the ranks."""
    Console(stderr=True, width=100).print(table)
