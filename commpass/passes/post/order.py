"""order: pins the starts and waits of exchanges to their order in the graph.

needs: an Inductor graph, before and after its own post-grad passes.
gives: the same graph. Every start and wait comes after the one before it, and matmuls and codec
kernels stay between the same two.
changes: no computed value.

Without the pass, Inductor (torch 2.11 to 2.15) moves each wait next to its start, and all encodes
before the first start. This saves memory, but nothing overlaps. The pass reads only the graph, so
Inductor's cache entries are valid for the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._inductor.graph import GraphLowering
from torch.utils._ordered_set import OrderedSet

from commpass.passes.fx.aliasing import is_alias
from commpass.passes.fx.marks import is_single_kernel, starts, waits
from commpass.passes.fx.memory import memory
from commpass.passes.fx.ops import ADDITIONS, is_heavy, is_matmul, only_user, triton_calls
from commpass.passes.fx.parse import parse
from commpass.passes.post.in_place import (
    WRITTEN,
    Uses,
    body_of,
    can_write,
    return_written,
    sum_in_place,
    write_in_place,
)

FUNCTIONAL, _ = triton_calls()
READS_WITH = tuple(
    each.__code__.co_filename
    for each in (parse, is_matmul, memory, is_alias, can_write, is_single_kernel)
)
"""The source files of the functions that analyze graphs, as part of the pass's name in Inductor's
cache."""
KNOWS_VOIDS = "_void_ctrl_dep_op_names" in GraphLowering.__init__.__code__.co_names
"""Whether this torch can pin nodes without a result (2.13 can, 2.11 cannot)."""


def pin(graph: fx.Graph) -> None:
    """Pin matmuls that run during an exchange and are added to another value after it.

    Without the pin Inductor would fuse the matmul and the addition into one operator, which then
    runs too late.
    """
    start: fx.Node | None = None
    held: dict[fx.Node, fx.Node] = {}
    pins: dict[fx.Node, OrderedSet[fx.Node]] = {}
    for node in graph.nodes:
        if waits(node):
            pins |= {mm: OrderedSet([begun]) for mm, begun in held.items() if _is_added(mm)}
            start, held = None, {}
        elif starts(node):
            start = node
        elif start is not None and is_matmul(node) and start not in node.all_input_nodes:
            held[node] = start
        else:
            for each in node.all_input_nodes:  # an addition, if any, comes before the wait
                held.pop(each, None)
    preserve_node_ordering(graph, pins)


def _is_added(node: fx.Node) -> bool:
    return (user := only_user(node)) is not None and user.target in ADDITIONS


def order(graph: fx.Graph) -> None:
    """Pin every start and wait behind the previous one and the matmuls and codec kernels in
    between.

    A site in a single kernel is pinned like a wait. Also pin matmuls and kernels behind the starts
    of exchanges in flight, unless they depend on them anyway.
    """
    uses = Uses(graph)
    pins: dict[fx.Node, OrderedSet[fx.Node]] = {}
    last: fx.Node | None = None
    latest: fx.Node | None = None  # the latest start without a wait
    between: list[fx.Node] = []
    for node in graph.nodes:
        if waits(node) or starts(node) or is_single_kernel(node):
            behind = [*([] if last is None else [last]), *between]
            last, between = node, []
            if waits(node):
                latest = None
            elif starts(node):
                latest = node
        elif _is_pinned(node):
            between.append(node)
            continue
        elif is_matmul(node):
            behind = [] if latest is None else [latest]
            between.append(node)
        elif last is not None and _stays(node, uses):
            pins[node] = OrderedSet([last])
            between.append(node)
            continue
        else:
            continue
        if found := [each for each in behind if each not in node.all_input_nodes]:
            pins[node] = OrderedSet(found)
    sum_in_place(pins, uses)
    for node in pins:
        if node.target is FUNCTIONAL:
            write_in_place(node)
    preserve_node_ordering(graph, pins)
    for node in graph.find_nodes(op="call_function", target=control_deps):
        if WRITTEN in node.meta:
            return_written(node)
    if not KNOWS_VOIDS:
        _give_something(graph)


def _give_something(graph: fx.Graph) -> None:
    """Make each pinned kernel return one of its inputs, which stays unused."""
    for node in graph.nodes:
        if node.target is control_deps and node.meta.get("val") is None:
            *taken, _, output = body_of(node).graph.nodes
            output.args = (taken[-1],)


def _stays(node: fx.Node, uses: Uses) -> bool:
    """Whether to pin a kernel between two exchanges. A Triton kernel whose results need copies of
    its inputs stays as it is: inside a pin, Inductor could not remove the copies."""
    return is_heavy(node) and (node.target is not FUNCTIONAL or can_write(node, uses))


def _is_pinned(node: fx.Node) -> bool:
    """Whether ``pin`` has pinned a matmul here."""
    if node.target is not control_deps:
        return False
    return any(map(is_matmul, body_of(node).graph.nodes))


class Pins(CustomGraphPass):
    """A custom pass that runs ``function`` after the passes already in its slot."""

    def __init__(self, function: Callable[[fx.Graph], None], before: Any = None):
        self.function = function
        self.before = before if isinstance(before, (list, tuple)) else [before] if before else []

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.before:
            each(graph)
        self.function(graph)

    def uuid(self) -> Any:
        """Return a name for this pass and the earlier ones, or None if one of them has no name, as
        torch expects."""
        names = [each.uuid() if hasattr(each, "uuid") else None for each in self.before]
        own = get_hash_for_files((__file__, *READS_WITH))
        return None if None in names else (self.function.__name__, own, *names)


def ordered() -> Any:
    """Return a config patch with the passes, for one compile. It also stops Inductor from moving
    computation closer to its users."""
    return config.patch({**dict(_slots()), "reorder_for_locality": False})


def _slots() -> Iterator[tuple[str, Any]]:
    for name, function in (("pre", pin), ("post", order)):
        slot = f"post_grad_custom_{name}_pass"
        before = getattr(config, slot)
        if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # torch 2.13: several per slot
            yield slot, [*custom_graph_pass.get_custom_graph_passes(before), Pins(function)]
        else:
            yield slot, Pins(function, before)
