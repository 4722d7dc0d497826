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

ADDED = ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "cat", "stack")
"""Operators that change a tensor a little, value by value, or join its parts."""


def fed_back_reason(site: GraphSite) -> str | None:
    """Why what is lost at a site is lost for good: the next call begins with the decoded values,
    and changes smaller than what a code can tell apart never add up."""
    kept = set(_overwritten(site))
    source = site.input
    if not kept or not isinstance(source, fx.Node):
        return None
    seen, queue = {source}, [source]
    while queue:
        node = queue.pop()
        if node in kept:
            return (
                f"its result takes the place of {node.name}, of which it was made, so that small"
                " changes would be lost call by call"
            )
        if name_of(node) in (*SEE_THROUGH, *ADDED):
            more = [each for each in inputs(node) if each not in seen]
            seen.update(more)
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
