"""sample: an operator that looks at what a compressed site is given, on some calls.

needs: a graph without coded operators, its sites and their plan.
gives: the same graph with one ``commpass::sample_`` for each site whose real error can be measured;
of every other compressed site, why not.
changes: nothing that is computed: only tensors that are there anyway are looked at. Inductor goes
on to fuse whatever it fused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from commpass.ambient import ambient_free
from commpass.codecs import codec
from commpass.passes.graph.costs import is_matmul
from commpass.passes.graph.fakes import is_view
from commpass.passes.graph.marks import MARK
from commpass.passes.graph.parse import graph_modules
from commpass.plan import PlannedSite
from commpass.running import now

LOSSLESS = "its codec loses nothing"
STATE = "its codec keeps {}: what one step leaves out, later ones send"
RECEIVED = "this rank only receives here"
INSIDE = "its values are made inside of the kernel that encodes them"
EMPTY = torch.ops.aten.empty.memory_format


def sample(
    gm: fx.GraphModule, plan: Sequence[PlannedSite], given: Mapping[str, Tensor]
) -> dict[str, str]:
    """Puts the operator in front of what encodes, for each site where that can be done. ``given``
    are the fake values of what the sites take, by name. Returns, by the name of each compressed
    site, "" for these and for the others why not."""
    nodes = {
        id(node.meta["val"]): node
        for _, module in graph_modules(gm)
        for node in module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    }
    why: dict[str, str] = {}
    for number, site in enumerate(plan):
        if not site.compressed:
            continue
        why[site.name] = _obstacle(site)
        if not why[site.name]:
            x = nodes.get(id(given.get(site.name)))
            takes = _takes(x, site.name) if x is not None else []
            if x is None or not takes or not (site.lowering == "kernel" or _is_stored(x)):
                why[site.name] = INSIDE
            else:
                _insert(x, min(takes), number)
    for _, module in graph_modules(gm):
        module.recompile()
    return why


def _obstacle(site: PlannedSite) -> str:
    """Why there is nothing to measure at a site; "" where there is."""
    coder = codec(site.codec)
    if coder.lossless:
        return LOSSLESS
    if coder.state is not None:
        return STATE.format(coder.state)
    return RECEIVED if site.kind == "recv" else ""


def _takes(x: fx.Node, site: str) -> list[fx.Node]:
    """What takes a value, or that of which it is a view, to send it for a site."""
    own = [user for user in x.users if MARK in user.meta and user.meta[MARK].site == site]
    return own or (_takes(x.all_input_nodes[0], site) if is_view(x) else [])


def _is_stored(x: fx.Node) -> bool:
    """Whether Inductor writes a value to memory, whoever takes it: an input, or what a call of its
    own gives. All else may become part of the kernel that takes it."""
    while is_view(x):
        x = x.all_input_nodes[0]
    called = getattr(x.target, "namespace", "aten") not in ("aten", "prims")
    return x.op == "placeholder" or called or is_matmul(x)


def _insert(x: fx.Node, before: fx.Node, number: int) -> None:
    """Looks at ``x`` where its site first takes it: what is written there later is not sent."""
    held = x.meta["val"]
    with x.graph.inserting_before(before):
        # An operator that gives and changes nothing would be dropped.
        into = x.graph.call_function(EMPTY, ([1],), {"device": held.device})
        into.meta["val"] = held.new_empty([1], dtype=torch.float32)
        x.graph.call_function(torch.ops.commpass.sample_.default, (x, into, number))


def _sample(x: Tensor, into: Tensor, site: int) -> None:
    """Hands what a site is given to who samples this call, if anybody does."""
    look = now().sample
    if look is not None and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        look(site, x)


def _nothing(*_: object) -> None: ...


_library = torch.library.Library("commpass", "FRAGMENT")
_library.define("sample_(Tensor x, Tensor(a!) into, int site) -> ()")
_library.impl("sample_", ambient_free(_sample), "CompositeExplicitAutograd")
torch.library.register_fake("commpass::sample_", _nothing, lib=_library)
