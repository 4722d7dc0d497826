"""The text of kernels that decodes rows of several ranks and adds them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.domain import VALUES
from commpass.lowering.chain import Chain, Leave
from commpass.lowering.gpu import parts
from commpass.lowering.gpu.source import indent
from commpass.lowering.gpu.tile_sizes import ranks_of_group
from commpass.lowering.gpu.wires import (
    Body,
    decode_lines,
    load_lines,
    write_decode_of_held,
    write_function,
    write_load,
)

STRIDE = "tl.cast(input_stride, tl.int64)"
"""The stride of a wire's rows: Triton passes a small one in 32 bits, which a product may exceed."""


def write_sum(codec: BlockCodec, dtype: torch.dtype, body: Body, chain: Chain) -> None:
    """Write lines that set ``x`` to the sum of rows, in rank order. It starts with the first row,
    not with zero, to keep minus zero."""
    add = _write_group(codec, dtype, body, chain)
    ranks, group = chain.ranks, ranks_of_group(chain, body.size)
    whole, left = divmod(ranks, group)
    body.add(f"wire = input + row * {ranks} * input_stride")
    body.add(f"x = {add('None', 'wire', min(ranks, group))}")
    if whole > 1:
        body.add(f"for first in range({group}, {whole * group}, {group}):")
        body.add(f"    x = {add('x', f'(wire + first * {STRIDE})', group)}")
    if whole and left:
        body.add(f"x = {add('x', f'(wire + {whole * group} * {STRIDE})', left)}")


def _write_group(
    codec: BlockCodec, dtype: torch.dtype, body: Body, chain: Chain
) -> Callable[[str, str, int], str]:
    """Write a function that adds rows to ``x``; return a function from ``x``, the wire of the first
    row and their number to a call.

    Values that must be clamped are rare, and clamping costs a third of the time of a rank. There
    are two branches, of which the usual one does not clamp.
    """
    names, _, arguments = load_lines(codec, body)
    load = write_load(codec, body).replace("wire", f"wire + one * {STRIDE}", 1)
    decode = write_decode_of_held(codec, dtype, body, "decoded")
    fused = _write_fused(codec, body, names) if parts.has_exact_products(codec) else ""
    factors = [names.index(name) for name in names if name.startswith(("number", "row"))]
    lines = ["held = ()", "for one in tl.static_range(COUNT):", f"    held += ({load},)"]
    if "CUT" in decode and factors:
        product = " * ".join(f"held[one][{place}]" for place in factors)
        limit = torch.finfo(dtype).max / (2 * codec.grid.largest * codec.transform.sums)
        near = decode.replace("CUT", "False")
        if not fused and (scaled := parts.scaled_bytes(codec, not _rotates_back(chain))):
            near = _write_scaled(body, names, scaled)
            limit = min(limit, parts.MOST_OF_SCALED)
        lines += [
            "far = False",
            "if CHECKS:",
            f"    most = {product.replace('one', '0')}",
            "    for one in tl.static_range(1, COUNT):",
            f"        most = tl.maximum(most, {product})",
            "    most = most_of_all(most)",
            # Whether a maximum ignores NaN differs between GPUs.
            f"    far = (most > {limit!r}) | (most != most)",
            "if far:",
            *indent(
                _add_lines(decode.replace("CUT", "True"), load.replace("one", "rank"), "range")
            ),
            "else:",
            *indent(_add_lines(near, "held[one]", fused=fused)),
        ]
    else:
        lines += _add_lines(decode.replace("CUT", "True"), "held[one]")
    arguments = ["x", "wire", "input_stride", "inside", *arguments[1:]]
    call = write_function(body, "added", arguments, lines, "total")
    return lambda x, wire, count: call.replace("(x, wire", f"({x}, {wire}", 1).replace(
        "COUNT", str(count)
    )


def _rotates_back(chain: Chain) -> bool:
    return any(isinstance(step, Leave) and step.domain != VALUES for step in chain.steps)


def _write_fused(codec: BlockCodec, body: Body, names: list[str]) -> str:
    """Write a function that adds a decoded row to a total without rounding the products, which
    float32 holds exactly: the bits are the same. Return a call."""
    *lines, product = decode_lines(codec, torch.float32, body.size, clamp=False)
    assert product == "x = x * number_0", product
    lines = [f"{', '.join(names)}, = held", *lines]
    result = "tl.fma(x, tl.broadcast_to(number_0, x.shape), total)"
    return write_function(body, "added_one", ["total", "held", "inside"], lines, result)


def _write_scaled(body: Body, names: list[str], scaled: str) -> str:
    """Write a function that decodes a row by one expression of its bytes and its scale, which the
    branch without clamping permits. Return a call."""
    lines = [f"{', '.join(names)}, = held", f"x = {scaled}"]
    return write_function(body, "decoded_near", ["held"], lines, "x")


def _add_lines(
    decode: str, loaded: str, loop: str = "tl.static_range", fused: str = ""
) -> list[str]:
    """Return lines that add rows to ``x``, unless that is None; ``loaded`` is what was loaded of a
    row. Triton requires that a name has the same type in both branches, so loops have others.

    ``fused`` is a call that adds a row to ``total`` instead.
    """
    number = "one" if loop == "tl.static_range" else "rank"
    row = decode.replace("held", loaded)
    first = row.replace(f"{number} *", "0 *").replace(f"[{number}]", "[0]")
    added = fused.replace("held", loaded)
    onto = added.replace("total", "x", 1).replace(f"[{number}]", "[0]") or f"x + {first}"
    return [
        "if x is None:",
        f"    total = {first}",
        "else:",
        f"    total = {onto}",
        f"for {number} in {loop}(1, COUNT):",
        f"    total = {added or f'total + {row}'}",
    ]
