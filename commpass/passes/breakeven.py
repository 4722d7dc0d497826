"""Break-even points of a candidate: the smallest size and the highest bandwidth with a gain, and
their meaning for symbolic sizes."""

from __future__ import annotations

import ast
import dataclasses
import operator
from math import inf

import sympy
import torch

from commpass.codecs import codec
from commpass.collectives import algorithm, has_parameter, with_parameters
from commpass.costmodel import Profile
from commpass.passes.candidates import coded_us, plain_us, stages_us
from commpass.passes.payloads import prices_of
from commpass.plan import Candidate, Site

LEAST, MOST = 1 << 8, 1 << 36
"""Bytes of the smallest and the largest site that is tried."""
CLOSE = 1.02
"""The precision of the break-even size, as a factor."""


def break_even(
    site: Site, spec: str, code: str, profile: Profile, *, chunks: int = 1
) -> float | None:
    """Return the bytes of such a site from which on codec ``code`` by algorithm ``spec`` gains more
    than the model's margin.

    The gain holds at all larger sizes. 0 means always, inf never. None if the site has no single
    size, because its ranks may hold different ones.
    """
    if site.uneven or site.pairwise or site.bytes < 0:
        return None
    chosen, coder = algorithm(site.kind, spec), codec(code)
    if has_parameter(chosen, "chunks"):
        chosen = with_parameters(chosen, chunks=chunks)
    unit = site.group_size * getattr(torch, site.dtype).itemsize

    def gains(nbytes: float) -> bool:
        whole = max(round(nbytes / unit), 1) * unit
        like = dataclasses.replace(site, bytes=whole, shape=(whole // unit * site.group_size,))
        plain = plain_us(like, profile)
        return coded_us(like, chosen, coder, profile) < plain * (1 - profile.margin)

    high = float(MOST)
    if not gains(high):
        return inf
    while high >= LEAST and gains(high / 4):
        high /= 4
    if high < LEAST:
        return 0.0
    low = high / 4
    while high > low * CLOSE:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


SLOWEST = 2.0**-20
"""The smallest share of a link's bandwidth that is tried."""


def break_even_rate(site: Site, candidate: Candidate, profile: Profile) -> float | None:
    """Return the GB/s of the site's link up to which a candidate with stages gains more than the
    model's margin.

    0 means at no rate; the link's own rate means that it gains there. None for messages between two
    ranks, whose candidates have the stages of one end only.
    """
    if site.pairwise:
        return None
    of_site = prices_of(site, profile)

    def gains(share: float) -> bool:
        slower = profile.scaled(of_site.port, share)
        coded = stages_us(candidate.stages, site, slower)
        return coded < plain_us(site, slower) * (1 - profile.margin)

    if not gains(SLOWEST):
        return 0.0
    low = SLOWEST
    while low < 1 and gains(low * 2):
        low *= 2
    high = low * 2
    while low < 1 and high > low * CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gains(middle) else (low, middle)
    return of_site.link.gbytes_per_s * min(low, 1.0)


def explanation(site: Site, nbytes: float) -> str:
    """Return what a break-even size means for a site's symbols: ``16384*s0 > 1300000 bytes, s0 >=
    80``. Return "" if its sizes are fixed."""
    if not site.dynamic or not 0 < nbytes < inf:
        return ""
    sizes = map(_size, site.shape)
    own_bytes = sympy.Mul(getattr(torch, site.dtype).itemsize, *sizes)
    text = f"{own_bytes} > {nbytes:,.0f} bytes"
    free = sorted(own_bytes.free_symbols, key=str)
    if len(free) == 1 and (share := own_bytes.as_independent(free[0])[0]) * free[0] == own_bytes:
        text += f", {free[0]} >= {sympy.ceiling(nbytes / share)}"
    return text


OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _size(size: int | str) -> sympy.Expr:
    """Parse a size of a graph into an expression, without evaluating text.

    Anything except sums, products and quotients of names and numbers becomes one symbol.
    """

    def read(node: ast.expr) -> sympy.Expr:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](read(node.left), read(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return sympy.Integer(node.value)
        return sympy.Symbol(ast.unparse(node), positive=True, integer=True)

    try:
        return read(ast.parse(str(size), mode="eval").body)
    except SyntaxError:
        return sympy.Symbol(str(size), positive=True, integer=True)
