"""sample: an operator that reads a compressed site's input on some calls.

needs: a graph without codec operators, its sites and their plan.
gives: the same graph with one ``commpass::sample_`` for each site whose real error can be measured,
and for the other compressed sites the reason why it cannot.
changes: no computed value. Sampling reads only tensors that are in memory anyway. If a site's
budget is checked, its values are written to memory even if they were not before. A matmul that is
fused with its encode is computed again on sampled calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from commpass.codecs import codec
from commpass.lowering import matmul
from commpass.passes.context import PassContext
from commpass.passes.fx.aliasing import is_view
from commpass.passes.fx.fakes import mode_of
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.ops import EMPTY, PLAIN, is_matmul
from commpass.passes.fx.parse import graph_modules
from commpass.passes.results import EncodedValue
from commpass.plan import SINGLE_KERNEL, PlannedSite
from commpass.plan.kinds import KINDS
from commpass.utils.ambient import ambient_free
from commpass.utils.running import innermost

LOSSLESS = "its codec loses nothing"
STATE = "its codec keeps {}: what one step leaves out, later ones send"
RECEIVED = "this rank only receives here"
INSIDE = "its values are made inside of the kernel that encodes them"
UNSEEN = "error_sample_rate is 0, and its budget is not checked"


def run(context: PassContext) -> None:
    """Insert the operator if the policy samples errors, or a budget has to be checked."""
    watched, due = bool(context.input.policy.error_sample_rate), checked(context)
    if watched or due:
        what = (context.gm, context.plan.sites, context.encoded, due)
        context.sampled = sample(*what, other_ranks=watched)


def checked(context: PassContext) -> frozenset[str]:
    """Return the names of lossy sites whose error budgets are checked on real values."""
    if not context.input.policy.check_calls:
        return frozenset()
    bounded = {each.site.name for each in context.found if each.allowed.max_error is not None}
    sites = (site for site in context.plan.compressed if site.name in bounded)
    return frozenset(site.name for site in sites if not unsupported_reason(site))


def given_to_products(gm: fx.GraphModule) -> dict[str, EncodedValue]:
    """Return what sites with a self-encoding matmul encode, by site name."""
    return {
        node.meta[MARK].site: EncodedValue(
            tuple(each.meta["val"] for each in _operands(node)),
            str(node.args[1]),
        )
        for _, module in graph_modules(gm)
        for node in module.graph.find_nodes(op="call_function", target=matmul.MATMUL)
    }


def _operands(node: fx.Node) -> list[fx.Node]:
    given: Any = node.args[0]
    return list(given)


def sample(
    gm: fx.GraphModule,
    plan: Sequence[PlannedSite],
    encoded: Mapping[str, EncodedValue],
    due: Collection[str] = (),
    *,
    other_ranks: bool = True,
) -> dict[str, str]:
    """Insert the operator before the encode of each site that can be sampled.

    ``encoded`` is what the sites encode, and ``due`` names those whose budgets are checked.
    ``other_ranks`` says whether the other sites are sampled too. Return for each compressed site,
    by name, why it is not sampled; "" if it is.
    """
    every = [node for _, module in graph_modules(gm) for node in module.graph.nodes]
    nodes = {
        id(node.meta["val"]): node for node in every if isinstance(node.meta.get("val"), Tensor)
    }
    done = {node.args[2] for node in every if node.target is SAMPLE}
    why: dict[str, str] = {}
    for number, site in enumerate(plan):
        if number in done:
            why[site.name] = ""
            continue
        if not site.compressed:
            continue
        why[site.name] = unsupported_reason(site)
        check = site.name in due
        if not why[site.name] and not (check or other_ranks):
            why[site.name] = UNSEEN
        if not why[site.name]:
            its = encoded.get(site.name, EncodedValue(()))
            taken = [nodes.get(id(value)) for value in its.values]
            takes = _senders(taken[0], site.name) if taken and taken[0] is not None else []
            seen = check or (not its.product and _is_seen(taken, site))
            if not takes or None in taken or not seen:
                why[site.name] = INSIDE
            else:
                _insert(its, nodes, min(takes), number)
    for _, module in graph_modules(gm):
        module.recompile()
    return why


def _is_seen(inputs: Sequence[fx.Node | None], site: PlannedSite) -> bool:
    """Whether a site's encode input is in memory in any case."""
    (x,) = inputs
    return x is not None and (site.lowering in ("kernel", SINGLE_KERNEL) or _is_stored(x))


def unsupported_reason(site: PlannedSite) -> str:
    """Return why a site has no error to measure; "" if it has one."""
    coder = codec(site.codec)
    if coder.lossless:
        return LOSSLESS
    if coder.state is not None:
        return STATE.format(coder.state)
    return RECEIVED if KINDS[site.kind].receives else ""


def _senders(x: fx.Node, site: str) -> list[fx.Node]:
    """Return the nodes of a site that read a value, or the value that it is a view of."""
    own = [user for user in x.users if MARK in user.meta and user.meta[MARK].site == site]
    return own or (_senders(x.all_input_nodes[0], site) if is_view(x) else [])


def _is_stored(x: fx.Node) -> bool:
    """Whether Inductor writes a value to memory regardless of its users: an input, or the result of
    an external call.

    Any other value may be fused into the kernel that uses it.
    """
    while is_view(x):
        x = x.all_input_nodes[0]
    called = getattr(x.target, "namespace", "aten") not in PLAIN
    return x.op == "placeholder" or called or is_matmul(x)


def _insert(its: EncodedValue, nodes: Mapping[int, fx.Node], before: fx.Node, number: int) -> None:
    """Insert the operator before the first read of the site's input, since later writes to it are
    not sent."""
    insert([nodes[id(value)] for value in its.values], before, number, its.product)


def insert(values: Sequence[Any], before: fx.Node, number: int, product: str = "") -> None:
    """Insert the operator for a site before a node. ``values`` are what is encoded, or the inputs
    of the ``product`` that is."""
    first = values[0].meta["val"]
    graph = before.graph
    with graph.inserting_before(before), mode_of(graph):
        # An operator without results or side effects would be eliminated.
        into = graph.call_function(EMPTY, ([1],), {"device": first.device})
        into.meta["val"] = first.new_empty([1], dtype=torch.float32)
        if product:
            args = (list(values), into, number, product)
            graph.call_function(torch.ops.commpass.sample_product_.default, args)
        else:
            graph.call_function(SAMPLE, (*values, into, number))


def _looking(x: Tensor) -> Any:
    """Return the sampler of this call, if any. Sampling is impossible while a CUDA graph is
    captured."""
    look = innermost().sample
    return None if x.is_cuda and torch.cuda.is_current_stream_capturing() else look


def _sample(x: Tensor, into: Tensor, site: int) -> None:
    """Pass a site's input to the sampler of this call."""
    if (look := _looking(x)) is not None:
        look(site, x)


def _sample_product(operands: Sequence[Tensor], into: Tensor, site: int, product: str) -> None:
    """Pass the result of a self-encoding matmul to the sampler of this call."""
    if (look := _looking(operands[0])) is not None:
        look(site, matmul.values(operands, matmul.lookup(product)))


def _no_op(*_: object) -> None: ...


_library = torch.library.Library("commpass", "FRAGMENT")
_library.define("sample_(Tensor x, Tensor(a!) into, int site) -> ()")
_library.impl("sample_", ambient_free(_sample), "CompositeExplicitAutograd")
_library.define("sample_product_(Tensor[] operands, Tensor(a!) into, int site, str product) -> ()")
_library.impl("sample_product_", ambient_free(_sample_product), "CompositeExplicitAutograd")
for _name in ("sample_", "sample_product_"):
    torch.library.register_fake(f"commpass::{_name}", _no_op, lib=_library)
SAMPLE = torch.ops.commpass.sample_.default
