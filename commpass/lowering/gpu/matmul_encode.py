"""A matmul whose result is encoded in its epilogue.

Codes and scales are written directly to the wire of a two-shot all_reduce or a reduce_scatter, and
the values are never stored in memory. The kernel is persistent: as many programs as the GPU runs at
once process the tiles in turn, starting with those of the first peer.

``a @ b`` is ``[m, n]``. Rank r's shard is its r-th ``m / ranks`` rows, which are encoded to row r
of the wires ``[ranks, wire_bytes]``. The numbers equal those of the unfused form: the result is
rounded to the dtype of the matmul before it is encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import CompandedGrid
from commpass.codecs.block.layouts import Flat
from commpass.lowering.chain import Chain, Encode
from commpass.lowering.gpu import generate, supported, wires
from commpass.lowering.gpu.matmul_sizes import SHARED, WIDEST, Configuration, Matmul, Problem
from commpass.lowering.gpu.source import Source, constant, function_text, indent, of_text
from commpass.lowering.gpu.tiles import matmul as tiles

OPERANDS = (torch.bfloat16, torch.float16)
HELD = 2**31
"""The number of values of one tensor must be below this."""


# --- supported matmuls ----------------------------------------------------------------------------


def unsupported_reason(
    codec: Codec, matmul: Matmul, problem: Problem, *, arch: str = "sm_90"
) -> str:
    """Return why a matmul cannot encode its own result, or "" if it can."""
    if not isinstance(codec, BlockCodec):
        return f"{codec.spec}: no block codec, and kernels are made of the parts of one"
    if not isinstance(codec.layout, Flat):
        return f"{codec.spec}: its blocks are no consecutive values"
    if why := _unsupported_dtypes(matmul, arch):
        return why
    block, n = codec.block, problem.n
    if why := supported.unsupported_reason(_chain(codec), problem.rows * n):
        return why
    if supported.needs_row_peaks(_chain(codec)):
        return f"{codec.spec}: the peak of a row must be known before it is encoded"
    if block > WIDEST:
        return f"{codec.spec}: blocks of {block} values, wider than a tile of {WIDEST} columns"
    if n % block:
        return f"{n} columns are no multiple of {codec.spec}'s blocks of {block}: blocks cross rows"
    if problem.m % problem.ranks:
        return f"{problem.m} rows for {problem.ranks} ranks: shards begin inside a row"
    if min(problem.m, n, problem.k) < 1:
        return "nothing to multiply"
    largest = max(problem.m * problem.k, problem.k * n, problem.m * n)
    return f"{largest:,} values in a tensor: kernels count to 2^31" if largest >= HELD else ""


def _unsupported_dtypes(matmul: Matmul, arch: str) -> str:
    if arch not in SHARED:
        return f"{arch}: no kernels for it"
    if matmul.dtype not in OPERANDS:
        return f"{_name(matmul.dtype)} operands: tensor cores take bfloat16, float16 and e4m3"
    if matmul.bias is not None and matmul.bias not in supported.TYPES:
        return f"a bias in {_name(matmul.bias)}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _chain(codec: Codec) -> Chain:
    return Chain(torch.float32, (Encode(codec),))


# --- kernel text ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel and how to call it: ``signature`` holds its arguments in order, with their Triton
    types; the compile-time ones follow (``constants``). ``fuses`` says whether a product and a sum
    may be rounded once."""

    source: Source
    signature: dict[str, str]
    constants: tuple[str, ...]
    fuses: bool


@lru_cache(maxsize=1024)
def kernel(codec: BlockCodec, matmul: Matmul, by: Configuration) -> Kernel:
    """Return the kernel for a codec and a matmul."""
    body = wires.Body(codec.block, codec.layout)
    body.add_argument("a", supported.TYPES[matmul.dtype])
    body.add_argument("b", supported.TYPES[matmul.dtype])
    for name in ("rows", "columns", "depth", "ranks", "a_step", "b_step"):
        body.add_argument(name, "i32")
    epilogue = _within_loop(_epilogue_lines, body, matmul)
    stores = _within_loop(_encode_lines, body, codec)
    body.add_argument("output_stride", "i64")
    loop = [
        *_place_lines(),
        *_product_lines(matmul, by),
        "for cut in tl.static_range(SLICES):",
        *indent(["x = cut_of(product, cut, SLICES)", *epilogue, *stores]),
    ]
    lines = [
        "ALONG: tl.constexpr = BLOCK_N // SIZE",
        "BLOCKS: tl.constexpr = BLOCK_M // SLICES * ALONG",
        "tl.assume(depth > 0)",
        "tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N) * ranks",
        *(_descriptor_lines(matmul) if by.descriptors else []),
        "for number in tl.range(",
        f"    tl.program_id(0), tiles, tl.num_programs(0), flatten={by.flatten}",
        "):",
        *indent(loop),
    ]
    signature = dict(sorted(body.signature.items(), key=lambda each: not each[1].startswith("*")))
    constants = tuple(name for name in CONSTANTS if any(name in line for line in lines))
    text = function_text("matmul_encode", [*signature, *map(constant, constants)], lines)
    known = {**generate.KNOWN, **vars(tiles)}
    fuses = isinstance(codec.grid, CompandedGrid)
    return Kernel(of_text("matmul_encode", text, known), signature, constants, fuses)


CONSTANTS = (
    *("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP", "SLICES", "SIZE", "PARTS"),
    *("WHOLE_K", "CASTS", "FP8"),
)


def _within_loop(write: Callable[..., None], body: wires.Body, subject: Any) -> list[str]:
    """Return the lines that ``write`` adds to a body, without adding them."""
    before, body.lines = body.lines, []
    write(body, subject)
    lines, body.lines = body.lines, before
    return lines


def _place_lines() -> list[str]:
    return [
        "row, line, column = tile_place(",
        "    number, ranks, rows, columns, BLOCK_M, BLOCK_N, GROUP",
        ")",
        "row = row.to(tl.int64)",
        "first = row * rows",
    ]


def _descriptor_lines(matmul: Matmul) -> list[str]:
    """Return lines that create the kernel's descriptors, once per program."""
    shapes = (
        ("a", ("ranks * rows", "depth"), ("BLOCK_M", "BLOCK_K"), matmul.a_by_rows),
        ("b", ("depth", "columns"), ("BLOCK_K", "BLOCK_N"), matmul.b_by_rows),
    )
    lines = []
    for name, shape, block, by_rows in shapes:
        turn = 1 if by_rows else -1
        lines += [
            f"{name}_seen = tl.make_tensor_descriptor(",
            f"    {name}, [{', '.join(shape[::turn])}], [{name}_step, 1],",
            f"    [{', '.join(block[::turn])}],",
            ")",
        ]
    return lines


def _product_lines(matmul: Matmul, by: Configuration) -> list[str]:
    if by.descriptors:
        forms = f"{matmul.a_by_rows}, {matmul.b_by_rows}"
        return [
            "product = product_by_descriptors(",
            "    a_seen, b_seen, (first + line).to(tl.int32), column, depth,",
            f"    BLOCK_M, BLOCK_N, BLOCK_K, {forms}, CASTS",
            ")",
        ]
    a_at = "a_step, 1" if matmul.a_by_rows else "1, a_step"
    b_at = "b_step, 1" if matmul.b_by_rows else "1, b_step"
    start = "a + first * a_step" if matmul.a_by_rows else "a + first"
    return [
        "product = product_by_pointers(",
        f"    {start}, b, line, column, rows, columns, depth, {a_at}, {b_at},",
        "    BLOCK_M, BLOCK_N, BLOCK_K, WHOLE_K, CASTS",
        ")",
    ]


def _epilogue_lines(body: wires.Body, matmul: Matmul) -> None:
    through = f"x = through_{supported.TYPES[matmul.dtype].removeprefix('*')}(x, CASTS)"
    if matmul.bias is not None:
        body.add_argument("bias", supported.TYPES[matmul.bias])
        body.add("along = column + tl.arange(0, BLOCK_N)")
        body.add("added = tl.load(bias + along, mask=along < columns, other=0.0)")
        body.add("x = x + to_float32(added)[None, :]")
    body.add(through)
    if matmul.activation:
        body.add(f"x = {matmul.activation}(x)", through)


def _encode_lines(body: wires.Body, codec: BlockCodec) -> None:
    """Write lines that reshape ``x [BLOCK_M, BLOCK_N]`` to blocks at their positions in the row of
    the wire, and encode them."""
    body.add(
        "x = tl.reshape(x, (BLOCKS, PARTS, SIZE // PARTS))",
        *generate.INSIDE,
        "each = tl.arange(0, BLOCKS)[:, None, None]",
        "down = line + line_of(each // ALONG, cut, SLICES)",
        "beside = column // SIZE + each % ALONG",
        "across = columns // SIZE",
        "block_mask = (down < rows) & (beside < across)",
        "block = down * across + beside",
    )
    body.add("blocks = rows * across")
    # No branch: loops that contain one cannot be flattened (Triton 3.7).
    for region, length in wires.write_encode(codec, body):
        body.add(f"filled_by_first({region}, {length}, line + cut, column)")
