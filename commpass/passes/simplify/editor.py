"""What the rules share: looking at collectives and the chains of operators around them, and changing the graph."""

from __future__ import annotations

import contextlib
import operator
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
from commpass.passes.simplify.liveness import Liveness, liveness
from commpass.passes.simplify.values import memory, value_numbers

aten = torch.ops.aten
ops = torch.ops._c10d_functional
RULE = "commpass_rule"
"""Key in ``node.meta`` of every node that a rule inserted: the name of the rule."""
NEAR = 256
"""How many nodes apart two collectives may be to be next to each other: so that looking is linear."""


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
    first: dict[int, Exchange] = field(default_factory=dict)
    changing: set[fx.Node] = field(default_factory=set)
    until: dict[fx.Node, fx.Node] = field(default_factory=dict)
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    living: Liveness | None = None
    calls: dict[fx.Node, tuple[Any, Any, Call | None]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    sparing: bool = False

    def look(self) -> None:
        """Looks at the whole graph, at the start of a sweep: which values are equal, and how much lives where."""
        self.first.clear()
        self.until.clear()
        found = memory(self.graph)
        self.changing = {node for node, root in found[0].items() if root in found[1]} if found[1] else set()
        self.numbers = value_numbers(self.graph, found)
        before, self.living = self.living, liveness(self.graph, found)
        if before is not None:  # the peak that counts is that of the graph as it came
            self.living.peak, self.living.largest = before.peak, before.largest

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

    def call(self, start: fx.Node) -> Call | None:
        """The collective that a node is; parsed once as long as its arguments stay."""
        args, kwargs, call = self.calls.get(start, (None, None, None))
        if args is not start.args or kwargs is not start.kwargs:
            call = parse(start)
            self.calls[start] = (start.args, start.kwargs, call)
            if call is not None:
                self.group_of[start.name] = describe_group(call)[0]
        return call

    def exchange(self, node: Any, kinds: Sequence[str]) -> Exchange | None:
        """The exchange whose wait a node is, if it is a plain one of these kinds."""
        if not (isinstance(node, fx.Node) and is_wait(node) and isinstance(node.args[0], fx.Node)):
            return None
        start = node.args[0]
        call = self.call(start)
        if call is None or call.form != "plain" or call.kind not in kinds or list(start.users) != [node]:
            return None
        if meta.tensor(call.inputs[0]) is None or node in self.changing or call.inputs[0] in self.changing:
            return None  # what is written to may be another value wherever it is read
        return Exchange(call, node)

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

    def kernels_us(self, kernels: int, values: float = 0) -> float:
        """Microseconds of so many local operators that copy so many values: a launch each, and the time of the
        fastest encode, which a copy is no slower than."""
        rates = [*self.profile.kernels.rates.values(), self.profile.kernels.other]
        return kernels * self.profile.kernels.launch_us + values * min(rate.encode_ns for rate in rates) / 1e3

    def hold(self, first: fx.Node, last: fx.Node, nbytes: int, merged: int) -> bool:
        """Whether memory allows so many bytes more from one node to another, by the tensor ``merged`` in return."""
        if self.sparing and nbytes > 0:
            return False
        return self.living is None or self.living.hold(first, last, nbytes, merged)

    def fills_memory(self) -> bool:
        """Whether the graph's peak has risen by more than the largest tensor that was merged."""
        now = liveness(self.graph, memory(self.graph)).peak
        return self.living is not None and now > self.living.peak + self.living.largest

    def last_user(self, node: fx.Node) -> fx.Node:
        """The last node that takes a node, or itself."""
        return max(node.users, default=node)

    def next_to(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether no other collective starts between two: one in their place would come in front of it, or start later."""
        node = first.next
        for _ in range(NEAR):
            if node is second:
                return True
            if node.op != "call_function" or self.call(node) is not None:
                return False
            node = node.next
        return False

    # --- changing ---

    def emit(self, before: fx.Node, rule: str, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node with its fake value; what it is for comes from ``source``."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        meta.carry(source, node)
        if self.living is not None and before in self.living.place:
            self.living.place[node] = self.living.place[before]
        node.meta[RULE] = rule
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self.mode:
            node.meta["val"] = target(*values, **named)
        return node

    def collective(self, before: fx.Node, rule: str, like: Call, value: fx.Node, **changed: Any) -> fx.Node:
        """The same collective of another value, and its wait."""
        value = self.contiguous(before, rule, value)
        names = [a.name for a in like.node.target._schema.arguments]  # type: ignore[union-attr]
        given = {**dict(zip(names, like.node.args, strict=False)), **like.node.kwargs, "input": value, **changed}
        args = [given[name] for name in names if name in given]
        start = self.emit(before, rule, like.node, like.node.target, *args)
        return self.emit(before, rule, like.node, ops.wait_tensor.default, start)

    def contiguous(self, before: fx.Node, rule: str, value: fx.Node) -> fx.Node:
        """The same values, one after the other in memory, as collectives take and give them."""
        if any(not isinstance(size, int) for size in fake(value).shape) or fake(value).is_contiguous():
            return value
        return self.emit(before, rule, value, aten.clone.default, value, memory_format=torch.contiguous_format)

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
    if is_wait(node) or node.target is operator.getitem:
        return not any(_needed(source) for source in node.all_input_nodes)
    if (call := parse(node)) is not None:
        return call.form == "plain" and not call.ends
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable and not node.is_impure()


def _needed(node: fx.Node) -> bool:
    """Whether a node is a collective, or one of its results, that others see the effect of: it must be waited for."""
    call = parse(node.all_input_nodes[0] if node.target is operator.getitem else node)
    return call is not None and bool(call.ends or "in-place" in call.form or call.form == "out")


def fake(node: fx.Node) -> torch.Tensor:
    value = meta.tensor(node)
    assert value is not None
    return value


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Equal shapes and dtypes; symbolic sizes are equal if they read the same."""
    return (meta.shape(fake(a)), fake(a).dtype) == (meta.shape(fake(b)), fake(b).dtype)


def nbytes(node: fx.Node) -> int:
    return max(meta.nbytes(fake(node)), 0)
