"""What is known on the way through a graph, and what becomes of values that are put together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.direction import recomputed
from commpass.passes.provenance.kinds import (
    ACCUMULATED,
    FIELD,
    FIELDS,
    NEUTRAL,
    SUMS,
    UNKNOWN,
    Kind,
    Provenance,
)

ADDITIONS = ("add", "sub", "rsub")
SAME = (
    *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "clone", "alias"),
    *("detach", "_to_copy", "convert_element_type"),
)
"""Operators whose result has the values of what they take: another dtype, shape or place."""


@dataclass
class Walk:
    """What each node that was met has ``made``, one tensor or several, and what was ``written``
    later to the memory that begins at a node. ``roots`` says where the memory of each node begins,
    if anything is written at all. ``reached`` are the nodes that a gradient reaches."""

    backward: bool
    reached: Collection[fx.Node]
    roots: dict[fx.Node, fx.Node]
    made: dict[fx.Node, Provenance | tuple[Provenance, ...]] = field(default_factory=dict)
    written: dict[fx.Node, Provenance] = field(default_factory=dict)

    def of(self, node: Any) -> Provenance:
        """What a node is now."""
        found = self.made.get(node, UNKNOWN)
        if isinstance(found, tuple):
            found = found[0] if found else UNKNOWN
        later = self.written.get(self.roots.get(node, node)) if self.written else None
        return found if later is None else joined([found, later], [node, node])

    def is_gradient(self, node: fx.Node) -> bool:
        """Whether a node is part of a backward pass, and not of a forward that is run again. Where
        the gradients that come in are not marked, as in compiled autograd, all else is."""
        if not self.backward:
            return False
        return node in self.reached if self.reached else not recomputed(node, ())


# --- reading nodes --------------------------------------------------------------------------------


def name_of(node: Any) -> str:
    """The name of an operator; one that works in place has the same."""
    return str(getattr(node.target, "_opname", "")).rstrip("_")


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    schema = node.target._schema  # type: ignore[union-attr]
    names = (argument.name for argument in schema.arguments)
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def tensors(values: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes with tensors among arguments and lists of them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors(value)
        elif isinstance(value, fx.Node) and not _is_size(value):
            yield value


def inputs(node: fx.Node) -> list[fx.Node]:
    """All nodes with tensors among a node's arguments."""
    return list(tensors((*node.args, *node.kwargs.values())))


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def is_float(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_number(value: torch.Tensor | None) -> bool:
    """Whether a tensor is one number by its form: a batch of one row is none."""
    return value is not None and meta.shape(value) in ((), (1,))


def numel(node: fx.Node) -> int | None:
    """How many values a node has, by hints; None for several tensors."""
    value = meta.tensor(node)
    sizes = [None] if value is None else [meta.hint(size) for size in value.shape]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def origin(node: fx.Node) -> fx.Node:
    """What a node's values are, before casts, views and repetitions."""
    while name_of(node) in SAME and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


# --- putting together -----------------------------------------------------------------------------


def merged(node: fx.Node, sources: Sequence[fx.Node], walk: Walk) -> Provenance:
    """What an operator makes of several tensors, value by value: with a field, a field."""
    if not sources:
        return FIELD  # random numbers
    values = [meta.tensor(source) for source in sources]
    if not all(map(is_number, values)):  # a number is a scale of the others
        sources = [s for s, v in zip(sources, values, strict=True) if not is_number(v)]
    found = [walk.of(source) for source in sources]
    parts = [each for each in found if each.kind not in NEUTRAL]
    if not parts:
        return _constant(node, found)
    if len(parts) == 1:
        return parts[0]
    fields = [each for each in parts if each.kind in FIELDS]
    others = [each for each in parts if each.kind not in FIELDS]
    if not fields:
        return others[0]
    alike = _have_one_shape([*sources, *map(origin, sources), node])
    mixed = next((each for each in others if each.kind is Kind.MIXED), None)
    if mixed is not None and alike:
        return mixed
    if alike and all(each.kind is Kind.UNKNOWN for each in fields):
        return next((each for each in others if each.kind in ACCUMULATED), FIELD)
    return FIELD


def _constant(node: fx.Node, found: Sequence[Provenance]) -> Provenance:
    """What an operator makes of constants: zeros to which a number is added are none."""
    constant = next((each for each in found if each.kind is Kind.CONSTANT), None)
    if constant is None and name_of(node) in ADDITIONS and not isinstance(node.args[-1], fx.Node):
        return Provenance(Kind.CONSTANT, name_of(node))
    return constant or found[0]


def _have_one_shape(nodes: Iterable[fx.Node]) -> bool:
    values = map(meta.tensor, nodes)
    return len({meta.shape(value) for value in values if value is not None}) == 1


def joined(found: Sequence[Provenance], sources: Sequence[fx.Node]) -> Provenance:
    """What values are that lie beside one another in one tensor."""
    parts = [each for each in found if each.kind is not Kind.ZERO]
    if not parts:
        return found[0] if found else FIELD
    if len(parts) > 1 and all(is_number(meta.tensor(source)) for source in sources):
        known = dict.fromkeys(str(each) for each in parts if each.kind not in FIELDS)
        return Provenance(Kind.NUMBERS, ", ".join(known))
    kinds = {each.kind for each in parts}
    if len(kinds) == 1:
        return parts[0]
    if kinds <= FIELDS | SUMS and kinds & FIELDS:
        return FIELD
    return Provenance(Kind.MIXED, ", ".join(dict.fromkeys(map(str, parts))))
