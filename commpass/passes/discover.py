"""discover: graph -> sites.

needs: a graph of aten operators and functional collectives, with fake values in ``meta["val"]``.
gives: a ``GraphSite`` for every tensor that a collective carries, in graph order, including
sub-graphs.
changes: nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from commpass import groups
from commpass.passes.allowed import allow, matched, still_allowed
from commpass.passes.context import PassContext
from commpass.passes.fx import meta
from commpass.passes.fx.direction import gradients, recomputed
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import (
    Call,
    describe_group,
    graph_modules,
    is_wait,
    items,
    parse,
    value_of,
    waited,
)
from commpass.passes.graph_site import GraphSite
from commpass.passes.references import (
    SEVERAL_TIMES,
    UNKNOWN,
    Weights,
    is_gathered_again,
    parameters_behind,
)
from commpass.plan import NOBODY, Site
from commpass.policy.annotate import KEY

SYMBOLIC = "its size is symbolic: compile with dynamic=False"
AGAIN = "it runs again what forward sent, and must send the same"
"""Why a collective that backward recomputes keeps no state."""


def run(context: PassContext) -> None:
    """Find the sites, and what the policy allows them."""
    given = context.input
    for _, module in graph_modules(given.gm):  # it may have been through the passes before
        for node in module.graph.nodes:
            node.meta.pop(MARK, None)
    found = discover(given.gm, given.direction, given.stateless, given.weights)
    if (why := given.unsupported_reason) is not None:
        found = [replace(each, site=replace(each.site, unsupported_reason=why)) for each in found]
    context.found = allow(found, given.policy, given.direction)
    context.first = tuple(each.site for each in context.found)
    context.plan_with(matched=matched(context.found, given.policy))


def refresh_sites(context: PassContext) -> None:
    """Find the sites again, after a pass has changed the collectives of the graph."""
    given = context.input
    # Neighbours, waits and positions of unchanged collectives may differ now. Only what they are
    # allowed is kept, at their nodes. The rest takes 7 ms for 100 sites, of 600 ms for all passes.
    found = discover(given.gm, given.direction, given.stateless, given.weights)
    context.found = still_allowed(found, given.policy, given.direction)
    context.sites_changed = False


def discover(
    gm: fx.GraphModule,
    direction: str = "forward",
    stateless: str | None = NOBODY,
    weights: Weights = UNKNOWN,
) -> list[GraphSite]:
    """Return every site of a graph and its sub-graphs, in any form of collective.

    ``stateless`` says why state of unsent values cannot be kept, and ``weights`` which gathers may
    keep a reference. A collective that a backward graph recomputes is a forward site.
    """
    found: list[GraphSite] = []
    labels_of = functools.cache(groups.labels_of)  # looks the meshes up once
    for prefix, module in graph_modules(gm):
        order = {node: index for index, node in enumerate(module.graph.nodes)}
        reached = gradients(module.graph) if direction == "backward" else set()
        for node in module.graph.nodes:
            call = parse(node)
            if call is None:
                continue
            again = direction == "backward" and recomputed(node, reached)
            why = SEVERAL_TIMES if prefix else AGAIN if again else stateless
            towards = "forward" if again else direction
            for i in range(len(call.inputs)):
                one = _found(module, prefix, call, i, order, towards, why, labels_of)
                if one.site.kind == "all_gather" and not prefix:
                    one = _with_parameters(one, weights, again or is_gathered_again(node))
                found.append(one)
    return found


def _with_parameters(found: GraphSite, weights: Weights, recomputed: bool) -> GraphSite:
    """Return an all_gather with the parameters that it collects, or with the reason why it may keep
    no reference."""
    source = found.call.inputs[found.position]
    behind = parameters_behind(source, weights, recomputed)
    if isinstance(behind, str):
        return replace(found, site=replace(found.site, stateless=behind))
    symbolic = SYMBOLIC if found.site.dynamic else None
    return replace(found, site=replace(found.site, stateless=symbolic), parameters=behind)


def _found(
    module: fx.GraphModule,
    prefix: str,
    call: Call,
    position: int,
    order: dict[fx.Node, int],
    direction: str,
    stateless: str | None,
    labels_of: Callable[[str], tuple[str, ...]],
) -> GraphSite:
    source, value = call.inputs[position], value_of(call, position)
    held, early = waited(value) if value is not None else ([], [])
    if held and call.receives(position):  # its buffer, which later users may read as well
        early = [user for user in early if order[user] < min(map(order.__getitem__, held))]
    if call.form == "batch":
        early += [
            node for index, node in items(call.node) if index == position and node is not value
        ]
    fake = meta.tensor(source) if isinstance(source, fx.Node) else None
    end = call.ends[position] if call.ends else None
    name, size = describe_group(call)
    labels = labels_of(name)
    many = len(call.inputs) > 1
    site = Site(
        name=f"{prefix}{call.node.name}" + (f".{position}" if many else ""),
        kind=call.kind_at(position),
        reduce_op=call.reduce_op,
        group=name,
        group_label=next(iter(labels), ""),
        group_labels=labels,
        members=groups.ranks_of(name),
        group_size=size,
        dtype=meta.dtype_name(fake.dtype) if fake is not None else "unknown",
        shape=meta.shape(fake) if fake is not None else (),
        bytes=meta.nbytes(fake) if fake is not None else -1,
        width=meta.width(fake) if fake is not None else 1,
        splits=_splits(call),
        peer=end.peer if end else None,
        tag=end.tag if end else 0,
        by_messages=groups.sends_messages(name, fake.device.type if fake is not None else "cpu"),
        stateless=stateless
        or (
            SYMBOLIC
            if fake is not None and not all(isinstance(n, int) for n in fake.shape)
            else None
        ),
        fixed=_fixed(fake),
        device=fake.device.type if fake is not None else "cpu",
        module=meta.module_path(call.node),
        direction=direction,
        annotation=meta.annotation(call.node, KEY),
        unsupported_reason=_unsupported_reason(call, position, fake, size, held, early),
        label=meta.annotation(call.node, meta.LABEL) or "",
    )
    return GraphSite(site, module, call, position, tuple(sorted(held, key=order.__getitem__)))


def _splits(call: Call) -> tuple[tuple[int | str, ...], tuple[int | str, ...]] | None:
    """Return an all_to_all's splits, with symbolic ones as text."""
    if call.splits is None:
        return None
    sent, received = (
        tuple(n if isinstance(n, int) else str(n.meta["val"]) for n in some) for some in call.splits
    )
    return sent, received


def _fixed(fake: torch.Tensor | None) -> str | None:
    """Return why a graph cannot hold value-dependent sizes, else None."""
    mode = getattr(fake, "fake_mode", None)
    return "its fake values have no ShapeEnv" if mode and mode.shape_env is None else None


BY_ROWS = ("all_gather", "reduce_scatter", "all_to_all")
"""The kinds that join or divide the first dimension."""


def _unsupported_reason(
    call: Call,
    position: int,
    fake: torch.Tensor | None,
    size: int,
    pinned: list[fx.Node],
    early: list[fx.Node],
) -> str | None:
    """Return why the form of a collective prevents a rewrite, whatever the policy says."""
    if call.form == "autograd":
        return "its gradient would be lost: rewrite the graphs that AOTAutograd makes of it"
    if call.form == "legacy":
        return (
            "the c10d_functional namespace is deprecated; use torch's current functional"
            " collectives"
        )
    if call.form == "view":
        return "shard_dim_alltoall splits along another dimension than the first"
    if size < 1:
        return (
            f"the size of group {call.group!r} is not known here: initialise torch.distributed"
            " first"
        )
    if fake is None:
        return "its shape is not known: the graph has no fake values"
    if fake.dim() == 0 and call.kind in BY_ROWS:
        return "it sends one number without a dimension, so it has no rows to divide or to join"
    if call.ends and fake is not None and not all(isinstance(n, int) for n in fake.shape):
        return SYMBOLIC
    if early and call.form in ("plain", "coalesced", "batch"):
        return f"{early[0].name} takes its result before it is waited for"
    if (
        not pinned
        and "in-place" not in call.form
        and call.form != "out"
        and not _end_is_waited_for(call, position)
    ):
        return "nobody waits for its result"
    return None


def _end_is_waited_for(call: Call, position: int) -> bool:
    """Whether a send or recv is waited for although nothing uses its output of a wait for several
    tensors (torch 2.15).

    The rank at the other end does not know whether the output is used.
    """
    value = value_of(call, position)
    return bool(call.ends) and value is not None and any(is_wait(user) for user in value.users)
