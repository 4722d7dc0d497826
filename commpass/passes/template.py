"""The algorithm of a site as a graph of codec operators, and its insertion into the site's
graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, fx

from commpass import groups
from commpass.codecs import codec, operators
from commpass.collectives import Algorithm, algorithm
from commpass.collectives import run as run_steps
from commpass.collectives.data_sized import sizes_of_data
from commpass.errors import VerifyError
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import is_view
from commpass.passes.fx.fake_results import FakeResults, is_plain
from commpass.passes.fx.fakes import another, can_be_copied, fake_of, view_of
from commpass.passes.fx.marks import MARK, Mark, is_single_kernel, marks
from commpass.passes.fx.parse import is_wait, value_of
from commpass.passes.fx.splice import set_value, splice
from commpass.passes.fx.tracing import Decompositions, traced
from commpass.passes.graph_site import GraphSite
from commpass.passes.payloads import request_of
from commpass.passes.single_kernel import PeerMemoryOf, no_peer_memory, operator_of
from commpass.plan import SINGLE_KERNEL, PlannedSite
from commpass.utils.ambient import without_ambient_state


@dataclass(frozen=True)
class Template:
    """A traced algorithm. ``copied`` are the nodes whose fake values are copied for each site, and
    ``views`` those that share the memory of their only input. If ``own_sizes``, it contains
    value-dependent sizes, so that no other site can share it."""

    graph: fx.Graph
    marks: dict[fx.Node, Mark]
    copied: frozenset[fx.Node]
    views: frozenset[fx.Node]
    own_sizes: bool


@dataclass
class Templates:
    """Traced algorithms, by everything that they depend on. Equal sites are traced once."""

    decompositions: Decompositions
    peer_memory: PeerMemoryOf = no_peer_memory
    traced: dict[tuple[Any, ...], Template] = field(default_factory=dict)
    results: FakeResults = field(default_factory=FakeResults)

    def of(self, found: GraphSite, planned: PlannedSite, inputs: Sequence[fx.Node]) -> Template:
        key = (
            planned.kind,
            planned.codec,
            planned.algorithm,
            planned.chunks,
            planned.lowering == SINGLE_KERNEL,
            planned.reduce_op,
            planned.group,
            planned.group_size,
            str(planned.splits),
            planned.peer,
            planned.tag,
            found.current_call.root,
            *meta.layout(fake_of(found.input)),
        )
        if key not in self.traced:
            if planned.lowering == SINGLE_KERNEL:
                graph = self._single_kernel(planned, inputs)
            else:
                graph = trace(planned, found, inputs, self.decompositions)
            own = any("unbacked_bindings" in node.meta for node in graph.nodes)
            template = Template(graph, marks(graph, ""), _copied(graph), _views(graph), own)
            if own:
                return template
            self.traced[key] = template
        return self.traced[key]

    def _single_kernel(self, planned: PlannedSite, inputs: Sequence[fx.Node]) -> fx.Graph:
        """Return the graph of a site in a single kernel: one operator."""
        run = operator_of(planned, planned, self.peer_memory(planned.group))
        subject = f"{planned.codec} by {planned.algorithm} in a single kernel"
        with without_ambient_state():
            return traced(run, [fake_of(inputs[0])], self.decompositions, subject).graph


def trace(
    planned: PlannedSite,
    found: GraphSite,
    inputs: Sequence[fx.Node],
    decompositions: Decompositions,
) -> fx.Graph:
    """Trace the algorithm of a site as a graph of its inputs, under the graph's fake mode. Encodes,
    decodes and sums are single operators."""
    chosen, coder = algorithm_of(planned), codec(planned.codec)
    values = [_value(found, node) for node in inputs]
    sizes = dict(zip(sizes_of(found), range(1, len(values)), strict=False))

    def run(*inputs: Any) -> Any:
        def split(size: Any) -> Any:
            return inputs[sizes[size]] if isinstance(size, fx.Node) else size

        sent, received = (
            (tuple(map(split, some)) for some in found.current_call.splits)
            if found.current_call.splits
            else (None, None)
        )
        request = replace(
            request_of(planned),
            rank=_rank(planned),
            root=found.current_call.root,
            sent=sent,
            received=received,
        )
        state = inputs[len(values) - (coder.state is not None) :]
        return run_steps(chosen.run(inputs[0], request, coder, *state))

    with (
        without_ambient_state(),
        sizes_of_data(coder, values[0], traced=True),
        operators.as_operators(),
    ):
        subject = f"{planned.codec} by {planned.algorithm}"
        return traced(run, values, decompositions, subject).graph


def algorithm_of(planned: PlannedSite) -> Algorithm:
    """Return the algorithm of a compressed site, with its chunks."""
    chunks = {"chunks": planned.chunks} if planned.chunks > 1 else {}
    return algorithm(planned.kind, planned.algorithm, **chunks)


def sizes_of(found: GraphSite) -> list[fx.Node]:
    """Return the nodes among an all_to_all's splits."""
    splits = (size for some in found.current_call.splits or () for size in some)
    return list(dict.fromkeys(size for size in splits if isinstance(size, fx.Node)))


def _rank(planned: PlannedSite) -> int:
    rank = groups.rank_in(planned.group)
    if rank is None:
        raise VerifyError(
            f"{planned.name}: group {planned.group!r} is not here, so this rank's number in it is"
            " not known"
        )
    return rank


def _copied(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes whose fake values of fixed sizes are not views."""
    return frozenset(
        node for node in graph.nodes if can_be_copied(node.meta.get("val")) and not is_view(node)
    )


def _views(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes of fixed sizes that are views of their only input."""
    return frozenset(
        node
        for node in graph.nodes
        if is_plain(node.meta.get("val")) and is_view(node) and len(node.all_input_nodes) == 1
    )


def splice_site(
    found: GraphSite,
    name: str,
    template: Template,
    inputs: Sequence[fx.Node],
    known: FakeResults,
) -> list[fx.Node]:
    """Copy a traced algorithm into the graph of a site. Return the nodes of its result and of its
    new state, if any. ``known`` has fake values of sites that were inserted before.

    Nodes that depend on no wait are inserted at the collective, the others before the first wait
    for its result. Computation in between then overlaps the first exchanges. If there is no such
    computation, chunks start no earlier than the algorithm starts them, so that fewer buffers exist
    at once.
    """
    collective, anchor = found.call.node, _anchor(found)
    in_order = collective.next is anchor
    late: set[fx.Node] = set()

    def before(node: fx.Node) -> fx.Node:
        waits = is_wait(node) or any(source in late for source in node.all_input_nodes)
        if not waits and not (late and in_order):
            return collective
        late.add(node)
        return anchor

    carried = meta.carried(collective)

    def describe(copy: fx.Node, node: fx.Node) -> None:
        mark = template.marks[node]
        copy.meta.update(carried)
        copy.meta[MARK] = Mark(name, mark.hop, mark.role, mark.chunk)
        _set_value(copy, found, node, template, known)

    results = splice(template.graph, inputs, before, describe)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _anchor(found: GraphSite) -> fx.Node:
    """Return the node before which the second part of an algorithm goes: the first wait, or else
    the node after the collective."""
    if not found.outputs:
        held = value_of(found.call, found.position)
        return next(
            (user for user in (held.users if held else ()) if is_wait(user)),
            found.call.node.next,
        )
    first = found.outputs[0]
    return first if is_wait(first) else first.all_input_nodes[0]


def _set_value(
    copy: fx.Node, found: GraphSite, node: fx.Node, template: Template, known: FakeResults
) -> None:
    """Give an inserted node its own fake value, because storages identify aliases.

    It is that of the traced ``node`` if no other site shares the template.
    """
    by_node = isinstance(found.call.group, fx.Node)  # but it was traced with the group's name
    if by_node and not is_single_kernel(copy):
        copy.args = tuple(found.call.group if arg == found.site.group else arg for arg in copy.args)
    if template.own_sizes:
        copy.meta |= {
            key: node.meta[key] for key in ("val", "unbacked_bindings") if key in node.meta
        }
    elif node in template.copied:
        copy.meta["val"] = another(node.meta["val"])
    elif node in template.views and (view := _view(copy, node)) is not None:
        copy.meta["val"] = view
    else:
        set_value(copy, known, partial(_value, found))


def _view(copy: fx.Node, node: fx.Node) -> Tensor | None:
    """Return the value of a view, if its input lies in its memory as that of the traced one, which
    has the same layout."""
    own, traced = (meta.tensor(each.all_input_nodes[0]) for each in (copy, node))
    if is_plain(own) and is_plain(traced) and own.storage_offset() == traced.storage_offset():
        return view_of(own, node.meta["val"])
    return None


def _value(found: GraphSite, node: fx.Node) -> Any:
    """Return the fake value, or symbolic number, of a node."""
    return found.site.group if node is found.call.group else meta.value(node)
