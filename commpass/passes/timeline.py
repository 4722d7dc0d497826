"""The predicted timeline of a graph, in its present order."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from torch import fx

from commpass import groups
from commpass.costmodel import Profile, Task
from commpass.costmodel.critical import slack_us
from commpass.passes.context import PassResult
from commpass.passes.fx import meta
from commpass.passes.fx.marks import MARK, Mark, starts
from commpass.passes.fx.memory import memory
from commpass.passes.fx.parse import describe_group, parse
from commpass.passes.fx.schedule import Span, timed
from commpass.passes.fx.work import Work, site_of, unsupported_reason, work_of
from commpass.plan.timeline import COMPUTE, EXCHANGE, HOST, WAIT, Event, Timeline

NOTHING_SENT = "no collective in this graph"
"""The note of a timeline that contains only computation."""


def timeline(gm: fx.GraphModule, outcome: PassResult, profile: Profile) -> Timeline:
    """Return the predicted timeline of the compiled graph.

    If the model cannot predict it, or nothing is sent, it has no events, and ``note`` says why.
    """
    if not outcome.plan.sites:
        return Timeline(us=whole_us(gm, profile) or 0.0, note=NOTHING_SENT)
    if why := unsupported_reason(gm):
        return Timeline(note=why)
    nodes = tuple(gm.graph.nodes)
    work = work_of(gm.graph, memory(gm.graph), profile)
    spans: list[Span] = []
    clock = timed(work, nodes, spans)
    lanes = _tracks({_lane_of(span) for span in spans})
    notes = ["sizes that depend on the data count as 0 bytes"]
    notes = notes if any(site.bytes < 0 for site in outcome.plan.sites) else []
    if outcome.plan.fallback:
        notes.append(f"the untouched graph was compiled: {outcome.plan.fallback}")
    return Timeline(
        events=tuple(_event(each, lanes) for each in spans),
        us=clock.now,
        note="; ".join(notes),
        slack_us=site_slack_us(work, nodes),
    )


def tasks_of(work: Work, order: Sequence[fx.Node]) -> list[Task]:
    """Return the nodes of a graph as tasks, in an order. A wait comes after what it waits for."""
    number = {node: at for at, node in enumerate(order)}
    return [
        dataclasses.replace(
            work.tasks[node], after=tuple(number[each] for each in work.waited.get(node, ()))
        )
        for node in order
    ]


def site_slack_us(work: Work, order: Sequence[fx.Node]) -> dict[str, float]:
    """Return the smallest slack of each site's exchanges: how much later they could start without
    the graph ending later."""
    found: dict[str, float] = {}
    for number, slack in slack_us(tasks_of(work, order)).items():
        site, least = site_of(order[number]), round(slack, 3)
        found[site] = min(found.get(site, least), least)
    return found


def whole_us(gm: fx.GraphModule, profile: Profile) -> float | None:
    """Return the predicted microseconds of a graph in its present order; None if the model cannot
    predict them."""
    if unsupported_reason(gm):
        return None
    nodes = tuple(gm.graph.nodes)
    return timed(work_of(gm.graph, memory(gm.graph), profile), nodes).now


def _event(span: Span, lanes: dict[str, str]) -> Event:
    node = span.node
    mark: Mark | None = node.meta.get(MARK)
    if span.still:
        what = WAIT
    elif starts(node):
        what = EXCHANGE
    else:
        what = mark.role if mark is not None else COMPUTE
    return Event(
        name=node.name,
        what=what,
        lane=lanes[_lane_of(span)],
        begin_us=span.begin_us,
        us=span.us,
        latency_us=span.latency_us,
        site=mark.site if mark is not None else "" if what == COMPUTE else site_of(node),
        hop=mark.hop if mark is not None else 0,
        chunk=mark.chunk if mark is not None else 0,
        module=meta.module_path(node),
    )


def _lane_of(span: Span) -> str:
    """Return the host, the group of an exchange, or the stream of single kernels. Groups with the
    same label keep separate lanes."""
    call = parse(span.node)
    if span.resource == HOST or call is None:
        return str(span.resource)
    return describe_group(call)[0]


def _tracks(resources: set[str]) -> dict[str, str]:
    """Return the lane names of the host and of groups. A label that several groups share is
    followed by the group's name."""
    labels = {name: next(iter(groups.labels_of(name)), name) for name in resources - {HOST}}
    several = {label for label, count in Counter(labels.values()).items() if count > 1}
    return {HOST: HOST} | {
        name: f"{label} ({name})" if label in several else label for name, label in labels.items()
    }
