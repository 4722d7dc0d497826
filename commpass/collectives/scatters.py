"""Reduce-scatters: sum rows ``[ranks, n]`` of every rank, of which each rank gets its own row, by
encoded hops.

n is a multiple of the codecs' blocks. Sums are computed in float32 (float64 for float64), in the
domain of the codec. Each function returns the sum ``[1, n]`` and its domain.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from commpass.codecs import VALUES, Codec, Domain, accumulation_dtype, operators
from commpass.codecs.operators import sum_rows
from commpass.collectives.request import Request, pass_on, scatter
from commpass.collectives.steps import Coding, hop

Summed = Generator[Tensor, Tensor, tuple[Tensor, Domain]]


def convert(rows: Tensor, source: Domain, target: Domain) -> Tensor:
    """Convert rows from one domain to another; values enter a domain in the accumulation dtype."""
    if source == target:
        return rows
    rows = operators.from_domain(source, rows)
    if target == VALUES:
        return rows
    return operators.to_domain(target, rows.to(accumulation_dtype(rows.dtype)))


def direct(rows: Tensor, request: Request, coding: Coding) -> Summed:
    """Send row r to rank r in one all-to-all and sum there in rank order (TACO, section 3; ZipCCL,
    section 4)."""
    domain, coding = coding.codec.domain, coding.in_domain()
    arrived = yield from hop(convert(rows, VALUES, domain), coding, scatter(request))
    return sum_rows(_wide(arrived)), domain


def ring(rows: Tensor, request: Request, coding: Coding) -> Summed:
    """ranks - 1 hops: a partial sum goes around the ring; each rank decodes it, adds its row and
    encodes it again (EQuARX, figure 7)."""
    domain, coding = coding.codec.domain, coding.in_domain()
    ranks, rank = request.ranks, request.rank
    rows = convert(rows, VALUES, domain)
    move = pass_on(request, [(rank + 1) % ranks], [(rank - 1) % ranks])
    partial = _row(rows, rank - 1)
    for step in range(ranks - 1):
        arrived = yield from hop(partial, coding.nth(step).of_sum(step + 1, ranks), move)
        partial = _wide(arrived) + _row(rows, rank - 2 - step)
    return partial, domain


def semi_ring(rows: Tensor, request: Request, coding: Coding) -> Summed:
    """Partial sums arrive from both sides, each over half of the ranks: half the hops, and half as
    many errors (EQuARX, figure 7)."""
    domain, coding = coding.codec.domain, coding.in_domain()
    ranks, rank = request.ranks, request.rank
    rows = convert(rows, VALUES, domain)
    up, down = ranks // 2, (ranks - 1) // 2
    above, below = (rank + 1) % ranks, (rank - 1) % ranks
    rising, falling, total = _row(rows, rank + up), _row(rows, rank - down), _row(rows, rank)
    for step in range(up):
        both = step < down
        going = [(above, rising), (below, falling)] if both else [(above, rising)]
        going.sort(key=lambda pair: pair[0])
        coming = sorted([below, above] if both else [below])
        move = pass_on(request, [to for to, _ in going], coming)
        sent = torch.cat([row for _, row in going])
        arrived = _wide((yield from hop(sent, coding.nth(step).of_sum(step + 1, ranks), move)))
        rising = _row(arrived, coming.index(below))
        if step + 1 == up:
            total = total + rising
        else:
            rising = rising + _row(rows, rank + up - 1 - step)
        if both:
            falling = _row(arrived, coming.index(above))
            if step + 1 == down:
                total = total + falling
            else:
                falling = falling + _row(rows, rank - down + 1 + step)
    return total, domain


def hierarchical(
    rows: Tensor, request: Request, coding: Coding, *, node: int, between: Codec
) -> Summed:
    """Reduce among the ``node`` ranks of each node, then among ranks of the same place in their
    nodes, by another codec.

    Ranks of a node are consecutive. If both codecs have the same domain, values stay in it between
    the hops (SDP4Bit).
    """
    inner, outer = coding.codec.domain, between.domain
    nodes, length = request.ranks // node, rows.shape[1]
    home, place = divmod(request.rank, node)
    node_ranks = range(home * node, (home + 1) * node)
    place_ranks = range(place, request.ranks, node)
    # Row p holds the parts that the ranks of place p will own, node by node.
    rows = rows.reshape(nodes, node, length).transpose(0, 1).reshape(node, nodes * length)
    first = coding.in_domain().of_sum(1, request.ranks)
    move = pass_on(request, node_ranks, node_ranks)
    arrived = yield from hop(convert(rows, VALUES, inner), first, move)
    summed = convert(sum_rows(_wide(arrived)).reshape(nodes, length), inner, outer)
    coding = coding.by(between).in_domain().nth(1).of_sum(node, request.ranks)
    arrived = yield from hop(summed, coding, pass_on(request, place_ranks, place_ranks))
    return sum_rows(_wide(arrived)), outer


def _row(rows: Tensor, index: int) -> Tensor:
    return rows.narrow(0, index % rows.shape[0], 1)


def _wide(rows: Tensor) -> Tensor:
    return rows.to(accumulation_dtype(rows.dtype))


def ring_encodes(ranks: int) -> float:
    """The number of encodes: a partial sum of k of the ranks has k shares of the variance, and is
    encoded with k = 1, 2, ..., ranks - 1."""
    return (ranks - 1) / 2


def semi_ring_encodes(ranks: int) -> float:
    up, down = ranks // 2, (ranks - 1) // 2
    return (up * (up + 1) + down * (down + 1)) / (2 * ranks)
