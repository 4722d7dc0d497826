"""What the rules share: looking at collectives and the chains of operators around them, and changing the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from commpass import groups
from commpass.costmodel import Profile
from commpass.passes import meta
from commpass.passes.collective import Call, is_wait, parse
from commpass.passes.discover import describe_group

aten = torch.ops.aten
ops = torch.ops._c10d_functional
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
         aten.t.default, aten.squeeze.dim, aten.unsqueeze.default)  # fmt: skip
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
RULE = "commpass_rule"
"""Key in ``node.meta`` of every node that a rule inserted: the name of the rule."""


@dataclass(frozen=True)
class Exchange:
    """A plain collective with the one node that waits for it: nothing else takes its result before."""

    call: Call
    wait: fx.Node

    @property
    def input(self) -> fx.Node:
        return self.call.inputs[0]


@dataclass
class Editor:
    """One graph being simplified."""

    module: fx.GraphModule
    profile: Profile
    compressible: frozenset[fx.Node] = frozenset()
    gone: set[fx.Node] = field(default_factory=set)
    first: dict[Any, Exchange] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def lives(self, node: fx.Node) -> bool:
        return node not in self.gone

    @cached_property
    def mode(self) -> Any:
        """The fake mode under which the graph was traced."""
        values = (meta.tensor(node) for node in self.graph.nodes)
        return next((getattr(v, "fake_mode", None) for v in values if hasattr(v, "fake_mode")), contextlib.nullcontext())

    # --- looking ---

    def exchange(self, node: Any, kinds: Sequence[str]) -> Exchange | None:
        """The exchange whose wait a node is, if it is a plain one of these kinds."""
        if not (isinstance(node, fx.Node) and is_wait(node) and isinstance(node.args[0], fx.Node)):
            return None
        start = node.args[0]
        call = parse(start)
        if call is None or call.form != "plain" or call.kind not in kinds or list(start.users) != [node]:
            return None
        return Exchange(call, node) if meta.tensor(call.inputs[0]) is not None else None

    def may_compress(self, node: fx.Node) -> bool:
        """Whether the policy allows a codec for a collective that was there from the start."""
        return node in self.compressible

    def size(self, call: Call) -> int:
        return describe_group(call)[2]

    def rank(self, call: Call) -> int | None:
        """This process's place in a collective's group."""
        group = groups.group_named(str(call.group))
        return None if group is None else dist.get_group_rank(group, dist.get_rank())

    def us(self, kind: str, nbytes: float, call: Call) -> float:
        _, label, size = describe_group(call)
        return self.profile.link_of(label).us(kind, nbytes, size)

    def order(self, *nodes: fx.Node) -> fx.Node:
        """The last of some nodes, in graph order."""
        last = nodes[0]
        for node in nodes[1:]:
            last = node if last < node else last
        return last

    # --- changing ---

    def emit(self, before: fx.Node, rule: str, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node with its fake value; what it is for comes from ``source``."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        meta.carry(source, node)
        node.meta[RULE] = rule
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self.mode:
            node.meta["val"] = target(*values, **named)
        return node

    def collective(self, before: fx.Node, rule: str, like: Call, value: fx.Node, **changed: Any) -> fx.Node:
        """The same collective of another value, and its wait."""
        names = [a.name for a in like.node.target._schema.arguments]  # type: ignore[union-attr]
        given = {**dict(zip(names, like.node.args, strict=False)), **like.node.kwargs, "input": value, **changed}
        args = [given[name] for name in names if name in given]
        start = self.emit(before, rule, like.node, like.node.target, *args)
        return self.emit(before, rule, like.node, ops.wait_tensor.default, start)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Lets everything that took ``old`` take ``new``, and erases what nobody takes any more."""
        old.replace_all_uses_with(new)
        self.prune(old)

    def prune(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            if node.users or node.op != "call_function" or node in self.gone or not _pure(node):
                continue
            stack += node.all_input_nodes
            self.graph.erase_node(node)
            self.gone.add(node)


def _pure(node: fx.Node) -> bool:
    if is_wait(node) or parse(node) is not None:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable and not node.is_impure()


def fake(node: fx.Node) -> torch.Tensor:
    value = meta.tensor(node)
    assert value is not None
    return value


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Equal shapes and dtypes; symbolic sizes are equal if they read the same."""
    return (meta.shape(fake(a)), fake(a).dtype) == (meta.shape(fake(b)), fake(b).dtype)


def nbytes(node: fx.Node) -> int:
    return max(meta.nbytes(fake(node)), 0)
