"""Parse every form of functional collective in a graph into one class."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._ops import OpOverload

from commpass import groups
from commpass.passes.fx.ops import arguments
from commpass.plan.kinds import KIND_OF, KINDS, NAMESPACES, WAITS, without_form
from commpass.utils.by_identity import cached_by_identity


@dataclass(frozen=True)
class End:
    """One end of a message between two ranks: ``send`` to, or ``recv`` from, rank ``peer`` of the
    group."""

    kind: str
    peer: int
    tag: int


@dataclass(frozen=True)
class Call:
    """A parsed collective node.

    ``form`` is plain, coalesced, batch, in-place, out, autograd, legacy or view. ``ends`` has one
    entry per input of a point-to-point operator; a received tensor is written into the input at its
    position.
    """

    node: fx.Node
    kind: str
    form: str
    inputs: tuple[fx.Node, ...]
    reduce_op: str | None
    group: Any
    group_size: int | None
    out: fx.Node | None
    splits: tuple[tuple[Any, ...], tuple[Any, ...]] | None
    root: int
    ends: tuple[End, ...] = ()

    def kind_at(self, position: int) -> str:
        """Return the kind of operation on one input."""
        return self.ends[position].kind if self.ends else self.kind

    def receives(self, position: int) -> bool:
        """Whether one input is a buffer that is written and returned."""
        return KINDS[self.kind_at(position)].receives

    @property
    def by_messages(self) -> bool:
        """Whether it is an exchange of commpass, made of messages between pairs of ranks."""
        return str(getattr(self.node.target, "namespace", "")) == "commpass"

    def written(self) -> tuple[fx.Node, ...]:
        """Return the inputs that are receive buffers. The operator's schema does not mark them as
        written."""
        return tuple(
            source for position, source in enumerate(self.inputs) if self.receives(position)
        )


_calls: ContextVar[dict[fx.Node, tuple[Any, Any, Any, Call]] | None]
_calls = ContextVar("_calls", default=None)
"""The calls that were parsed in a context, with the target and the arguments that they were parsed
from."""


@contextmanager
def parsing_once() -> Iterator[None]:
    """Keep the parsed collectives of all graphs in this context.

    An edit of a node gives it other objects as arguments, which are immutable. Its call is
    then parsed again.
    """
    token = _calls.set({})
    try:
        yield
    finally:
        _calls.reset(token)


def is_collective(node: fx.Node) -> bool:
    """Whether a node is a collective. Faster than ``parse``."""
    return node.op == "call_function" and _collective(node.target) is not None


def parse(node: fx.Node) -> Call | None:
    """Return the collective that a node is, or None."""
    if node.op != "call_function" or (found := _collective(node.target)) is None:
        return None
    if (calls := _calls.get()) is None:
        return _parse(node, *found)
    if node in calls:
        target, args, kwargs, call = calls[node]
        if target is node.target and args is node.args and kwargs is node.kwargs:
            return call
    call = _parse(node, *found)
    calls[node] = node.target, node.args, node.kwargs, call
    return call


def _parse(node: fx.Node, overload: OpOverload, form: str, base: str) -> Call:
    given = arguments(node, overload)
    tensors = next((given[key] for key in _INPUT_NAMES if key in given), ())
    inputs = tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)
    op = given.get("reduce_op", given.get("reduceOp"))
    return Call(
        node=node,
        kind=KIND_OF[base],
        form=form,
        inputs=inputs,
        reduce_op=op.lower() if isinstance(op, str) else None if op is None else str(op),
        group=given.get("group_name", given.get("ranks")),
        group_size=given.get("group_size") if isinstance(given.get("group_size"), int) else None,
        out=given.get("out"),
        splits=_splits(given),
        root=given.get("src", 0) if KINDS[KIND_OF[base]].rooted else 0,
        ends=_ends(base, given),
    )


@cached_by_identity
def _collective(target: Any) -> tuple[OpOverload, str, str] | None:
    """Return a collective's operator, form, and name without its form; None for other operators."""
    if not isinstance(target, (OpOverload, torch._ops.OpOverloadPacket)):
        return None
    overload = target if isinstance(target, OpOverload) else getattr(target, target.overloads()[0])
    namespace, _, name = overload._schema.name.partition("::")
    base = without_form(name)
    known = namespace in NAMESPACES and base in KIND_OF
    return (overload, _form(namespace, name), base) if known else None


def _ends(base: str, arguments: dict[str, Any]) -> tuple[End, ...]:
    if base == "batch_p2p_ops":
        rows = zip(arguments["op_list"], arguments["peer_list"], arguments["tag_list"], strict=True)
        return tuple(End(KIND_OF[op], peer, tag) for op, peer, tag in rows)
    peer = {"isend": "dst", "irecv": "src"}.get(base)
    return (End(KIND_OF[base], arguments[peer], arguments["tag"]),) if peer else ()


def _splits(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Return what an all_to_all sends to and receives from each rank, as numbers or nodes."""
    if "input_split_sizes" not in arguments:
        return None
    return tuple(arguments["input_split_sizes"]), tuple(arguments["output_split_sizes"])


_INPUT_NAMES = ("inputs", "input", "tensors", "tensor", "self", "shard")


def _form(namespace: str, name: str) -> str:
    if namespace == "_c10d_functional_autograd":
        return "autograd"
    if namespace == "c10d_functional":
        return "legacy"
    if namespace == "_dtensor":
        return "view"
    if name.endswith("_coalesced_"):
        return "in-place coalesced"
    if name == "batch_p2p_ops":
        return "batch"
    if name.endswith("_coalesced"):
        return "coalesced"
    if name.endswith("_out"):
        return "out"
    return "in-place" if name.endswith("_") else "plain"


def describe_group(call: Call) -> tuple[str, int]:
    """Return (name, size) of a collective's group, with size 0 if unknown."""
    group: Any = call.group
    if isinstance(group, fx.Node):
        held = group.meta.get("val")
        group = getattr(held, "real_obj", held)
    if isinstance(group, str):
        group = groups.group_named(group)
    if isinstance(group, dist.ProcessGroup):
        return group.group_name, group.size()
    return str(call.group), call.group_size or 0


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for one tensor, or for several (torch 2.15)."""
    return node.op == "call_function" and _waits(node.target)


@cached_by_identity
def _waits(target: Any) -> bool:
    if not isinstance(target, (OpOverload, torch._ops.OpOverloadPacket)):
        return False
    name = str(getattr(target, "_schema", target)).partition("(")[0]
    return name.split(".")[0].split("::")[-1] in WAITS


def items(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Yield (index, node) for every ``getitem`` of a node with several values."""
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem:
            yield int(user.args[1]), user  # type: ignore[arg-type]


def value_of(call: Call, position: int) -> fx.Node | None:
    """Return the node of result ``position`` of a collective, before any wait, or None if it is
    unused."""
    if "coalesced" not in call.form and call.form != "batch":
        return call.node
    return next((node for index, node in items(call.node) if index == position), None)


def is_size(node: fx.Node) -> bool:
    """Whether a node only queries a size, which is known before any wait."""
    return node.op == "call_function" and node.target is torch.ops.aten.sym_size.int


def waited(value: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the uses of a collective's result: (the nodes that hold it after a wait, the users
    that do not wait)."""
    held: list[fx.Node] = []
    early: list[fx.Node] = []
    for user in value.users:
        if is_size(user):
            continue
        if not is_wait(user):
            early.append(user)
        elif isinstance(user.args[0], fx.Node):
            held.append(user)
        else:
            position = list(user.args[0]).index(value)  # type: ignore[arg-type]
            held += [node for index, node in items(user) if index == position]
    return held, early


def sources(wait: fx.Node) -> list[fx.Node]:
    """Return what a wait waits for, through the items of a coalesced collective."""
    found = list(wait.all_input_nodes)
    return [*found, *(source for each in found for source in each.all_input_nodes)]


def graph_modules(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield a graph module and the sub-graphs that its higher-order operators call, each once, with
    a name prefix."""
    return _graph_modules(gm, "", set())


def _graph_modules(
    gm: fx.GraphModule, prefix: str, seen: set[int]
) -> Iterator[tuple[str, fx.GraphModule]]:
    seen.add(id(gm))
    yield prefix, gm
    for name in dict.fromkeys(str(n.target) for n in gm.graph.nodes if n.op == "get_attr"):
        child = getattr(gm, name, None)
        if isinstance(child, fx.GraphModule) and id(child) not in seen:
            yield from _graph_modules(child, f"{prefix}{name}.", seen)
