"""The memory of a graph: its storages, what an order of nodes holds, and what rules may add."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from commpass.lowering.exchange import WAIT
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import is_alias, written_arguments
from commpass.passes.fx.fakes import storage
from commpass.passes.fx.ops import aten, opname
from commpass.passes.fx.parse import is_collective, is_wait, parse, sources


@dataclass(frozen=True)
class Memory:
    """The memory of a graph, as numbered storages.

    ``gives`` are the storages of each node's result, and ``touches`` those of its inputs and
    result. ``nbytes`` has the size of each.
    """

    gives: Mapping[fx.Node, frozenset[int]]
    touches: Mapping[fx.Node, frozenset[int]]
    nbytes: Mapping[int, int]


def memory(
    graph: fx.Graph, *, in_place: bool = False, excluded: Collection[fx.Node] = ()
) -> Memory:
    """Return the memory of a graph without ``excluded`` nodes, which have no users left.

    An exchange holds its input and its result until its wait. If ``in_place``, the memory is as
    Inductor plans it: sums reuse their input's memory, and parts of a concatenation are computed in
    place.
    """
    numbers: dict[int, int] = {}
    parts = {part: join for join in graph.nodes for part in _parts(join)} if in_place else {}
    nbytes: dict[int, int] = defaultdict(int)
    gives: dict[fx.Node, frozenset[int]] = {}
    touches: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node in excluded:
            continue
        made, inputs = set(), node.all_input_nodes
        waits, aliases = is_wait(node), is_alias(node)
        inherits = waits or (aliases and _shares_always(node))
        inherits = inherits or (in_place and _sums_in_place(node))
        if inherits:  # regardless of its fake's storage, which may belong to a replaced node
            for fake, source in zip(meta.tensors(node.meta.get("val")), inputs, strict=False):
                if gives[source]:
                    numbers.setdefault(storage(fake), min(gives[source]))
        if node in parts:
            whole = storage(parts[node].meta["val"])
            own_storage = storage(node.meta["val"])
            numbers[own_storage] = numbers.setdefault(whole, len(numbers))
            nbytes[numbers[whole]] = meta.nbytes(parts[node].meta["val"])
        for fake in meta.tensors(node.meta.get("val", node.meta.get("example_value"))):
            number = numbers.setdefault(storage(fake), len(numbers))
            nbytes[number] = max(nbytes[number], meta.nbytes(fake))
            made.add(number)
        given = {number for each in inputs for number in gives[each]}
        if waits or aliases:
            made |= given
        gives[node] = frozenset(made)
        touches[node] = frozenset(made | given)
        if node.target is WAIT:  # the start has allocated the result
            touches[inputs[0]] |= made
        if waits:
            started = [each for each in sources(node) if is_collective(each)]
            touches[node] |= {number for each in started for number in touches[each]}
    return Memory(gives, touches, dict(nbytes))


def _shares_always(node: fx.Node) -> bool:
    """Whether the result of a view operator always shares its input's memory. Some copy if they
    must."""
    return opname(node) not in ("reshape", "contiguous")


def _parts(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a ``cat`` that Inductor computes in place in the result."""
    if node.target is not aten.cat.default:
        return []
    return [
        each
        for each in node.all_input_nodes
        if torch.Tag.pointwise in getattr(each.target, "tags", ()) and not is_alias(each)
    ]


def _sums_in_place(node: fx.Node) -> bool:
    """Whether Inductor runs a sum in its input's memory: the input has no other users, and the
    graph allocated it."""
    call = parse(node)
    if call is None or call.kind != "all_reduce" or call.form != "plain":
        return False
    source = call.inputs[0]
    while len(source.users) == 1 and is_alias(source):
        source = source.all_input_nodes[0]
    return len(source.users) == 1 and source.op == "call_function"


def changed(graph: fx.Graph, known: Memory) -> frozenset[int]:
    """Return the storages that some node writes. Waits do not count."""
    nodes = (node for node in graph.nodes if not is_wait(node))
    return frozenset(number for node in nodes for number in written(node, known))


def written(node: fx.Node, known: Memory) -> frozenset[int]:
    """Return the storages that a node writes: those of the arguments that its operator mutates. A
    wait writes its result."""
    if is_wait(node):
        return known.gives[node]
    return frozenset(number for each in written_arguments(node) for number in known.gives[each])


class LiveBytes:
    """The bytes that a graph holds while its nodes run.

    Memory is allocated by the first node that touches it and freed after the last. Outputs are held
    until the end.
    """

    def __init__(self, known: Memory):
        self.known = known
        self.left = Counter(number for some in known.touches.values() for number in some)
        self.taken: set[int] = set()
        self.now = self.most = 0

    def allocates(self, node: fx.Node) -> bool:
        """Whether a node allocates memory."""
        return not self.known.touches[node] <= self.taken

    def run(self, node: fx.Node) -> None:
        """Run a node."""
        touched = self.known.touches[node]
        for number in touched:
            if number not in self.taken:
                self.taken.add(number)
                self.now += self.known.nbytes[number]
        self.most = max(self.most, self.now)
        for number in touched:
            self.left[number] -= 1
            if not self.left[number]:
                self.now -= self.known.nbytes[number]

    def peak(self, nodes: Sequence[fx.Node]) -> int:
        """Return the peak bytes while the given nodes run."""
        nbytes = self.known.nbytes
        taken: set[int] = set()
        gone: dict[int, int] = {}
        held = most = self.now
        for node in nodes:
            touched = self.known.touches[node]
            for number in touched:
                if number not in self.taken and number not in taken:
                    taken.add(number)
                    held += nbytes[number]
            most = max(most, held)
            for number in touched:
                gone[number] = gone.get(number, 0) + 1
                if gone[number] == self.left[number]:
                    held -= nbytes[number]
        return most


def peak(order: Sequence[fx.Node], known: Memory) -> int:
    """Return the peak bytes if a graph runs in an order."""
    held = LiveBytes(known)
    for node in order:
        held.run(node)
    return held.most


# --- the memory that rules add --------------------------------------------------------------------


@dataclass
class MemoryBudget:
    """The extra bytes that simplify rules hold at each place.

    A rank cannot use the free memory of its own graph as a criterion: it depends on the batch, so
    ranks would decide differently. Every place therefore counts as the peak, and only inputs and
    outputs of collectives are counted, whose sizes all ranks share.

    ``place`` numbers the nodes, and ``kept`` has the extra bytes at each place. ``largest`` is the
    largest tensor that a rule has merged.
    """

    place: dict[fx.Node, int]
    kept: NDArray[np.int64]
    largest: int = 0

    def may_extend(self, first: fx.Node, last: fx.Node, nbytes: int, merged: int) -> bool:
        """Reserve ``nbytes`` between two nodes and return True, if no place then exceeds the
        largest tensor ``merged`` so far."""
        if nbytes <= 0:
            return True
        start, end = sorted((self.place[first], self.place[last]))
        largest, between = max(self.largest, merged), self.kept[start:end]
        if between.size and between.max() + nbytes > largest:
            return False
        between += nbytes
        self.largest = largest
        return nbytes <= largest


def initial_budget(graph: fx.Graph) -> MemoryBudget:
    place = {node: number for number, node in enumerate(graph.nodes)}
    return MemoryBudget(place, np.zeros(len(place), dtype=np.int64))
