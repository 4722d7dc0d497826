"""lower: codec operators -> operators that Inductor compiles.

needs: a rewritten graph.
gives: the same graph without codec operators. Inline, each is replaced by the nodes that it
consists of. Otherwise one call of a kernel, compiled here, replaces what a site computes between
two exchanges.
changes: no computed value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from commpass.codecs import operators
from commpass.codecs.exponent.codec import by_calls
from commpass.errors import VerifyError
from commpass.lowering import (
    Generated,
    Source,
    caller,
    decode_matmul,
    exponent,
    fused,
    make,
    matmul,
    start_compiling,
    tunable,
)
from commpass.lowering.chain import Add, Decode
from commpass.passes.constants import lift_constants
from commpass.passes.context import PassContext
from commpass.passes.failures import SiteErrors, site_errors
from commpass.passes.fx import meta
from commpass.passes.fx.erase import erase, replace
from commpass.passes.fx.fake_results import FakeResults, is_plain
from commpass.passes.fx.fakes import mode_of
from commpass.passes.fx.marks import CODED, MARK, STRIDES, TUNABLE, inherit, nodes_by_site
from commpass.passes.fx.ops import ALLOCATORS, frozen, triton_calls
from commpass.passes.fx.outputs import outputs_apart
from commpass.passes.fx.parse import graph_modules, items
from commpass.passes.fx.splice import set_value, splice
from commpass.passes.fx.tracing import Decompositions, inductor_decompositions, traced
from commpass.passes.regions import (
    PAD,
    Region,
    generated,
    outline,
    place_buffers,
    places,
    regions,
    trace,
)
from commpass.plan import PlannedSite
from commpass.utils.ambient import without_ambient_state

WITH_FEEDBACK = operators.ops.encode_with_feedback.default
RATED = ("encode", "decode", "enter", "leave")
"""The roles that a codec's rates refer to. The encode and decode rates also cover enter and
leave."""
PLAIN = partial(by_calls, None)
"""Traces codec ``exponent`` as plain operators."""


def run(context: PassContext) -> None:
    """Lower codec operators. Codecs inside codecs only now introduce their constants."""
    given, plan = context.input, context.plan
    how = {"calls": given.operators, "kernels": given.kernels}
    lower(given.gm, plan.sites, given.decompositions, **how)
    describe_inputs(given.gm)
    known = context.constants
    context.constants = lift_constants(given.gm, as_inputs=given.adds_inputs, before=known)


def lower(
    gm: fx.GraphModule,
    plan: Sequence[PlannedSite],
    decompositions: Decompositions | None = None,
    *,
    calls: bool = False,
    kernels: bool = False,
) -> None:
    """Replace every codec operator in place: by a kernel call or by its body, as the plan says of
    its site.

    Raises SiteFailure, also if a kernel does not compile. If ``calls``, a body may contain
    operators of commpass (``codecs.exponent_operators``). They run as kernels if ``kernels`` is
    true and a kernel exists.
    """
    by_kernel = {site.name: number for number, site in enumerate(plan) if site.lowering == "kernel"}
    table = decompositions or inductor_decompositions
    inline = partial(exponent.as_calls, kernels=kernels) if calls else PLAIN
    of_regions = Kernels(table, inline)
    bodies = Bodies(table, frozenset(by_kernel), inline)
    with site_errors() as errors:
        for _, module in graph_modules(gm):
            marked = [node for node in module.graph.nodes if MARK in node.meta]
            coded = [node for node in marked if node.target in operators.IMPLEMENTATIONS]
            if coded:
                with (
                    without_ambient_state(),
                    enable_python_dispatcher(),
                    mode_of(module.graph),
                    outputs_apart(module.graph),
                ):
                    _lower(module.graph, marked, by_kernel, of_regions, bodies, errors)
            if marked:
                _share_tables(module.graph)
                module.recompile()
                require_strides(module.graph)
    start_compiling(of_regions.traced.values())
    with site_errors() as errors:
        for source in of_regions.traced.values():
            with errors.of(*of_regions.sites[source.name]):
                make((source,))


def describe_inputs(gm: fx.GraphModule) -> None:
    """Give the inputs of collectives the metadata that torch's own tracing writes.

    Inductor's fusion of DDP's sums reads it. Once a process has used DDP with
    ``optimize_ddp="python_reducer"``, Inductor runs this fusion on all its graphs.
    """
    known: dict[Any, Any] = {}  # of equal layouts, as those of layers
    for _, module in graph_modules(gm):
        for node in module.graph.nodes:
            if getattr(node.target, "namespace", "") != "_c10d_functional":
                continue
            for each in node.all_input_nodes:
                value = each.meta.get("val")
                if not isinstance(value, Tensor) or "tensor_meta" in each.meta:
                    continue
                if not is_plain(value):
                    each.meta["tensor_meta"] = _extract_tensor_metadata(value)
                    continue
                key = value.shape, value.stride(), value.dtype, value.requires_grad
                if key not in known:
                    known[key] = _extract_tensor_metadata(value)
                each.meta["tensor_meta"] = known[key]


def require_strides(graph: fx.Graph) -> None:
    """Have Inductor give inserted kernels on a GPU their inputs with the strides that they have
    here.

    Their strides are arguments or constants of kernels. Inductor pads rows of long intermediate
    results, and passes them so to operators without this entry in their metadata, which torch's own
    tracing writes.
    """
    for node in graph.nodes:
        if MARK not in node.meta or not _is_kernel(node):
            continue
        inputs = [each.meta.get("val") for each in node.all_input_nodes]
        if any(isinstance(each, Tensor) and each.device.type != "cpu" for each in inputs):
            node.meta[STRIDES] = fx.map_arg((node.args, node.kwargs), meta.value)


def _is_kernel(node: fx.Node) -> bool:
    """Whether a node calls a Triton kernel or an operator of commpass."""
    return node.target in triton_calls() or getattr(node.target, "namespace", "") == "commpass"


def _lower(
    graph: fx.Graph,
    marked: Sequence[fx.Node],
    by_kernel: Mapping[str, int],
    kernels: Kernels,
    bodies: Bodies,
    errors: SiteErrors,
) -> None:
    for node in marked:
        if node.target in operators.IMPLEMENTATIONS:
            with errors.of(node.meta[MARK].site):
                _note_coded(node)
    of_site = nodes_by_site(graph)
    for site, number in by_kernel.items():
        with errors.of(site):
            own = [node for node in of_site.get(site, ()) if caller(node) is None]
            known, buffers = places(own), dict[fx.Node, fx.Node]()
            for region in regions(own, known):  # lazy: earlier regions are calls by then
                outline(region, kernels.of(region, site).name, number, buffers)
            place_buffers(buffers)
    for node in graph.find_nodes(op="call_function", target=PAD):
        if MARK in node.meta and node.meta[MARK].site in by_kernel:
            _fill_beside(node)
    results = FakeResults()
    for node in graph.nodes:
        if node.target in operators.IMPLEMENTATIONS:
            with errors.of(*([node.meta[MARK].site] if MARK in node.meta else [])):
                _inline(node, bodies.of(node), results)


def _fill_beside(node: fx.Node) -> None:
    """Replace a pad of a flat tensor by a concatenation with zeros. On a CPU, Inductor pads value
    by value."""
    given: Any = node.args
    x, widths, *value = given
    made: Tensor = node.meta["val"]
    fixed = len(widths) == 2 and widths[0] == 0 and isinstance(widths[1], int)
    if made.device.type != "cpu" or made.dim() != 1 or not fixed or any(value):
        return
    graph = node.graph
    how: dict[str, Any] = {"dtype": made.dtype, "device": made.device}
    with graph.inserting_before(node):
        zeros = graph.call_function(torch.ops.aten.full.default, ([widths[1]], 0), how)
        both = graph.call_function(torch.ops.aten.cat.default, ([x, zeros],))
    for each in (zeros, both):
        inherit(each, node)
    zeros.meta["val"], both.meta["val"] = made.new_zeros(widths[1]), made
    replace(node, both)


def _note_coded(node: fx.Node) -> None:
    """Record at a codec operator what it encodes or decodes."""
    if node.target is matmul.MATMUL:
        node.meta[CODED] = _coded_by_product(node)
    elif node.target is decode_matmul.DECODE_MATMUL:
        node.meta[CODED] = _coded_by_decode_matmul(node)
    elif node.target in fused.CHAINS:
        node.meta[CODED] = _coded_by_chain(node)
    elif operators.ROLES[node.target] in RATED:
        node.meta[CODED] = _coded(node)
    if node.target is WITH_FEEDBACK:  # it also decodes what is sent, to compute the remainder
        node.meta[CODED] += tuple((spec, "decode", n) for spec, _, n in node.meta[CODED])


def _coded(node: fx.Node) -> tuple[tuple[str, str, int], ...]:
    """Return what an operator encodes or decodes: codec, role, and number of values, padded to
    whole blocks."""
    role = operators.ROLES[node.target]
    if role not in ("encode", "decode"):
        return ()
    coder = operators.lookup(_spec_of(node))
    value = (node.all_input_nodes[0] if role == "encode" else node).meta["val"]
    values = value.numel()
    if value.dim() == 2:
        values = value.shape[0] * coder.padded_numel(value.shape[1])
    return ((coder.spec, role, meta.hint(values) or 0),)


def _spec_of(node: fx.Node) -> str:
    return str(next(arg for arg in node.args if isinstance(arg, str)))


def _coded_by_chain(node: fx.Node) -> tuple[tuple[str, str, int], ...]:
    """Return the same for a fused operator."""
    chain, numel = fused.lookup(str(node.args[1])), meta.hint(node.args[2]) or 0
    taken, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    made, *further = made if isinstance(made, list) else [made]
    found = []
    for step in (chain.decodes, chain.encodes):
        if step is not None:
            rows = taken.shape[0] if isinstance(step, Decode) else made.shape[0]
            role = "decode" if isinstance(step, Decode) else "encode"
            found.append((step.codec.spec, role, rows * step.codec.padded_numel(numel)))
    if chain.width:  # beside the codec's own values it reads residuals, and writes what is stored
        added = sum(isinstance(step, Add) for step in chain.steps)
        moved = made.nbytes * (1 + added) + meta.total_nbytes(further)
        found.append(("norm", "bytes", moved))
    return tuple(found)


def _coded_by_product(node: fx.Node) -> tuple[tuple[str, str, int, int], ...]:
    """Return the same for a matmul that encodes its own result, with its number of operations and
    of bytes, and for its encode."""
    given: Any = node.args[0]
    product = matmul.lookup(str(node.args[1]))
    m, n, k, _ = matmul.operands_of(product, [each.meta["val"] for each in given]).sizes
    spec, moved = product.codec.spec, _moved_nbytes(node)
    return ((spec, "matmul", 2 * m * n * k, moved), (spec, "in matmul", m * n, 0))


def _moved_nbytes(node: fx.Node) -> int:
    """Return the bytes that a node reads and writes."""
    return meta.input_nbytes(node) + meta.total_nbytes(node.meta["val"])


def _coded_by_decode_matmul(node: fx.Node) -> tuple[tuple[Any, ...], ...]:
    """Return the same for a matmul that decodes its left operand, with the values that it decodes
    at least once."""
    given: Any = node.args[0]
    rows, b = decode_matmul.lookup(str(node.args[1])), given[1].meta["val"]
    operations, values = 2 * node.meta["val"].numel() * b.shape[0], given[0].meta["val"].shape[0]
    spec = rows.codec.spec
    product = spec, "decoding matmul", operations, _moved_nbytes(node)
    return (spec, "decode", values * rows.numel), product


@dataclass
class Kernels:
    """The sources of the kernels of regions, with equal regions traced once under ``inline``.
    ``sites`` lists the sites that share a kernel, by its name."""

    decompositions: Decompositions
    inline: Callable[[], AbstractContextManager[None]] = PLAIN
    traced: dict[Any, Source | Generated] = field(default_factory=dict)
    sites: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def of(self, region: Region, site: str) -> Source | Generated:
        key = region.key()
        if key not in self.traced:
            with self.inline():
                self.traced[key] = generated(region) or trace(region, self.decompositions)
        self.sites[self.traced[key].name][site] = None
        return self.traced[key]


@dataclass
class Bodies:
    """The bodies of operators, as graphs. Equal calls are traced once, under ``inline`` if no
    kernel is called.

    Bodies of fixed sizes that call no kernel are kept for later graphs.
    """

    decompositions: Decompositions
    by_kernel: frozenset[str]
    inline: Callable[[], AbstractContextManager[None]] = PLAIN
    traced: dict[Any, fx.Graph] = field(default_factory=dict)

    def of(self, node: fx.Node) -> fx.Graph:
        """Return the graph of an operator. Its inputs are the operator's input nodes."""
        values = [each.meta["val"] for each in node.all_input_nodes]
        layouts = tuple(map(meta.layout, values))
        key = (node.target, _constants(node), layouts, self._call(node) is None)
        if key not in self.traced:
            plain = key[-1] and self.inline is PLAIN and all(map(meta.is_fixed, values))
            made = self._cached_trace(key, node, values) if plain else self._trace(node, values)
            self.traced[key] = made
        return self.traced[key]

    def _cached_trace(self, key: tuple[Any, ...], node: fx.Node, values: Sequence[Any]) -> fx.Graph:
        """Return the cached body of an equal operator of any graph, or trace it."""
        coders = _coders(node)
        key = (*key, self.decompositions, *map(id, coders))
        if (held := _bodies.get(key)) is not None:
            return held[0]
        body = self._trace(node, values)
        for each in body.nodes:
            each.meta = {}  # fake values keep alive the graph that they were traced from
        while len(_bodies) >= MOST_BODIES:
            _bodies.pop(next(iter(_bodies)), None)
        _bodies[key] = body, coders
        return body

    def _call(self, node: fx.Node) -> Any:
        """Return the function that calls an operator's kernels, or None if its site is inline or no
        kernel exists."""
        by_kernel = MARK in node.meta and node.meta[MARK].site in self.by_kernel
        return caller(node) if by_kernel else None

    def _trace(self, node: fx.Node, values: Sequence[Any]) -> fx.Graph:
        function, places = operators.IMPLEMENTATIONS[node.target], list(node.all_input_nodes)
        subject = f"{node.name} ({node.target})"
        if (call := self._call(node)) is not None:

            def called(*inputs: Any) -> Any:
                held = dict(zip(places, inputs, strict=True))
                return call(*(held[each] for each in _operands(node)))

            body = traced(called, values, self.decompositions, subject).graph
            products = (matmul.MATMUL, decode_matmul.DECODE_MATMUL)
            if node.target in (*fused.CHAINS, *products):
                _check_compiles(body, node)
            return body

        def run(*inputs: Any) -> Any:
            held = dict(zip(places, inputs, strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), held.__getitem__)
            return function(*args, **kwargs)

        with self.inline():
            return traced(run, values, self.decompositions, subject).graph


_bodies: dict[tuple[Any, ...], tuple[fx.Graph, Sequence[Any]]] = {}
"""Bodies from earlier graphs. The codecs are stored too, since the keys contain their ids."""
MOST_BODIES = 128


def _coders(node: fx.Node) -> list[Any]:
    """Return the codecs, domains and chains that an operator names."""
    lookups = {
        **dict.fromkeys(fused.CHAINS, fused.lookup),
        matmul.MATMUL: matmul.lookup,
        decode_matmul.DECODE_MATMUL: decode_matmul.lookup,
    }
    lookup = lookups.get(node.target, operators.lookup)
    return [lookup(arg) for arg in node.args if isinstance(arg, str)]


WRITTEN = ("output", "further_", matmul.HELD)
"""How the names of arguments begin that generated kernels write: results, and memory of their
own."""


def _check_compiles(body: fx.Graph, node: fx.Node) -> None:
    """Raise VerifyError if Triton cannot parse a generated kernel.

    torch analyzes which arguments a kernel writes, and on a failure assumes all of them. Here the
    site can still stay uncompressed; inside Inductor the compile would fail.
    """
    for call in body.nodes:
        written = call.kwargs.get("tensors_to_clone", ["output"])
        if any(not name.startswith(WRITTEN) for name in written):
            raise VerifyError(f"{node.name}: Triton does not compile its kernel ({node.args[1]})")


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the input nodes of an operator in order, with repetitions."""
    given: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), given.append)
    return given


def _constants(node: fx.Node) -> str:
    """Return the arguments of a node as text, with its inputs by number."""
    numbers = {each: number for number, each in enumerate(node.all_input_nodes)}
    return str(fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}"))


def _inline(node: fx.Node, body: fx.Graph, known: FakeResults) -> None:
    """Replace an operator by the nodes of its body, of whose fake values equal ones are
    ``known``."""
    made: list[fx.Node] = []

    def describe(copy: fx.Node, _: fx.Node) -> None:
        if CODED in node.meta:
            copy.meta[CODED] = ()
        inherit(copy, node)
        set_value(copy, known)
        made.append(copy)
        if copy.target in triton_calls() and (call := tunable(node)) is not None:
            copy.meta[TUNABLE] = call

    inputs = node.all_input_nodes
    _take_over(node, splice(body, inputs, lambda _: node, describe), inputs)
    if made and CODED in node.meta:
        made[-1].meta[CODED] = node.meta[CODED]
    erase(node)


def _take_over(node: fx.Node, result: Any, inputs: Sequence[fx.Node]) -> None:
    """Replace all uses of the operator's result by the result of its body."""
    pairs = [(node, result)]
    if not isinstance(result, fx.Node):
        pairs = [(item, result[index]) for index, item in items(node)]
    for was, new in pairs:
        was.replace_all_uses_with(new)
        if new not in inputs:  # its views were traced with the old fake value
            new.meta["val"] = was.meta["val"]
        if was is not node:
            erase(was)


# --- tables ---------------------------------------------------------------------------------------


def _share_tables(graph: fx.Graph) -> None:
    """Move nodes that depend on no input, such as a codec's tables, to the top of the graph, once
    for all sites."""
    top = next(node for node in graph.nodes if node.op != "placeholder")
    tables: dict[Any, fx.Node] = {}
    shared: set[fx.Node] = set()
    for node in list(graph.nodes):
        if MARK not in node.meta or node.op != "call_function" or node.target in ALLOCATORS:
            continue  # a buffer that is written to later
        if not all(source in shared for source in node.all_input_nodes):
            continue
        key = (node.target, frozen((node.args, node.kwargs), lambda each: each))
        if key in tables:
            replace(node, tables[key])
            continue
        if node is not top:
            top.prepend(node)
        else:
            top = node.next
        tables[key] = node
        shared.add(node)
