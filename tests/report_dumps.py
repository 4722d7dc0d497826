"""Dumps without a model, for tests of their readers. Numbers are made up, but consistent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from commpass.plan import (
    Candidate,
    Grouped,
    Plan,
    PlannedSite,
    Simplification,
    Site,
    Split,
    planned,
    uncompressed,
)
from commpass.plan.dump import Considered, Dump, GraphNode
from commpass.plan.timeline import COMPUTE, EXCHANGE, HOST, WAIT, Event, Timeline

PARTS = ("attn.o", "mlp.down")
ALONE = Candidate(wire_bytes=1 << 20, predicted_us=8500.5)
INT8 = Candidate(
    codec="int8",
    algorithm="two_shot",
    chunks=2,
    lowering="kernel",
    wire_bytes=266_240,
    predicted_us=2500.25,
    error=0.007,
)
INT4 = Candidate(codec="int4", algorithm="ring", refused="an error of 12% is above max_error")
REASON = "int8 by two_shot: 2,500 us instead of 8,500 us"


def site(name: str, module: str, *, ranks: int = 4, compressed: bool = True, **more) -> PlannedSite:
    """An all_reduce of 1 MiB."""
    missed = more.pop("missed", "")
    found = Site(
        name=name,
        kind="all_reduce",
        reduce_op="sum",
        group="0",
        group_label="tp",
        group_size=ranks,
        dtype="bfloat16",
        shape=(512, 1024),
        bytes=1 << 20,
        module=module,
        direction=more.pop("direction", "forward"),
        **more,
    )
    if compressed:
        chosen = planned(found, INT8, REASON, ALONE.predicted_us)
        return dataclasses.replace(chosen, missed=missed)
    return uncompressed(
        found, "overlapped with compute: the graph would not end earlier", ALONE.predicted_us
    )


def layers(count: int, **more) -> list[PlannedSite]:
    """Two sites for each layer; those of every third layer's MLP are uncompressed."""
    return [
        site(
            f"all_reduce_{2 * layer + at}",
            f"layers.{layer}.{part}",
            compressed=not at or layer % 3 != 2,
            **more,
        )
        for layer in range(count)
        for at, part in enumerate(PARTS)
    ]


def timeline(sites: Sequence[PlannedSite], *, waits: bool = True) -> Timeline:
    """1,000 us of computation for each site, then its exchange, half of it waited for."""
    events, now = [], 0.0
    for each in sites:
        us = each.predicted_us
        events += [
            Event(name="mm", what=COMPUTE, lane=HOST, begin_us=now, us=1000.0, module=each.module),
            Event(
                name=each.name,
                what=EXCHANGE,
                lane="tp",
                begin_us=now + 1000.0,
                us=us - 60.0,
                latency_us=60.0,
                site=each.name,
            ),
        ]
        if waits:
            events.append(
                Event(
                    name="wait",
                    what=WAIT,
                    lane=HOST,
                    begin_us=now + 1000.0 + us / 2,
                    us=us / 2,
                    site=each.name,
                )
            )
        now += 1000.0 + us
    return Timeline(events=tuple(events), us=now)


def nodes(sites: Sequence[PlannedSite]) -> tuple[GraphNode, ...]:
    """A matmul, the collective, and its wait, for each site."""
    found, last = [GraphNode(name="x", op="placeholder", target="x")], "x"
    for each in sites:
        for name, target, of in (
            (f"mm_{each.name}", "aten.mm.default", None),
            (each.name, "_c10d_functional.all_reduce.default", each.name),
            (f"wait_{each.name}", "_c10d_functional.wait_tensor.default", None),
        ):
            found.append(
                GraphNode(
                    name=name,
                    op="call_function",
                    target=target,
                    inputs=(last,),
                    value="bfloat16[512, 1024]",
                    module=each.module,
                    site=of,
                )
            )
            last = name
    return tuple(found)


def dump(
    sites: Sequence[PlannedSite],
    *,
    run: str = "run-a",
    number: int = 0,
    ranks: int = 4,
    policy: str = "balanced",
    timed: bool = True,
    **plan,
) -> Dump:
    """One graph with these sites, each with three candidates."""
    names = tuple(each.name for each in sites)
    direction = plan.pop("direction", "forward")
    return Dump(
        run=run,
        number=number,
        commpass="0.1.0",
        torch="2.13.0",
        rank=0,
        world_size=ranks,
        written="2026-01-02T03:04:05+00:00",
        plan=Plan(
            graph="0",
            direction=direction,
            policy=policy,
            profile="ethernet-1g",
            sites=tuple(sites),
            **plan,
        ),
        policy={"name": policy, "codecs": ["int8", "int4"], "max_error": 0.02},
        profile={"name": "ethernet-1g", "link": {"alpha_us": 60.0}},
        passes_ms={"choose": 1.5, "rewrite": 2.0},
        considered=(Considered(sites=names, candidates=(ALONE, INT8, INT4)),) if names else (),
        before=nodes(sites),
        after=nodes(sites),
        lowered=nodes(sites),
        timeline=timeline(sites) if timed else None,
    )


def eventful(count: int = 4, **more) -> Dump:
    """A graph in which something was simplified, grouped, and split."""
    sites = layers(count, ranks=more.get("ranks", 4))
    return dump(
        sites,
        simplified=(
            Simplification(rule="sum once", site="all_reduce_x", into="nothing", saved_bytes=4096),
            Simplification(rule="sum once", site="all_reduce_y", into="nothing", saved_bytes=1024),
            Simplification(rule="own part", site="all_gather_z", into="slice", saved_bytes=2048),
        ),
        grouped=(
            Grouped(
                sites=("all_reduce_p", "all_reduce_q"),
                modules=("norm.p", "norm.q"),
                into=sites[0].name,
                group="0",
                numbers=(0, 1),
                bytes=(64, 128),
                reason="two starts become one",
            ),
        ),
        split=(
            Split(
                site="all_reduce_w",
                into=(sites[1].name, sites[2].name),
                rows=(256, 256),
                reason="the first half travels behind the second",
            ),
        ),
        **more,
    )
