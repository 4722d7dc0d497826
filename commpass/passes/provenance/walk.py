"""The state of the walk through a graph, and the provenance of combined values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.direction import recomputed
from commpass.passes.fx.ops import UNMIXED, name_of
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


@dataclass
class Walk:
    """The state of the walk.

    ``made`` has the results of each visited node, one or several. ``written`` has what was written
    later to the memory that starts at a node, and ``roots`` maps nodes to the start of their
    memory. ``reached`` are the nodes that a gradient reaches.
    """

    backward: bool
    reached: Collection[fx.Node]
    roots: dict[fx.Node, fx.Node]
    made: dict[fx.Node, Provenance | tuple[Provenance, ...]] = field(default_factory=dict)
    written: dict[fx.Node, Provenance] = field(default_factory=dict)

    def of(self, node: Any) -> Provenance:
        """Return the current provenance of a node."""
        found = self.made.get(node, UNKNOWN)
        if isinstance(found, tuple):
            found = found[0] if found else UNKNOWN
        later = self.written.get(self.roots.get(node, node)) if self.written else None
        return found if later is None else joined([found, later], [node, node])

    def is_gradient(self, node: fx.Node) -> bool:
        """Whether a node belongs to a backward pass, and not to a recomputed forward.

        If incoming gradients are not marked, as in compiled autograd, every node that is not
        recomputed counts.
        """
        if not self.backward:
            return False
        return node in self.reached if self.reached else not recomputed(node, ())


# --- reading nodes --------------------------------------------------------------------------------


def tensors(values: Iterable[Any]) -> Iterator[fx.Node]:
    """Yield the tensor nodes among arguments and lists of them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors(value)
        elif isinstance(value, fx.Node) and not _is_size(value):
            yield value


def inputs(node: fx.Node) -> list[fx.Node]:
    """Return all tensor nodes among a node's arguments."""
    return list(tensors((*node.args, *node.kwargs.values())))


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def is_float(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def is_number(value: torch.Tensor | None) -> bool:
    """Whether a tensor is a single number by its shape. A batch of one row is not."""
    return value is not None and meta.shape(value) in ((), (1,))


def numel(node: fx.Node) -> int | None:
    """Return the number of values of a node, by hints; None for several tensors."""
    value = meta.tensor(node)
    sizes = [None] if value is None else [meta.hint(size) for size in value.shape]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def origin(node: fx.Node) -> fx.Node:
    """Return the node whose values a node has, before casts, views and repetitions."""
    while name_of(node) in UNMIXED and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


# --- combining values -----------------------------------------------------------------------------


def merged(node: fx.Node, sources: Sequence[fx.Node], walk: Walk) -> Provenance:
    """Return the result of an elementwise operator on several tensors. With a field, it is a
    field."""
    if not sources:
        return FIELD  # random numbers
    values = [meta.tensor(source) for source in sources]
    if not all(map(is_number, values)):  # a number only scales the others
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
    """Return the result of an operator on constants. Zeros plus a number are a constant."""
    constant = next((each for each in found if each.kind is Kind.CONSTANT), None)
    if constant is None and name_of(node) in ADDITIONS and not isinstance(node.args[-1], fx.Node):
        return Provenance(Kind.CONSTANT, name_of(node))
    return constant or found[0]


def _have_one_shape(nodes: Iterable[fx.Node]) -> bool:
    values = map(meta.tensor, nodes)
    return len({meta.shape(value) for value in values if value is not None}) == 1


def joined(found: Sequence[Provenance], sources: Sequence[fx.Node]) -> Provenance:
    """Return the provenance of a concatenation."""
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
