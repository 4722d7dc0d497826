"""The order constraints of nodes beyond data dependencies, and the memory that an order needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commpass.passes.fx import meta
from commpass.passes.fx.costs import is_alias, tensors
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import is_wait, parse


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
        made = set()
        inherits = is_wait(node) or _views(node) or (in_place and _sums_in_place(node))
        if inherits:  # regardless of its fake's storage, which may belong to a replaced node
            pairs = zip(tensors(node.meta.get("val")), node.all_input_nodes, strict=False)
            for fake, source in pairs:
                if gives[source]:
                    numbers.setdefault(fake.untyped_storage()._cdata, min(gives[source]))
        if node in parts:
            whole = parts[node].meta["val"].untyped_storage()._cdata
            own_storage = node.meta["val"].untyped_storage()._cdata
            numbers[own_storage] = numbers.setdefault(whole, len(numbers))
            nbytes[numbers[whole]] = meta.nbytes(parts[node].meta["val"])
        for fake in tensors(node.meta.get("val", node.meta.get("example_value"))):
            number = numbers.setdefault(fake.untyped_storage()._cdata, len(numbers))
            nbytes[number] = max(nbytes[number], meta.nbytes(fake))
            made.add(number)
        given = {number for each in node.all_input_nodes for number in gives[each]}
        if is_wait(node) or is_alias(node):
            made |= given
        gives[node] = frozenset(made)
        touches[node] = frozenset(made | given)
        if is_wait(node):
            started = [each for each in sources(node) if parse(each) is not None]
            touches[node] |= {number for each in started for number in touches[each]}
    return Memory(gives, touches, dict(nbytes))


def _views(node: fx.Node) -> bool:
    """Whether a node's result always shares its input's memory. Some view operators copy if they
    must."""
    return is_alias(node) and getattr(node.target, "_opname", "") not in ("reshape", "contiguous")


def _parts(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a ``cat`` that Inductor computes in place in the result."""
    if node.target is not torch.ops.aten.cat.default:
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


def sources(node: fx.Node) -> list[fx.Node]:
    """Return what a wait waits for, through the items of a coalesced collective."""
    found = list(node.all_input_nodes)
    return [*found, *(source for each in found for source in each.all_input_nodes)]


def orders(graph: fx.Graph, known: Memory) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the nodes that must come before it.

    These are its inputs and the last writer of each storage that it touches. For storages that it
    writes, all earlier readers are included. Nodes with side effects or random numbers keep their
    order. Nothing that Inductor may run in place may write into data in flight, between the start
    of an exchange and its wait.
    """
    before: dict[fx.Node, dict[fx.Node, None]] = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    writer: dict[int, fx.Node] = {}
    travels: dict[int, list[fx.Node]] = defaultdict(list)  # starts and waits
    in_place: dict[int, list[fx.Node]] = defaultdict(list)
    effect: fx.Node | None = None
    for node in graph.nodes:
        first = dict.fromkeys(node.all_input_nodes)
        into = written(node, known)
        for number in known.touches[node]:
            if number in writer:
                first[writer[number]] = None
            if number in into:
                first |= dict.fromkeys(readers[number])
        for number in known.touches[node]:
            if number in into:
                writer[number], readers[number] = node, []
            else:
                readers[number].append(node)
        exchange = is_wait(node) or parse(node) is not None
        for number in known.touches[node] if exchange else ():
            first |= {} if is_wait(node) else dict.fromkeys(in_place[number])
            travels[number].append(node)
        for number in _written_in_place(node, known):
            first |= dict.fromkeys(travels[number])
            in_place[number].append(node)
        if _has_effects(node):
            if effect is not None:
                first[effect] = None
            effect = node
        first.pop(node, None)
        before[node] = first
    return {node: list(first) for node, first in before.items()}


def changed(graph: fx.Graph, known: Memory) -> frozenset[int]:
    """Return the storages that some node writes. Waits do not count."""
    nodes = (node for node in graph.nodes if not is_wait(node))
    return frozenset(number for node in nodes for number in written(node, known))


def written(node: fx.Node, known: Memory) -> frozenset[int]:
    """Return the storages that a node writes: those of the arguments that its operator mutates. A
    wait writes its result."""
    if is_wait(node):
        return known.gives[node]
    call = parse(node)
    found = {number for each in (call.written() if call else ()) for number in known.gives[each]}
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return frozenset(found)
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            each = value if isinstance(value, (list, tuple)) else [value]
            found |= {n for node in each if isinstance(node, fx.Node) for n in known.gives[node]}
    return frozenset(found)


IN_PLACE = ("index_put", "_scatter", "_foreach_")
"""Name parts of operators that Inductor runs in place if the old values have no further users. It
does not know that an exchange may still read them."""


def _written_in_place(node: fx.Node, known: Memory) -> frozenset[int]:
    """Return the storages that Inductor may let a node write.

    For an operator on one tensor, that of its first argument. For a wrapper of another operator
    (``auto_functionalized``), those of all inputs.
    """
    if node.op != "call_function" or is_wait(node) or parse(node) is not None:
        return frozenset()
    found: list[Any]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        found = list(node.all_input_nodes) if "functional" in node.target.name() else []
    elif any(part in getattr(node.target, "_opname", "") for part in IN_PLACE):
        first = node.args[0] if node.args else ()
        found = list(first) if isinstance(first, (list, tuple)) else [first]
    else:
        return frozenset()
    return frozenset(
        number for each in found if isinstance(each, fx.Node) for number in known.gives[each]
    )


def _has_effects(node: fx.Node) -> bool:
    """Whether a node has effects beyond its result and its writes."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return MARK not in node.meta  # commpass kernels only return a result
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    return node.target in fx.node._side_effectful_functions and not is_wait(node)


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
        for number in self.known.touches[node]:
            if number not in self.taken:
                self.taken.add(number)
                self.now += self.known.nbytes[number]
        self.most = max(self.most, self.now)
        for number in self.known.touches[node]:
            self.left[number] -= 1
            if not self.left[number]:
                self.now -= self.known.nbytes[number]

    def peak(self, nodes: Sequence[fx.Node]) -> int:
        """Return the peak bytes while the given nodes run."""
        taken: set[int] = set()
        gone: Counter[int] = Counter()
        held = most = self.now
        for node in nodes:
            new = self.known.touches[node] - self.taken - taken
            taken |= new
            held += sum(self.known.nbytes[number] for number in new)
            most = max(most, held)
            for number in self.known.touches[node]:
                gone[number] += 1
                if gone[number] == self.left[number]:
                    held -= self.known.nbytes[number]
        return most


def peak(order: Sequence[fx.Node], known: Memory) -> int:
    """Return the peak bytes if a graph runs in an order."""
    held = LiveBytes(known)
    for node in order:
        held.run(node)
    return held.most
