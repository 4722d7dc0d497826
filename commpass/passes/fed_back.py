"""fed_back: whether what a site gives takes the place, in an input of the graph, of what it was
made of: weights that each rank updates a part of, and that are gathered in place.

needs: a graph of aten operators with sites.
gives: why a codec that loses bits is not for a site.
changes: nothing. A walk from one site, by facts that all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from commpass.passes.discover import SEE_THROUGH, GraphSite
from commpass.passes.provenance.walk import inputs, name_of

UPDATES = ("add", "sub", "lerp", "addcmul", "addcdiv")
"""Operators that change a tensor a little, value by value."""
SCALED = ("mul", "div", "cat", "stack")
"""Those that scale it, or join its parts."""
COPIES = ("all_gather", "broadcast")
"""Kinds whose results may have been changed by somebody else, outside of the graph."""


def fed_back_reason(site: GraphSite) -> str | None:
    """Why what is lost at a site is lost for good: the next call begins with the decoded values,
    and changes smaller than what a code can tell apart never add up. (A sum in place of what was
    not updated here is one of gradients, say, which its caller fills anew.)"""
    kept = set(_overwritten(site))
    source = site.input
    if not kept or not isinstance(source, fx.Node):
        return None
    start = (source, site.site.kind in COPIES)
    seen, queue = {start}, [start]
    while queue:
        node, updated = queue.pop()
        if node in kept and updated:
            return (
                f"its result takes the place of {node.name}, of which it was made, so that small"
                " changes would be lost call by call"
            )
        name = name_of(node)
        if name in (*SEE_THROUGH, *UPDATES, *SCALED):
            more = {(each, updated or name in UPDATES) for each in inputs(node)} - seen
            seen |= more
            queue += more
    return None


def _overwritten(site: GraphSite) -> Iterator[fx.Node]:
    """The inputs of the graph into which the result of a site is written as it is."""
    queue, seen = list(site.outputs), set(site.outputs)
    while queue:
        value = queue.pop()
        for user in value.users:
            copied = name_of(user) == "copy" and user.args[1] is value
            if user.target is torch.ops.aten.copy_.default and copied:
                target = user.args[0]
                if isinstance(target, fx.Node) and target.op == "placeholder":
                    yield target
            elif (copied or name_of(user) in SEE_THROUGH) and user not in seen:
                seen.add(user)
                queue.append(user)
