"""verify: checks that the rewritten graph matches its plan.

needs: a rewritten graph and its plan.
gives: nothing. Raises SiteFailure with the error of each site.
changes: nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from commpass.codecs import codec
from commpass.errors import VerifyError
from commpass.lowering.exchange import sent_nbytes
from commpass.passes.context import PassContext
from commpass.passes.failures import site_errors
from commpass.passes.fx import meta
from commpass.passes.fx.marks import MARK, PARTS, is_single_kernel, starts, waits
from commpass.passes.fx.parse import graph_modules, parse, value_of, waited
from commpass.passes.template import algorithm_of
from commpass.plan import PlannedSite

BYTES = torch.uint8


def run(context: PassContext) -> None:
    """Check the graph against its plan."""
    verify(context.gm, context.plan.sites)


def verify(gm: fx.GraphModule, plan: Sequence[PlannedSite]) -> None:
    """Check the order and use of all nodes, metadata and waits of the inserted ones, and dtype and
    bytes on the wire (law 9).

    Raises SiteFailure with a VerifyError for each site.
    """
    sent: Counter[str] = Counter()
    marked: set[str] = set()
    unknown: set[str] = set()
    dtypes = {
        site.name: algorithm_of(site).wire_dtype(codec(site.codec))
        for site in plan
        if site.compressed
    }
    with site_errors() as errors:
        for _, module in graph_modules(gm):
            module.graph.lint()
            for node in module.graph.nodes:
                for position, part in node.meta.get(PARTS, {}).items():
                    with errors.of(part):
                        sent[part] += _sent(node, part, dtypes.get(part, BYTES), position)[0]
                if MARK not in node.meta:
                    continue
                mark = node.meta[MARK].site
                marked.add(mark)
                with errors.of(mark):
                    if "val" not in node.meta:
                        raise VerifyError(f"{mark}: inserted node {node.name} has no fake value")
                    for size in _sent(node, mark, dtypes.get(mark, BYTES)):
                        sent[mark] += max(size, 0)
                        unknown |= {mark} if size < 0 else set()
        for site in plan:
            with errors.of(site.name):
                _check(site, site.name in marked, sent[site.name], site.name in unknown)


def _check(site: PlannedSite, inserted: bool, sent: int, unknown: bool) -> None:
    """Raise VerifyError if a site does not match its plan.

    ``inserted`` says whether it has inserted nodes. ``sent`` is the number of bytes that they send,
    apart from ``unknown`` ones.
    """
    if site.compressed and not inserted:
        raise VerifyError(
            f"{site.name}: planned as {site.codec} by {site.algorithm}, but nothing was"
            " inserted for it"
        )
    if not site.compressed and inserted:
        raise VerifyError(f"{site.name}: planned as uncompressed, but has inserted nodes")
    fixed = site.wire_bytes - site.dynamic_bytes
    if site.compressed and site.wire_bytes >= 0 and sent != fixed:
        raise VerifyError(
            f"{site.name}: the plan says {fixed} bytes on the wire, the graph sends {sent}"
        )
    if unknown and site.wire_bytes >= 0 and not codec(site.codec).dynamic:
        raise VerifyError(
            f"{site.name}: the plan says {fixed} bytes on the wire, but the graph sends what"
            " depends on the values"
        )


def _sent(node: fx.Node, mark: str, dtype: torch.dtype, position: int | None = None) -> list[int]:
    """Return the bytes that an inserted node, or one position of a batch, hands to the process
    group.

    -1 stands for value-dependent sizes. For a single kernel, they are what it writes for the other
    ranks. A node that sends nothing gives an empty list.
    """
    call = parse(node)
    if call is None:
        if starts(node) and [*map(waits, node.users)] != [True]:
            raise VerifyError(f"{mark}: {node.name} has not exactly one wait, and no other use")
        return [sent_nbytes(node)] if is_single_kernel(node) else []
    value = value_of(call, position or 0)
    if value is None or not waited(value)[0]:
        raise VerifyError(f"{mark}: nobody waits for inserted collective {node.name}")
    sizes = []
    for source in call.inputs if position is None else (call.inputs[position],):
        fake = meta.tensor(source)
        if fake is None or fake.dtype != dtype:
            sent = fake.dtype if fake is not None else "an unknown dtype"
            planned = "bytes" if dtype == BYTES else dtype
            raise VerifyError(f"{mark}: {node.name} sends {sent}, not {planned}")
        sizes.append(meta.nbytes(fake))
    return sizes
