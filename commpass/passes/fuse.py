"""fuse: sequences of codec operators that one kernel can compute -> one operator each.

needs: a rewritten graph.
gives: the same graph, with one operator for what a site computes between two exchanges, if a kernel
can be generated for it. Fused are an encode with the steps before it, a decode with the sum and
encode after it, and a decode with its consumer: additions, norms and the encode of another site.
changes: no computed value. The plan has a reason for each missed fusion.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from commpass import lowering
from commpass.codecs import operators
from commpass.costmodel import Profile
from commpass.lowering import decode_matmul, fused, matmul
from commpass.lowering.chain import further_inputs
from commpass.passes import sample
from commpass.passes.context import PassContext
from commpass.passes.decoded_rows import DecodedProducts, with_products
from commpass.passes.epilogues import with_epilogue
from commpass.passes.failures import site_errors
from commpass.passes.fx import meta
from commpass.passes.fx.aliasing import Writers
from commpass.passes.fx.create import call
from commpass.passes.fx.erase import erase, replace
from commpass.passes.fx.fake_results import FakeResults
from commpass.passes.fx.fakes import can_be_copied, view_of
from commpass.passes.fx.marks import inherit, nodes_by_site
from commpass.passes.fx.ops import aten
from commpass.passes.fx.outputs import outputs_apart
from commpass.passes.fx.parse import graph_modules
from commpass.passes.fx.splice import set_value
from commpass.passes.products import CHANGED, Multiplied, with_matmul
from commpass.passes.runs import Run, runs
from commpass.plan import PlannedSite

ops = operators.ops
APART = (ops.encode_parts.default, ops.decode_parts.default)


@dataclass
class Fusions:
    """What was fused at a site, and what was not, with the reasons."""

    done: list[str] = dataclasses.field(default_factory=list)
    missed: list[str] = dataclasses.field(default_factory=list)

    def with_reason(self, site: PlannedSite) -> PlannedSite:
        """Return the site with its fusions added to the reason."""
        reason = site.reason
        if self.done:
            reason += f"; in one kernel each: {_counted(self.done)}"
        if self.missed:
            reason += f"; not fused: {'; '.join(dict.fromkeys(self.missed))}"
        return dataclasses.replace(site, reason=reason, fused=bool(self.done))


def run(context: PassContext) -> None:
    """Fuse codec operators, and note what matmuls encode that are now fused."""
    given = context.input
    sites = fuse(given.gm, context.plan.sites, given.profile, sample.checked(context))
    context.plan_with(sites=sites)
    context.encoded |= sample.given_to_products(given.gm)


def fuse(
    gm: fx.GraphModule,
    plan: Sequence[PlannedSite],
    profile: Profile,
    read: Collection[str] = (),
) -> tuple[PlannedSite, ...]:
    """Fuse in place and return the plan with what was done. Raises SiteFailure.

    ``read`` names the sites whose values are also written to memory and sampled, because their
    error is checked.
    """
    number = {site.name: number for number, site in enumerate(plan)}
    by_kernel = {site.name: site for site in plan if site.lowering == "kernel"}
    found: dict[str, Fusions] = defaultdict(Fusions)
    known = FakeResults()
    with site_errors() as errors:
        for _, module in graph_modules(gm) if by_kernel else ():
            of_site = nodes_by_site(module.graph)
            own = {name: nodes for name, nodes in of_site.items() if name in by_kernel}
            encodes = _encodes(own)
            kept = {node: number[of] for node, of in encodes.items() if of in read}
            writers = Writers(module.graph)
            with outputs_apart(module.graph) if own else nullcontext():
                for name, nodes in own.items():
                    left = [node for node in nodes if not node._erased]
                    with errors.of(name), _excluding(encodes, nodes), _excluding(kept, nodes):
                        its = found[name]
                        for of in _fuse_site(left, its, profile, encodes, kept, known, writers):
                            found[of].done.append(f"encode, with what follows the decode of {name}")
            if own:
                module.recompile()
    return tuple(
        found[each.name].with_reason(each) if each.name in found else each for each in plan
    )


@contextmanager
def _excluding(values: dict[fx.Node, Any], nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Take the entries of some nodes out of a mapping. (A copy for each site would take a time that
    grows with the square of their number.)"""
    own = {node: values.pop(node) for node in nodes if node in values}
    try:
        yield
    finally:
        values |= own


def _encodes(nodes: Mapping[str, Sequence[fx.Node]]) -> dict[fx.Node, str]:
    """Return the sites of encodes, by node."""
    return {
        node: name
        for name, own in nodes.items()
        for node in own
        if node.target is ops.encode.default
    }


def _fuse_site(
    nodes: Sequence[fx.Node],
    found: Fusions,
    profile: Profile,
    encodes: Mapping[fx.Node, str],
    read: Mapping[fx.Node, int],
    known: FakeResults,
    writers: Writers,
) -> Iterator[str]:
    """Fuse what a site computes. Yield the names of other sites whose encodes its kernels compute.

    ``encodes`` are those of other sites by node. ``read`` are the numbers of those whose values are
    sampled.
    """
    in_parts = [operators.ROLES[node.target] for node in nodes if node.target in APART]
    for run in list(runs(nodes)):
        role = fused.role_of(run.chain)
        if why := _unsupported_reason(run, writers):
            found.missed.append(f"{role}: {why}")
            continue
        if run.chain.decodes is None:
            made, missed = with_matmul(run, profile, writers)
            if made is not None:
                _replace_matmul(run, made, known)
                found.done.append(made.product.role)
                continue
            if missed:
                found.missed.append(f"matmul+encode: {missed}")
        else:
            several, missed = with_products(run, profile, writers)
            if several is not None:
                found.done += [several.rows.role] * len(several.products)
                _replace_products(run, several, known)
                continue
            if missed:
                found.missed.append(f"decode+matmul: {missed}")
        longer, missed = with_epilogue(run, encodes, read)
        if missed:
            found.missed.append(missed)
        reasons = {
            each: _unsupported_reason(each, writers) or _slower_reason(each) for each in longer
        }
        chosen = next((each for each in reversed(longer) if not reasons[each]), run)
        if longer and longer[-1] is not chosen:
            longest = longer[-1]
            found.missed.append(f"{fused.role_of(longest.chain)}: {reasons[longest]}")
        found.done.append(fused.role_of(chosen.chain))
        last = chosen.nodes[-1]
        if of := encodes.get(last):
            yield of
        results = _replace(chosen, known)
        if last in read:
            sample.insert(results[-1:], results[-1].next, read[last])
    found.missed += [f"{role}: its wire travels in parts" for role in in_parts]


def _unsupported_reason(run: Run, writers: Writers) -> str:
    """Return why no kernel can compute a run; "" if one can."""
    ends = run.place, run.nodes[0], run.nodes[-1]
    if writers.change((run.source, *run.others), min(ends), max(ends)):
        return CHANGED
    if not isinstance(run.numel, int) or not meta.is_fixed(run.source.meta["val"]):
        return "its sizes are not fixed"
    if not _side_by_side(run.source):
        return "its values do not lie side by side"
    return lowering.unsupported_reason(run.chain, run.numel, run.source.meta["val"].device)


def _slower_reason(run: Run) -> str:
    return lowering.slower_reason(run.chain, run.source.meta["val"].device)


def _side_by_side(node: fx.Node) -> bool:
    """Whether the values of each row are contiguous in memory, as kernels read them."""
    value = node.meta["val"]
    return bool(value.shape[-1] <= 1 or value.stride(-1) == 1)


def _counted(notes: Sequence[str]) -> str:
    """Return ``a, b (3 times)``."""
    counts = {word: notes.count(word) for word in notes}
    return ", ".join(f"{w} ({n} times)" if n > 1 else w for w, n in counts.items())


# --- replacement ----------------------------------------------------------------------------------


def _replace(run: Run, known: FakeResults) -> list[fx.Node]:
    """Replace a run by one fused operator. Return its results as nodes of the shapes of those that
    they replace, the further ones last."""
    chain, role, place = run.chain, fused.role_of(run.chain), run.place
    widths = [run.numel if each.width is None else each.width for each in further_inputs(chain)]

    def add(role: str, target: Any, *args: Any) -> fx.Node:
        return _insert(place, run.coded, role, known, target, *args)

    def view(node: fx.Node, shape: Sequence[int]) -> fx.Node:
        same = node.meta["val"].shape == torch.Size(shape)
        return node if same else add("layout", aten.view.default, node, list(shape))

    others = [
        add("layout", aten.view.default, other, [-1, width])
        for other, width in zip(run.others, widths, strict=True)
    ]
    args = ([run.source, *others], fused.name_of(chain), run.numel)
    if run.further:
        several = add(role, fused.FUSED_RESULTS, *args)
        made = [add("layout", getitem, several, i) for i in range(1 + len(run.further))]
    else:
        made = [add(role, fused.FUSED, *args)]
    results = list[fx.Node]()
    for node, value in zip((run.nodes[-1], *run.further), made, strict=True):
        results.append(view(value, node.meta["val"].shape))
        _keep_value(results[-1], value, node.meta["val"])
        node.replace_all_uses_with(results[-1])
    for node in sorted(run.nodes, reverse=True):
        erase(node)
    return results


def _keep_value(replaced: fx.Node, result: fx.Node, value: Tensor) -> None:
    """Let a node that views a kernel's result have the value of the node that it replaces.

    By this value ``sample`` finds what a site encodes. The result views it in turn, since both are
    one memory.
    """
    if value.is_contiguous():
        if result is not replaced:
            result.meta["val"] = _viewed(value, result.meta["val"])
        replaced.meta["val"] = value


def _viewed(value: Tensor, like: Tensor) -> Tensor:
    """Return a contiguous value in the shape of another."""
    if can_be_copied(value) and _has_same_form(like, value):
        return view_of(value, like)
    return value.view(like.shape)


def _has_same_form(like: Tensor, value: Tensor) -> bool:
    return can_be_copied(like) and like.is_contiguous() and _form(value) == _form(like)


def _form(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.device, value.numel(), value.storage_offset()


def _replace_matmul(run: Run, product: Multiplied, known: FakeResults) -> None:
    """Replace a matmul, what lies between, and its encode by one operator."""
    args = (list(product.operands), matmul.name_of(product.product))
    last, role = run.nodes[-1], product.product.role
    replace(last, _insert(last, run.coded, role, known, matmul.MATMUL, *args))
    for each in (*reversed(run.nodes[:-1]), *product.nodes):
        erase(each)


def _replace_products(run: Run, several: DecodedProducts, known: FakeResults) -> None:
    """Replace a decode and the matmuls of its values by one operator for each matmul."""
    for product in several.products:
        rows = several.rows_of(product)
        operands = [run.source, *several.operands[product]]
        args = (operands, decode_matmul.name_of(rows))
        node = _insert(product, run.coded, rows.role, known, decode_matmul.DECODE_MATMUL, *args)
        node.meta["val"] = product.meta["val"]
        replace(product, node)
    for each in sorted((*run.nodes, *several.between), reverse=True):
        erase(each)


def _insert(
    place: fx.Node, coded: fx.Node, role: str, known: FakeResults, target: Any, *args: Any
) -> fx.Node:
    with place.graph.inserting_before(place):
        node = call(place.graph, target, args)
    inherit(node, coded, role)
    set_value(node, known)
    return node
