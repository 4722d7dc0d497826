"""Shared functions of the rules: inspecting collectives and the chains around them, and editing the
graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from commpass import groups
from commpass.codecs import codec
from commpass.costmodel import Profile
from commpass.groups import mesh_unions
from commpass.passes.fx import costs, meta
from commpass.passes.fx.aliasing import Roots, roots
from commpass.passes.fx.erase import erase
from commpass.passes.fx.fakes import fake_of
from commpass.passes.fx.lengths import Lengths
from commpass.passes.fx.marks import ALLOWED
from commpass.passes.fx.memory import MemoryBudget, initial_budget
from commpass.passes.fx.ops import arguments, aten, functional, is_functional
from commpass.passes.fx.parse import Call, describe_group, is_wait, parse
from commpass.passes.fx.splice import insert
from commpass.passes.simplify.values import value_numbers
from commpass.plan import ROWS
from commpass.policy.rules import Allowed

RULE = "commpass_rule"
"""The key in ``node.meta`` of nodes that a rule inserted: the name of the rule."""
REJECTED = "commpass_rejected"
"""The key in ``node.meta`` of a collective that rules could have changed: by rule, why they did
not, as text for its site's reason."""
NEAR = 256
"""The maximum distance in nodes between adjacent collectives, which keeps the search linear."""


@dataclass(frozen=True)
class Exchange:
    """A plain collective with its only wait. Nothing else uses its result before the wait."""

    call: Call
    wait: fx.Node

    @property
    def input(self) -> fx.Node:
        return self.call.inputs[0]


@dataclass
class Editor:
    """A graph that is being simplified."""

    module: fx.GraphModule
    profile: Profile
    allowed: dict[fx.Node, Allowed] = field(default_factory=dict)
    removed: set[fx.Node] = field(default_factory=set)
    equal: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sweeps: int = 0
    analyzed: list[Any] = field(default_factory=list)
    memory: Roots = field(default_factory=lambda: Roots({}, {}))
    changing: set[fx.Node] = field(default_factory=set)
    whole_sums: set[fx.Node] = field(default_factory=set)
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)
    unions: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Number the collectives that all ranks of a group share, within their group.

        All ranks of the group start them in this order. A node that a rule creates has the number
        of the one that it replaces.
        """
        count: Counter[str] = Counter()
        for node in self.graph.nodes:
            if (call := self.call(node)) is not None and not call.ends:
                group = self.group_of[node.name]
                self.number_of[node.name] = count[group]
                count[group] += 1

    def refresh(self) -> None:
        """Analyze the whole graph at the start of a sweep.

        Finds equal values, and values that must keep their memory because something writes to them
        or reads them by address. Forgets which sums are not divided between the ranks.
        """
        self.whole_sums = set()
        self.sweeps += 1
        self.analyze()

    def analyze(self) -> Roots:
        """Analyze the whole graph, unless it is as it was. Return what memory its nodes share."""
        parts = [part for n in self.graph.nodes for part in (n, n.target, n.args, n.kwargs)]
        if len(parts) == len(self.analyzed) and all(map(is_, parts, self.analyzed)):
            return self.memory
        self.analyzed = parts
        self.memory = found = roots(self.graph)
        fixed = found.fixed()
        self.changing = {node for node, root in found.of.items() if root in fixed}
        self.equal = {}
        last: dict[int, fx.Node] = {}
        for node, number in value_numbers(self.graph, found).items():
            if number in last:
                self.equal[node] = last[number]
            last[number] = node
        return found

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def lives(self, node: fx.Node) -> bool:
        return node not in self.removed

    @cached_property
    def memory_budget(self) -> MemoryBudget:
        """The extra memory that rules hold, by the places of the original graph."""
        return initial_budget(self.graph)

    @cached_property
    def lengths(self) -> Lengths:
        """The symbolic sizes that follow from those of the graph's inputs."""
        return Lengths(self.graph)

    @cached_property
    def prices_of(self) -> costs.PricesOf:
        """The prices in each group."""
        return costs.prices_of(self.profile)

    # --- queries ---

    def call(self, start: fx.Node) -> Call | None:
        """Return the collective that a node is, or None."""
        call = parse(start)
        if call is not None and self.calls.get(start) is not call:
            self.calls[start] = call
            self.group_of[start.name] = describe_group(call)[0]
        return call

    def exchange(self, node: Any, kinds: Sequence[str]) -> Exchange | None:
        """Return the exchange whose wait a node is, if it is a plain one of these kinds."""
        if not (isinstance(node, fx.Node) and is_wait(node) and isinstance(node.args[0], fx.Node)):
            return None
        start = node.args[0]
        call = self.call(start)
        if call is None or call.form != "plain" or call.kind not in kinds:
            return None
        source = call.inputs[0]
        if list(start.users) != [node] or meta.tensor(source) is None:
            return None
        if node in self.changing or source in self.changing:
            return None  # values that are written to may differ between reads
        return Exchange(call, node)

    def keeps_values(self, node: fx.Node) -> bool:
        """Whether a collective sends exact values: without a codec, or with lossless ones that are
        not forced."""
        allowed = self.allowed.get(node)
        if allowed is None or not allowed.codecs:
            return True
        return not allowed.force and all(codec(name).lossless for name in allowed.codecs)

    def allowed_alike(self, a: Call, b: Call) -> bool:
        """Whether the policy allows the same for two collectives, which is required to merge
        them."""
        one, other = self.allowed.get(a.node), self.allowed.get(b.node)
        return one is other or (one is not None and other is not None and one.allow_like(other))

    def union(self, first: Call, second: Call) -> tuple[str, int] | None:
        """Return (name, size) of a group over which one reduction replaces these two, if there
        provably is one."""
        if not isinstance(first.group, str) or not isinstance(second.group, str):
            return None
        pair = (first.group, second.group)
        if pair not in self.unions:
            self.unions[pair] = mesh_unions.union_group(*pair)
        group = self.unions[pair]
        return None if group is None else (group.group_name, group.size())

    def size(self, call: Call) -> int:
        return describe_group(call)[1]

    def rank(self, call: Call) -> int | None:
        """Return this process's rank in a collective's group."""
        group = groups.group_named(str(call.group))
        return None if group is None else dist.get_group_rank(group, dist.get_rank())

    def time_us(self, kind: str, nbytes: float, call: Call) -> float:
        """Return the microseconds of a plain collective in another one's group."""
        return self.us_in(*describe_group(call), kind, nbytes)

    def us_in(self, group: str, size: int, kind: str, nbytes: float) -> float:
        """Return the microseconds of a plain collective in a group of this name and size."""
        return self.prices_of(group, size).time_us(kind, nbytes)

    def kernels_us(self, kernels: int, values: float = 0) -> float:
        """Return the microseconds of local operators that copy values: launches, plus the time of
        the fastest encode, as an upper bound of a copy."""
        rates = [*self.profile.kernels.rates.values(), self.profile.kernels.other]
        return (
            kernels * self.profile.kernels.launch_us
            + values * min(rate.encode_ns for rate in rates) / 1e3
        )

    def may_extend(self, first: fx.Node, last: fx.Node, nbytes: int, merged: int) -> bool:
        """Reserve ``nbytes`` between two nodes for the tensor ``merged`` if allowed. All ranks must
        know the sizes."""
        return self.memory_budget.may_extend(first, last, nbytes, merged)

    def last_user(self, node: fx.Node) -> fx.Node:
        """Return the last user of a node, or the node itself."""
        return max(node.users, default=node)

    def next_to(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether no other collective starts between two. A merged one would otherwise change the
        order of starts."""
        node = first.next
        for _ in range(NEAR):
            if node is second:
                return True
            if node.op != "call_function" or self.call(node) is not None:
                return False
            node = node.next
        return False

    # --- edits ---

    def reject(self, call: Call, rule: str, why: str | None) -> None:
        """Note why a rule leaves a collective as it is; None removes an earlier note."""
        notes = {**call.node.meta.get(REJECTED, {}), rule: why}
        call.node.meta[REJECTED] = {name: text for name, text in notes.items() if text}

    def emit(
        self, before: fx.Node, rule: str, source: fx.Node, target: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Insert a node with a fake value. Its metadata comes from ``source``."""
        node = insert(before, source, target, *args, **kwargs)
        self.memory_budget.place[node] = self.memory_budget.place[before]
        node.meta[RULE] = rule
        made = self.call(node) is not None
        if made and source.name in self.number_of:
            self.number_of[node.name] = self.number_of[source.name]
        if made and source in self.allowed:
            self.allowed[node] = self.allowed[source]
            node.meta[ALLOWED] = {0: self.allowed[source]}
        return node

    def length(self, size: Any, rule: str, source: fx.Node) -> int | fx.Node:
        """Return a size: a number, or a node that computes it from the inputs of the graph."""

        def emit(before: fx.Node, target: Any, *args: Any) -> fx.Node:
            return self.emit(before, rule, source, target, *args)

        return self.lengths.node(size, emit)

    def rebase_sizes(self) -> bool:
        """Compute the sizes that are read from computed tensors from the graph's inputs, where
        they follow from these. Return whether any did.

        Such a read would be a use of a collective's result that needs no wait.
        """
        reads = self.graph.find_nodes(op="call_function", target=aten.sym_size.int)
        changed = False
        for node in reads:
            size = node.meta.get("val")
            computed = node.args[0].op != "placeholder" and isinstance(size, torch.SymInt)
            if computed and self.lengths.can_compute(size):
                node.replace_all_uses_with(self.length(size, "sizes", node))
                erase(node)
                changed = True
        return changed

    def collective(
        self, before: fx.Node, rule: str, like: Call, value: fx.Node, **changed: Any
    ) -> fx.Node:
        """Insert the same collective of another value, with its wait. The policy allows it the
        same."""
        start = self.start(before, rule, like, value, **changed)
        return self.emit(before, rule, like.node, functional.wait_tensor.default, start)

    def start(
        self, before: fx.Node, rule: str, like: Call, value: fx.Node, **changed: Any
    ) -> fx.Node:
        """Insert the same collective of another value, without a wait."""
        value = self.contiguous(before, rule, value)
        given = arguments(like.node) | {"input": value} | changed
        names = [a.name for a in like.node.target._schema.arguments]  # type: ignore[union-attr]
        args = [given[name] for name in names if name in given]
        return self.emit(before, rule, like.node, like.node.target, *args)

    def contiguous(self, before: fx.Node, rule: str, value: fx.Node) -> fx.Node:
        """Return the same values in contiguous memory, as collectives require."""
        found = fake(value)
        if any(not isinstance(size, int) for size in found.shape) or found.is_contiguous():
            return value
        return self.copy(before, rule, value, value)

    def copy(self, before: fx.Node, rule: str, source: fx.Node, value: fx.Node) -> fx.Node:
        """Insert a contiguous copy of a value. Its metadata comes from ``source``."""
        plain = torch.contiguous_format
        return self.emit(before, rule, source, aten.clone.default, value, memory_format=plain)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace all uses of ``old`` by ``new``, and erase nodes without users."""
        old.replace_all_uses_with(self.laid_out_as(old, new))
        self.prune(old)

    def laid_out_as(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """Return the values of ``new`` in the memory order of ``old``'s dimensions, so that views
        of ``old`` remain valid."""
        given, made = _lengths_and_steps(fake(new)), _lengths_and_steps(fake(old))
        if given is None or made is None or given == made:
            return new
        order = sorted(range(len(made)), key=lambda dim: -made[dim][1])
        if _dense([given[dim] for dim in order]):
            return new
        rule, back = new.meta.get(RULE, "same"), [order.index(dim) for dim in range(len(order))]
        turned = self.emit(old, rule, new, aten.permute.default, new, order)
        copied = self.copy(old, rule, new, turned)
        return self.emit(old, rule, new, aten.permute.default, copied, back)

    def prune(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            if node in self.removed or node.users or node.op != "call_function" or not _pure(node):
                continue
            stack += node.all_input_nodes
            erase(node)
            self.removed.add(node)


def _pure(node: fx.Node) -> bool:
    if is_wait(node) or node.target is operator.getitem:
        return not any(_needed(source) for source in node.all_input_nodes)
    if (call := parse(node)) is not None:
        return call.form == "plain" and not call.ends
    return is_functional(node.target) and not node.is_impure()


def _needed(node: fx.Node) -> bool:
    """Whether a node is a collective with side effects, or one of its results. It must be waited
    for."""
    call = parse(node.all_input_nodes[0] if node.target is operator.getitem else node)
    return call is not None and bool(call.ends or "in-place" in call.form or call.form == "out")


def _lengths_and_steps(value: torch.Tensor) -> list[tuple[int, int]] | None:
    """Return (length, stride) of each dimension, by hints; None if a hint is missing. A dimension
    of size 1 has stride 0, as its stride is meaningless."""
    found = []
    for size, stride in zip(value.shape, value.stride(), strict=True):
        length, step = meta.hint(size), meta.hint(stride)
        if length is None or step is None:
            return None
        found.append((length, step if length != 1 else 0))
    return found


def _dense(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether dimensions in this order are dense in memory, the last one innermost."""
    expected = 1
    for length, step in reversed(dims):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


fake = fake_of


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether shapes and dtypes are equal. Symbolic sizes are equal if their texts are."""
    return (meta.shape(fake(a)), fake(a).dtype) == (meta.shape(fake(b)), fake(b).dtype)


def nbytes(node: fx.Node) -> int:
    return meta.total_nbytes(fake(node))


def common_nbytes(call: Call, size: int) -> int:
    """Return an estimate of a collective's input bytes that is equal on all ranks.

    In an all_to_all each rank has its own number of entries, so ``ROWS`` from each rank to each are
    assumed.
    """
    if call.splits is None:
        return nbytes(call.inputs[0])
    value = fake(call.inputs[0])
    return ROWS * size * meta.width(value) * value.dtype.itemsize
