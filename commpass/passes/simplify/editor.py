"""What the rules share: looking at collectives and the chains of operators around them, and
changing the graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from commpass import groups
from commpass.codecs import codec
from commpass.costmodel import Profile
from commpass.groups import mesh_unions
from commpass.passes.fx import costs, meta
from commpass.passes.fx.erase import erase
from commpass.passes.fx.fakes import mode_of
from commpass.passes.fx.marks import ALLOWED
from commpass.passes.fx.parse import Call, describe_group, is_wait, parse
from commpass.passes.simplify.memory_budget import MemoryBudget, initial_budget
from commpass.passes.simplify.values import memory, value_numbers
from commpass.plan import ROWS
from commpass.policy.rules import Allowed
from commpass.utils.ambient import without_ambient_state

aten = torch.ops.aten
ops = torch.ops._c10d_functional
RULE = "commpass_rule"
"""Key in ``node.meta`` of every node that a rule inserted: the name of the rule."""
NEAR = 256
"""How many nodes apart two collectives may be to be next to each other: so that looking is
linear."""


@dataclass(frozen=True)
class Exchange:
    """A plain collective with the one node that waits for it: nothing else takes its result
    before."""

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
    allowed: dict[fx.Node, Allowed] = field(default_factory=dict)
    gone: set[fx.Node] = field(default_factory=set)
    equal: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sweeps: int = 0
    changing: set[fx.Node] = field(default_factory=set)
    calls: dict[fx.Node, tuple[Any, Any, Call | None]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)
    unions: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Numbers the collectives that all ranks of a group have, within their group, as the graph
        came: all of its ranks start them in this order. What a rule makes has the number of what it
        stands for."""
        count: Counter[str] = Counter()
        for node in self.graph.nodes:
            if (call := self.call(node)) is not None and not call.ends:
                group = self.group_of[node.name]
                self.number_of[node.name] = count[group]
                count[group] += 1

    def refresh(self) -> None:
        """Looks at the whole graph, at the start of a sweep: which values are equal, and which must
        stay where they are in memory, since something writes to them or reads them by address."""
        found = roots, written = memory(self.graph)
        readers = [node for node in self.graph.nodes if node.target in BY_ADDRESS]
        fixed = written | {roots[node.all_input_nodes[0]] for node in readers}
        self.changing = {node for node, root in roots.items() if root in fixed} if fixed else set()
        self.sweeps += 1
        self.equal = {}
        last: dict[int, fx.Node] = {}
        for node, number in value_numbers(self.graph, found).items():
            if number in last:
                self.equal[node] = last[number]
            last[number] = node

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def lives(self, node: fx.Node) -> bool:
        return node not in self.gone

    @cached_property
    def memory_budget(self) -> MemoryBudget:
        """What the rules keep for longer, by the places of the graph as it came."""
        return initial_budget(self.graph)

    @cached_property
    def mode(self) -> Any:
        """The fake mode under which the graph was traced."""
        return mode_of(self.graph)

    @cached_property
    def prices_of(self) -> costs.PricesOf:
        """What is done in each group costs."""
        return costs.prices_of(self.profile)

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
        if (
            call is None
            or call.form != "plain"
            or call.kind not in kinds
            or list(start.users) != [node]
        ):
            return None
        if (
            meta.tensor(call.inputs[0]) is None
            or node in self.changing
            or call.inputs[0] in self.changing
        ):
            return None  # what is written to may be another value wherever it is read
        return Exchange(call, node)

    def keeps_values(self, node: fx.Node) -> bool:
        """Whether a collective sends values as they are, or by lossless codecs that nobody
        forces."""
        allowed = self.allowed.get(node)
        if allowed is None or not allowed.codecs:
            return True
        return not allowed.force and all(codec(name).lossless for name in allowed.codecs)

    def allowed_alike(self, a: Call, b: Call) -> bool:
        """Whether the policy allows the same for two collectives: else they stay two."""
        one, other = self.allowed.get(a.node), self.allowed.get(b.node)
        return one is other or (one is not None and other is not None and one.allow_like(other))

    def union(self, first: Call, second: Call) -> tuple[str, int] | None:
        """(name, size) of the group over which one reduction does what these do one after the
        other, if it is proved to be one."""
        if not isinstance(first.group, str) or not isinstance(second.group, str):
            return None
        pair = (first.group, second.group)
        if pair not in self.unions:
            self.unions[pair] = mesh_unions.joined(*pair)
        group = self.unions[pair]
        return None if group is None else (group.group_name, group.size())

    def size(self, call: Call) -> int:
        return describe_group(call)[1]

    def rank(self, call: Call) -> int | None:
        """This process's place in a collective's group."""
        group = groups.group_named(str(call.group))
        return None if group is None else dist.get_group_rank(group, dist.get_rank())

    def us(self, kind: str, nbytes: float, call: Call) -> float:
        """Microseconds of a plain collective in the group of another one."""
        return self.us_in(*describe_group(call), kind, nbytes)

    def us_in(self, group: str, size: int, kind: str, nbytes: float) -> float:
        """Microseconds of a plain collective in a group of this name and size."""
        return self.prices_of(group, size).us(kind, nbytes)

    def kernels_us(self, kernels: int, values: float = 0) -> float:
        """Microseconds of so many local operators that copy so many values: a launch each, and the
        time of the fastest encode, which a copy is no slower than."""
        rates = [*self.profile.kernels.rates.values(), self.profile.kernels.other]
        return (
            kernels * self.profile.kernels.launch_us
            + values * min(rate.encode_ns for rate in rates) / 1e3
        )

    def may_extend(self, first: fx.Node, last: fx.Node, nbytes: int, merged: int) -> bool:
        """Whether so many bytes more may be kept from one node up to another, for the tensor
        ``merged``. The sizes must be those that all ranks know."""
        return self.memory_budget.may_extend(first, last, nbytes, merged)

    def last_user(self, node: fx.Node) -> fx.Node:
        """The last node that takes a node, or itself."""
        return max(node.users, default=node)

    def next_to(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether no other collective starts between two: one in their place would come in front of
        it, or start later."""
        node = first.next
        for _ in range(NEAR):
            if node is second:
                return True
            if node.op != "call_function" or self.call(node) is not None:
                return False
            node = node.next
        return False

    # --- changing ---

    def emit(
        self, before: fx.Node, rule: str, source: fx.Node, target: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """A new node with its fake value; what it is for comes from ``source``."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        meta.carry(source, node)
        self.memory_budget.place[node] = self.memory_budget.place[before]
        node.meta[RULE] = rule
        made = self.call(node) is not None
        if made and source.name in self.number_of:
            self.number_of[node.name] = self.number_of[source.name]
        if made and source in self.allowed:
            self.allowed[node] = self.allowed[source]
            node.meta[ALLOWED] = {0: self.allowed[source]}
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with without_ambient_state(), self.mode:
            node.meta["val"] = target(*values, **named)
        return node

    def collective(
        self, before: fx.Node, rule: str, like: Call, value: fx.Node, **changed: Any
    ) -> fx.Node:
        """The same collective of another value, and its wait; the policy allows it the same."""
        start = self.start(before, rule, like, value, **changed)
        return self.emit(before, rule, like.node, ops.wait_tensor.default, start)

    def start(
        self, before: fx.Node, rule: str, like: Call, value: fx.Node, **changed: Any
    ) -> fx.Node:
        """As ``collective``, without the wait."""
        value = self.contiguous(before, rule, value)
        names = [a.name for a in like.node.target._schema.arguments]  # type: ignore[union-attr]
        given = {
            **dict(zip(names, like.node.args, strict=False)),
            **like.node.kwargs,
            "input": value,
            **changed,
        }
        args = [given[name] for name in names if name in given]
        return self.emit(before, rule, like.node, like.node.target, *args)

    def contiguous(self, before: fx.Node, rule: str, value: fx.Node) -> fx.Node:
        """The same values, one after the other in memory, as collectives take and give them."""
        if (
            any(not isinstance(size, int) for size in fake(value).shape)
            or fake(value).is_contiguous()
        ):
            return value
        return self.emit(
            before, rule, value, aten.clone.default, value, memory_format=torch.contiguous_format
        )

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Lets everything that took ``old`` take ``new``, and erases what nobody takes any more."""
        old.replace_all_uses_with(self.laid_out_as(old, new))
        self.prune(old)

    def laid_out_as(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """The values of ``new``, such that what was a view of ``old`` is one of them: dimensions in
        the same order in memory."""
        given, made = _lengths_and_steps(fake(new)), _lengths_and_steps(fake(old))
        if given is None or made is None or given == made:
            return new
        order = sorted(range(len(made)), key=lambda dim: -made[dim][1])
        if _dense([given[dim] for dim in order]):
            return new
        rule, back = new.meta.get(RULE, "same"), [order.index(dim) for dim in range(len(order))]
        turned = self.emit(old, rule, new, aten.permute.default, new, order)
        plain = torch.contiguous_format
        copied = self.emit(old, rule, new, aten.clone.default, turned, memory_format=plain)
        return self.emit(old, rule, new, aten.permute.default, copied, back)

    def prune(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            if node in self.gone or node.users or node.op != "call_function" or not _pure(node):
                continue
            stack += node.all_input_nodes
            erase(node)
            self.gone.add(node)


def _pure(node: fx.Node) -> bool:
    if is_wait(node) or node.target is operator.getitem:
        return not any(_needed(source) for source in node.all_input_nodes)
    if (call := parse(node)) is not None:
        return call.form == "plain" and not call.ends
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and not node.is_impure()
    )


def _needed(node: fx.Node) -> bool:
    """Whether a node is a collective, or one of its results, that others see the effect of: it must
    be waited for."""
    call = parse(node.all_input_nodes[0] if node.target is operator.getitem else node)
    return call is not None and bool(call.ends or "in-place" in call.form or call.form == "out")


BY_ADDRESS = (aten.as_strided.default,)
"""Operators that read a place in memory, whatever tensor it was."""


def _lengths_and_steps(value: torch.Tensor) -> list[tuple[int, int]] | None:
    """(length, stride) of each dimension, by hints; None where there is no hint. The stride of one
    entry is 0: it says nothing."""
    found = []
    for size, stride in zip(value.shape, value.stride(), strict=True):
        length, step = meta.hint(size), meta.hint(stride)
        if length is None or step is None:
            return None
        found.append((length, step if length != 1 else 0))
    return found


def _dense(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether dimensions, in this order, lie in memory without gaps, the last one closest."""
    expected = 1
    for length, step in reversed(dims):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def fake(node: fx.Node) -> torch.Tensor:
    value = meta.tensor(node)
    assert value is not None
    return value


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Equal shapes and dtypes; symbolic sizes are equal if they read the same."""
    return (meta.shape(fake(a)), fake(a).dtype) == (meta.shape(fake(b)), fake(b).dtype)


def nbytes(node: fx.Node) -> int:
    return max(meta.nbytes(fake(node)), 0)


def common_nbytes(call: Call, size: int) -> int:
    """Bytes that all ranks take for those of a collective's input. Each has its own number of
    entries in an all_to_all: then as many as for ROWS from each rank to each."""
    if call.splits is None:
        return nbytes(call.inputs[0])
    value = fake(call.inputs[0])
    return ROWS * size * meta.width(value) * value.dtype.itemsize
