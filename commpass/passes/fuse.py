"""fuse: sequences of codec operators that one kernel can compute -> one operator each.

needs: a rewritten graph.
gives: the same graph, with one operator for what a site computes between two exchanges, if a kernel
can be generated for it. Fused are an encode with the steps before it, a decode with the sum and
encode after it, and a decode with its consumer.
changes: no computed value. The plan has a reason for each missed fusion.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from commpass import lowering
from commpass.codecs import Codec, operators
from commpass.codecs.block.codec import BlockCodec
from commpass.costmodel import Profile
from commpass.lowering import fused, matmul
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Step,
    Sum,
)
from commpass.passes.context import PassContext
from commpass.passes.failures import site_errors
from commpass.passes.fx import meta
from commpass.passes.fx.erase import erase
from commpass.passes.fx.fakes import is_view, mode_of
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.parse import graph_modules
from commpass.passes.sample import given_to_products
from commpass.plan import PlannedSite

ops = operators.ops
CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)
ADD = torch.ops.aten.add.Tensor
RELU = torch.ops.aten.relu.default
ADDMM = torch.ops.aten.addmm.default
MATMULS = (torch.ops.aten.mm.default, ADDMM)
APART = (ops.encode_parts.default, ops.decode_parts.default)


@dataclass(frozen=True)
class Run:
    """A sequence of nodes, each used only by the next one, and their steps. ``others`` are
    additional inputs of later steps."""

    nodes: tuple[fx.Node, ...]
    steps: tuple[Step, ...]
    others: tuple[fx.Node, ...] = ()

    @property
    def source(self) -> fx.Node:
        """The input of the first node."""
        return self.nodes[0].all_input_nodes[0]

    @property
    def chain(self) -> Chain:
        return Chain(self.source.meta["val"].dtype, self.steps)

    @property
    def numel(self) -> Any:
        """The number of values in a row."""
        coded = next(n for n in self.nodes if n.target in operators.IMPLEMENTATIONS)
        return _numel(coded)


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
    context.plan_with(sites=fuse(given.gm, context.plan.sites, given.profile))
    context.encoded |= given_to_products(given.gm)


def fuse(
    gm: fx.GraphModule, plan: Sequence[PlannedSite], profile: Profile
) -> tuple[PlannedSite, ...]:
    """Fuse in place and return the plan with what was done. Raises SiteFailure."""
    by_kernel = {site.name: site for site in plan if site.lowering == "kernel"}
    found: dict[str, Fusions] = defaultdict(Fusions)
    with site_errors() as errors:
        for _, module in graph_modules(gm) if by_kernel else ():
            own: dict[str, list[fx.Node]] = defaultdict(list)
            for node in module.graph.nodes:
                if MARK in node.meta and node.meta[MARK].site in by_kernel:
                    own[node.meta[MARK].site].append(node)
            for name, nodes in own.items():
                with errors.of(name):
                    _fuse_site(nodes, found[name], profile)
            if own:
                module.recompile()
    return tuple(
        found[each.name].with_reason(each) if each.name in found else each for each in plan
    )


def _fuse_site(nodes: Sequence[fx.Node], found: Fusions, profile: Profile) -> None:
    in_parts = [operators.ROLES[node.target] for node in nodes if node.target in APART]
    for run in list(runs(nodes)):
        role, device = fused.role_of(run.chain), run.source.meta["val"].device
        if why := _unsupported_reason(run):
            found.missed.append(f"{role}: {why}")
            continue
        if run.chain.decodes is None:
            made, missed = with_matmul(run, profile)
            if made is not None:
                _replace_matmul(run, made)
                found.done.append("matmul+encode")
                continue
            if missed:
                found.missed.append(f"matmul+encode: {missed}")
        longer, missed = with_consumer(run)
        fits = not lowering.unsupported_reason(longer.chain, longer.numel, device)
        chosen = longer if fits else run
        if missed:
            found.missed.append(missed)
        found.done.append(fused.role_of(chosen.chain))
        _replace(chosen)
    found.missed += [f"{role}: its wire travels in parts" for role in in_parts]


def _unsupported_reason(run: Run) -> str:
    """Return why no kernel can compute a run; "" if one can."""
    if not isinstance(run.numel, int) or not _is_fixed(run.source):
        return "its sizes are not fixed"
    if not _side_by_side(run.source):
        return "its values do not lie side by side"
    return lowering.unsupported_reason(run.chain, run.numel, run.source.meta["val"].device)


def _side_by_side(node: fx.Node) -> bool:
    """Whether the values of each row are contiguous in memory, as kernels read them."""
    value = node.meta["val"]
    return bool(value.shape[-1] <= 1 or value.stride(-1) == 1)


# --- search ---------------------------------------------------------------------------------------


def runs(nodes: Sequence[fx.Node]) -> Iterator[Run]:
    """Yield the maximal runs of a site's nodes, in graph order.

    A run starts at a decode, or ends at an encode that is in no such run.
    """
    own, used = set(nodes), set[fx.Node]()
    for node in nodes:
        if node in used or node.target not in (ops.decode.default, ops.encode.default):
            continue
        starts = node.target is ops.decode.default
        run = _following(node, own) if starts else _back(node, own)
        used.update(run.nodes)
        yield run


def _following(node: fx.Node, members: set[fx.Node]) -> Run:
    nodes, steps = [node], [_step(node)]
    while (following := _only_user(nodes[-1])) in members:
        assert following is not None
        step = _step(following)
        if step is None or isinstance(step, Decode):
            break
        nodes.append(following)
        steps.append(step)
        if isinstance(step, Encode):
            break
    return Run(tuple(nodes), tuple(step for step in steps if step is not None))


def _back(node: fx.Node, members: set[fx.Node]) -> Run:
    nodes, steps = [node], [_step(node)]
    while (before := nodes[0].all_input_nodes[0]) in members and len(before.users) == 1:
        step = _step(before)
        if not isinstance(step, (Cast, Enter, Divide)):
            break
        nodes.insert(0, before)
        steps.insert(0, step)
    return Run(tuple(nodes), tuple(step for step in steps if step is not None))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _step(node: fx.Node) -> Step | None:
    """Return a node as a step of a chain, or None."""
    if node.target is ops.decode.default:
        return Decode(operators.named(str(node.args[1])), node.args[3])  # type: ignore[arg-type]
    if node.target is ops.encode.default:
        salt: Any = node.args[2] if len(node.args) > 2 else ()
        return Encode(operators.named(str(node.args[1])).salted(*salt))
    if node.target is ops.sum_rows.default:
        rows = node.all_input_nodes[0].meta["val"].shape[0]
        return Sum(rows) if isinstance(rows, int) else None
    if node.target is ops.enter.default:
        return Enter(operators.named(str(node.args[1])))
    if node.target is ops.leave.default:
        return Leave(operators.named(str(node.args[1])))
    if node.target in DIVISIONS and isinstance(node.args[1], (int, float)):
        return Divide(float(node.args[1]))
    if node.target in CASTS and _only_casts(node):
        return Cast(node.meta["val"].dtype)
    return None


def _only_casts(node: fx.Node) -> bool:
    """Whether a copy changes only the dtype."""
    said = {key for key, value in node.kwargs.items() if value is not None}
    return said <= {"dtype"} and node.meta["val"].is_floating_point()


def with_consumer(run: Run) -> tuple[Run, str]:
    """Return a run extended by the addition that uses its values, or the run itself and why not."""
    last = run.nodes[-1]
    if last.target is ops.encode.default:
        return run, ""
    nodes = list(run.nodes)
    while (user := _only_user(nodes[-1])) is not None and _is_reshape(user):
        nodes.append(user)
    user = _only_user(nodes[-1])
    if user is None:
        return run, "decode with the addition after it: others take its values too" if len(
            nodes[-1].users
        ) > 1 else ""
    if user.target is not ADD:
        return run, ""
    other = next((arg for arg in user.args[:2] if arg is not nodes[-1]), None)
    if not isinstance(other, fx.Node) or user.kwargs.get("alpha", 1) != 1:
        return run, "decode with the addition after it: of a number"
    mine, its = nodes[-1].meta["val"], other.meta["val"]
    same = (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)
    if not same or not its.is_contiguous():
        return run, "decode with the addition after it: of another shape, dtype or layout"
    return Run((*nodes, user), (*run.steps, Add(mine.dtype)), (other,)), ""


@dataclass(frozen=True)
class Multiplied:
    """A matmul ``a @ b`` with an optional bias whose result only a run encodes, and the nodes in
    between."""

    a: fx.Node
    b: fx.Node
    bias: fx.Node | None
    nodes: tuple[fx.Node, ...]
    product: matmul.Product


def with_matmul(run: Run, profile: Profile) -> tuple[Multiplied | None, str]:
    """Return the matmul whose result a run encodes, if one kernel should compute both.

    Otherwise return None and the reason, or "" if there is no matmul.
    """
    nodes, activation, node = list[fx.Node](), "", run.source
    while node.target in (RELU, *MATMULS) or _is_reshape(node):
        nodes.append(node)
        if node.target in MATMULS:
            break
        activation = "relu" if node.target is RELU else activation
        node = node.all_input_nodes[0]
    if node.target not in MATMULS:
        return None, ""
    if any(len(each.users) > 1 for each in nodes):
        return None, "others take the matmul's result too"
    given: list[Any] = list(node.args)
    bias, a, b = given if node.target is ADDMM else (None, *given)
    if bias is not None:
        if {node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)} != {1}:
            return None, "its terms are scaled"
        if not _is_row(bias, b):
            return None, "its bias is no row"
    coder = _whole_codec(run.steps)
    if coder is None:
        return None, "something else happens to the values before they are encoded"
    product = matmul.Product(coder, run.source.meta["val"].shape[0], activation)
    made = Multiplied(a, b, bias, tuple(nodes), product)
    values: list[Any] = [e.meta["val"] if e is not None else None for e in (a, b, bias)]
    if not all(_is_fixed(each) for each in (a, b, node)):
        return None, "its sizes are not fixed"
    why = lowering.product_obstacle(values[0], values[1], values[2], product)
    return (None, why) if why else _if_quicker(made, profile)


def _is_row(bias: fx.Node, b: fx.Node) -> bool:
    """Whether a bias is one contiguous row with a value per column of ``b``. The kernel reads it
    so, without broadcasting."""
    value, columns = bias.meta["val"], b.meta["val"].shape[1]
    return bool(value.dim() == 1 and value.shape[0] == columns and value.is_contiguous())


def _if_quicker(product: Multiplied, profile: Profile) -> tuple[Multiplied | None, str]:
    """Return the fused matmul if it is faster, else None and the times. The fusion slows the matmul
    slightly and saves one kernel."""
    a, b = product.a.meta["val"], product.b.meta["val"]
    values = a.shape[0] * b.shape[1]
    nbytes = (a.numel() + b.numel() + values) * a.itemsize
    alone = profile.kernels.compute_us(2 * values * a.shape[1], nbytes)
    encode = profile.kernels.us(product.product.codec.spec, "encode", values)
    fused_us = alone * profile.kernels.matmul_encode
    if fused_us >= alone + encode:
        return None, (
            f"matmul and encode apart take {alone + encode:,.0f} us, together {fused_us:,.0f} us"
        )
    return product, ""


def _whole_codec(steps: Sequence[Step]) -> Codec | None:
    """Return the codec of an encode and the steps before it, with its transform included, or
    None."""
    *before, last = steps
    assert isinstance(last, Encode)
    domain = None
    for step in before:
        if isinstance(step, Enter):
            domain = step.domain
        elif not (isinstance(step, Cast) and step.dtype == torch.float32):
            return None
    if domain is None:
        return last.codec
    assert isinstance(last.codec, BlockCodec)
    return dataclasses.replace(last.codec, transform=domain.transform)


def _is_reshape(node: fx.Node) -> bool:
    """Whether a node reshapes another without changing the order of its values."""
    if not is_view(node) or not _is_fixed(node):
        return False
    own, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return bool(own.is_contiguous() and source.is_contiguous() and own.numel() == source.numel())


def _is_fixed(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(
        isinstance(number, int) for number in (*value.shape, *value.stride())
    )


def _numel(node: fx.Node) -> Any:
    """Return the number of values in a row of a codec operator's input or output."""
    if node.target is ops.decode.default:
        return node.args[2]
    return node.all_input_nodes[0].meta["val"].shape[1]


def _counted(notes: Sequence[str]) -> str:
    """Return ``a, b (3 times)``."""
    counts = {word: notes.count(word) for word in notes}
    return ", ".join(f"{w} ({n} times)" if n > 1 else w for w, n in counts.items())


# --- replacement ----------------------------------------------------------------------------------


def _replace(run: Run) -> None:
    """Replace a run by one fused operator."""
    last, graph = run.nodes[-1], run.nodes[-1].graph
    inside = set(run.nodes)
    coded = next(n for n in run.nodes if n.target in operators.IMPLEMENTATIONS)
    chain, value = run.chain, last.meta["val"]
    with mode_of(graph), graph.inserting_before(last):
        others = [_as_rows(other, run.numel, coded) for other in run.others]
        args = ([run.source, *others], fused.name_of(chain), run.numel)
        made = graph.call_function(fused.FUSED, args)
        taken = [node.meta["val"] for node in (run.source, *others)]
        made.meta = _meta(coded, fused.FUSED(taken, *args[1:]), fused.role_of(chain))
        result = made
        if made.meta["val"].shape != value.shape:
            result = graph.call_function(torch.ops.aten.view.default, (made, list(value.shape)))
            view = torch.ops.aten.view.default(made.meta["val"], list(value.shape))
            result.meta = _meta(coded, view, "layout")
    last.replace_all_uses_with(result)
    for node in reversed(run.nodes):
        if node in inside:
            erase(node)


def _replace_matmul(run: Run, product: Multiplied) -> None:
    """Replace a matmul and its encode by one operator."""
    last, graph = run.nodes[-1], run.nodes[-1].graph
    coded = next(n for n in run.nodes if n.target in operators.IMPLEMENTATIONS)
    given = [product.a, product.b, product.bias]
    values = [each.meta["val"] if each is not None else None for each in given]
    name = matmul.name_of(product.product)
    with mode_of(graph), graph.inserting_before(last):
        node = graph.call_function(matmul.MATMUL, (*given, name))
        node.meta = _meta(coded, matmul.MATMUL(*values, name), "matmul+encode")
    last.replace_all_uses_with(node)
    for each in (*reversed(run.nodes), *product.nodes):
        erase(each)


def _as_rows(node: fx.Node, numel: int, coded: fx.Node) -> fx.Node:
    value = node.meta["val"]
    view = node.graph.call_function(torch.ops.aten.view.default, (node, [-1, numel]))
    view.meta = _meta(coded, torch.ops.aten.view.default(value, [-1, numel]), "layout")
    return view


def _meta(coded: fx.Node, value: Any, role: str) -> dict[str, Any]:
    held: dict[str, Any] = {
        MARK: dataclasses.replace(coded.meta[MARK], role=role),
        "val": value,
    }
    return held | {key: coded.meta[key] for key in meta.CARRIED if key in coded.meta}
