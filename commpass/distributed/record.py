"""Record what commpass did in this process: plans, counters, tlparse artifacts, log lines,
dumps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import fx

from commpass.costmodel import Profile
from commpass.groups import ready
from commpass.passes import PassContext, PassResult
from commpass.passes.fx import meta
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import graph_modules
from commpass.passes.simplify.editor import RULE
from commpass.plan import Candidate, Plan, PlannedSite
from commpass.plan import dump as dumps
from commpass.plan.timeline import Timeline
from commpass.plan.totals import totals
from commpass.policy import Policy

log = logging.getLogger("commpass")

_plans: list[Plan] = []


def plans() -> list[Plan]:
    """The plans of the graphs compiled in this process, in order of compilation."""
    return list(_plans)


def record(outcome: PassResult, instead_of: Plan | None = None) -> None:
    """Store a plan, add it to torch's counters (``torch._dynamo.utils.counters["commpass"]``) and
    trace it.

    The plan that the graph had before is dropped and no longer counted.
    """
    from torch._dynamo.utils import counters
    from torch._logging import trace_structured

    plan, counted = outcome.plan, counters["commpass"]
    place = next((n for n, each in enumerate(_plans) if each is instead_of), len(_plans))
    _plans[place:] = [plan, *_plans[place + 1 :]]
    for name, number in _counts(plan).items():
        counted[name] += number - (_counts(instead_of)[name] if instead_of is not None else 0)
    counted["fallbacks"] += bool(plan.fallback) and outcome.error is not None
    counted["passes_us"] += int(sum(outcome.times_ms.values()) * 1e3)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"commpass_plan_{plan.direction}", "encoding": "json"},
        payload_fn=lambda: {"plan": msgspec.to_builtins(plan), "passes_ms": outcome.times_ms},
        expect_trace_id=False,
    )


COUNTED = (
    *("graphs", "sites", "compressed", "simplified", "grouped", "split"),
    *("saved_bytes", "bytes", "wire_bytes"),
)
"""The totals that torch's counters have."""


def _counts(plan: Plan) -> dict[str, int]:
    """Return the counters of a plan."""
    of = totals([plan])
    return {name: getattr(of, name) for name in COUNTED}


def trace_graph(gm: fx.GraphModule, name: str) -> None:
    """Trace the readable graph as an artifact, if structured tracing is on."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"commpass_{name}", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(
            print_output=False, include_stride=True, include_device=True
        ),
        expect_trace_id=False,
    )


def wire_bytes(plan: Plan) -> int:
    """Return the bytes that one rank hands to the collectives of a graph as it was really
    compiled."""
    return totals([plan]).wire_bytes


def nodes_before(outcome: PassContext) -> tuple[dumps.GraphNode, ...]:
    """Return the nodes of the graph before the passes, as data."""
    return _rows(
        ((p, outcome.untouched.get(m, m.graph)) for p, m in graph_modules(outcome.gm)),
        outcome.plan.sites,
    )


def nodes_now(gm: fx.GraphModule, sites: Iterable[PlannedSite]) -> tuple[dumps.GraphNode, ...]:
    """Return the nodes of the graph as it is now, as data."""
    return _rows(((p, m.graph) for p, m in graph_modules(gm)), sites)


def _rows(
    graphs: Iterable[tuple[str, fx.Graph]], planned: Iterable[PlannedSite]
) -> tuple[dumps.GraphNode, ...]:
    sites = {re.sub(r"\.\d+$", "", site.name): site.name for site in planned}
    rows = []
    for prefix, graph in graphs:
        for node in graph.nodes:
            value = meta.tensor(node)
            shape = (
                ""
                if value is None
                else f"{meta.dtype_name(value.dtype)}[{', '.join(map(str, meta.shape(value)))}]"
            )
            mark = node.meta.get(MARK)
            rows.append(
                dumps.GraphNode(
                    name=prefix + node.name,
                    op=node.op,
                    target=node.target if isinstance(node.target, str) else _target(node.target),
                    inputs=tuple(prefix + source.name for source in node.all_input_nodes),
                    value=shape,
                    module=meta.module_path(node),
                    site=mark.site if mark else sites.get(prefix + node.name),
                    inserted=mark is not None or RULE in node.meta,
                    role=mark.role if mark else "",
                    hop=mark.hop if mark else 0,
                    chunk=mark.chunk if mark else 0,
                )
            )
    return tuple(rows)


def _target(target: Any) -> str:
    return (
        str(target)
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__name__", str(target))
    )


def _considered(outcome: PassResult) -> tuple[dumps.Considered, ...]:
    """Return the candidates of each site, once for all sites that have the same candidates."""
    names_by_candidates: dict[tuple[Candidate, ...], list[str]] = {}
    for name, options in outcome.options.items():
        names_by_candidates.setdefault(options.candidates, []).append(name)
    return tuple(
        dumps.Considered(sites=tuple(names), candidates=candidates)
        for candidates, names in names_by_candidates.items()
    )


def write_dump(
    folder: Path,
    run: str,
    outcome: PassResult,
    timeline: Timeline,
    policy: Policy | None = None,
    profile: Profile | None = None,
    nodes: Mapping[str, tuple[dumps.GraphNode, ...]] | None = None,
    passes: Mapping[str, str] | None = None,
) -> None:
    """Write the dump of one graph.

    ``nodes`` are those before, after, and lowered; ``timeline`` is the prediction for the last.
    ``passes`` has the graph as text after each pass that changed it. A full disk does not end the
    job: it logs a warning, and all ranks keep the agreed plan.
    """
    nodes_at = nodes or {}
    found = dumps.Dump(
        run=run,
        commpass=version("commpass"),
        torch=str(torch.__version__),
        rank=dist.get_rank() if ready() else 0,
        world_size=dist.get_world_size() if ready() else 1,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=outcome.plan,
        policy=msgspec.to_builtins(policy) if policy else {},
        profile=msgspec.to_builtins(profile) if profile else {},
        passes_ms=outcome.times_ms,
        considered=_considered(outcome),
        before=nodes_at.get("before", ()),
        after=nodes_at.get("after", ()),
        lowered=nodes_at.get("lowered", ()),
        timeline=timeline,
    )
    try:
        dumps.write_passes(dumps.write(folder, found), passes or {})
    except OSError as error:
        graph, why = outcome.plan.graph, error.strerror
        log.warning("%s: the dump of graph %s was not written: %s", folder, graph, why)
