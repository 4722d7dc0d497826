"""A matmul whose result is encoded in its epilogue.

Codes and scales are written directly to the wire of a two-shot all_reduce or a reduce_scatter, and
the values are never stored in memory. The kernel is persistent: as many programs as the GPU runs at
once process the tiles in turn, starting with those of the first peer.

``a @ b`` is ``[m, n]``. Rank r's shard is its r-th ``m / ranks`` rows, which are encoded to row r
of the wires ``[ranks, wire_bytes]``. The numbers equal those of the unfused form: the result is
rounded to the dtype of the matmul before it is encoded, and so is each operation in between.

A tile is encoded at its end, or in parts during the next tile (``matmul_deferred``).

A tile never spans two shards, nor two batches. Batched products are divided into segments, the
largest equal parts of both. Where groups begin is known on the device only: a tile of rows that
contains rows of several groups is computed once for each of them, and stores only its own rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import CompandedGrid
from commpass.lowering.gpu import generate, wires
from commpass.lowering.gpu.matmul_deferred import deferred_lines
from commpass.lowering.gpu.matmul_epilogue import write_epilogue, write_result
from commpass.lowering.gpu.matmul_sizes import Configuration, Matmul
from commpass.lowering.gpu.source import Source, constant, function_text, indent, of_text
from commpass.lowering.gpu.supported import TYPES
from commpass.lowering.gpu.tiles import groups as group_tiles
from commpass.lowering.gpu.tiles import matmul as tiles
from commpass.lowering.gpu.tiles import pointwise as pointwise_tiles
from commpass.lowering.matmul import BATCHED, GROUPED, HELD, SINGLE


@dataclass(frozen=True)
class Kernel:
    """A kernel and how to call it: ``signature`` holds its arguments in order, with their Triton
    types; the compile-time ones follow (``constants``). ``fuses`` says whether a product and a sum
    may be rounded once."""

    source: Source
    signature: dict[str, str]
    constants: tuple[str, ...]
    fuses: bool


CONSTANTS = (
    *("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP", "SLICES", "DEFERRED", "SIZE", "PARTS"),
    *("WHOLE_K", "GROUPS", "CASTS", "FP8"),
)


@dataclass(frozen=True)
class Form:
    """The lines of a form of products, and the names in them.

    - ``start`` are the first lines, and ``tiles`` is the number of tiles.
    - ``place`` finds a tile. It defines ``row`` (of the wires), ``first`` (the row of the result
      from which ``line`` counts, int64), ``line`` and ``column``.
    - ``rows`` is the number of rows from ``first`` on, and ``above`` those of the shard before it.
    - ``stored`` is a condition on the rows ``down``.
    - ``depth`` is the number of values to multiply, and ``batch`` numbers the matrix of ``b``.
    """

    integers: tuple[str, ...]
    tiles: str
    place: tuple[str, ...]
    start: tuple[str, ...] = ("tl.assume(depth > 0)",)
    rows: str = "rows"
    above: str = ""
    stored: str = "down < rows"
    depth: str = "depth"
    batch: str = ""


FORMS = {
    SINGLE: Form(
        integers=("rows", "columns", "depth", "ranks", "a_step", "b_step"),
        tiles="tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N) * ranks",
        place=(
            "row, line, column = tile_place(",
            "    number, ranks, rows, columns, BLOCK_M, BLOCK_N, GROUP",
            ")",
            "row = row.to(tl.int64)",
            "first = row * rows",
        ),
    ),
    BATCHED: Form(
        integers=(
            *("rows", "columns", "depth", "a_step", "b_step"),
            *("batches", "height", "segment", "segments"),
        ),
        tiles="tl.cdiv(segment, BLOCK_M) * tl.cdiv(columns, BLOCK_N) * segments",
        place=(
            "part, line, column = tile_place(",
            "    number, segments, segment, columns, BLOCK_M, BLOCK_N, GROUP",
            ")",
            "begin = part * segment",
            "row = (begin // rows).to(tl.int64)",
            "above = begin % rows",
            "batch = begin // height",
            "inner = begin % height",
            "first = begin.to(tl.int64)",
        ),
        rows="segment",
        above="above + ",
        stored="down < segment",
        batch="batch",
    ),
    GROUPED: Form(
        integers=("rows", "columns", "depth", "ranks", "a_step", "b_step", "batches"),
        start=(
            "slots = tl.cdiv(rows, BLOCK_M) * ranks + batches",
            "groups = tl.arange(0, GROUPS)",
            # Loaded here, not in a function: torch would assume that the offsets are written.
            "inner = (groups > 0) & (groups <= batches)",
            "ends = tl.load(offsets + (groups - 1), mask=inner, other=0)",
            "begins = group_begins(ends, groups, batches, ranks * rows)",
        ),
        tiles="slots * tl.cdiv(columns, BLOCK_N)",
        place=(
            "slot, line, column = tile_place(",
            "    number, slots, 1, columns, BLOCK_M, BLOCK_N, GROUP",
            ")",
            "row, line, batch, low, high = group_place(",
            "    slot, begins, groups, batches, ranks, rows, BLOCK_M",
            ")",
            "deep = tl.where((low < high) & (batch < batches), depth, 0)",
            "batch = tl.minimum(batch, batches - 1)",
            "row = row.to(tl.int64)",
            "first = row * rows",
        ),
        stored="(down >= low) & (down < high)",
        depth="deep",
        batch="batch",
    ),
}


@lru_cache(maxsize=1024)
def kernel(codec: BlockCodec, matmul: Matmul, by: Configuration) -> Kernel:
    """Return the kernel for a codec and a matmul."""
    body, form = wires.Body(codec.block, codec.layout), FORMS[matmul.form]
    body.add_argument("a", TYPES[matmul.dtype])
    body.add_argument("b", TYPES[matmul.dtype])
    if matmul.form == GROUPED:
        body.add_argument("offsets", "*i32")
    for name in form.integers:
        body.add_argument(name, "i32")
    if matmul.form == BATCHED:
        body.add_argument("a_batch", "i64")
    if form.batch:
        body.add_argument("b_batch", "i64")
    line_of = "(cut * ROWS + {0})" if by.deferred else "line_of({0}, cut, SLICES)"
    result = _within_loop(write_result, body, matmul, form.batch, stored=by.deferred > 0)
    stores = _within_loop(write_epilogue, body, matmul, form.rows, form.batch, line_of)
    stores += _within_loop(_encode_lines, body, codec, form, line_of)
    body.add_argument("output_stride", "i64")
    if by.deferred:
        body.add_argument(HELD, TYPES[matmul.dtype])
        parts = _part_lines(matmul, form)
        loop = deferred_lines(matmul.dtype, form.place, parts, result, stores)
    else:
        loop = [
            "for number in tl.range(",
            f"    tl.program_id(0), tiles, tl.num_programs(0), flatten={by.flatten}",
            "):",
            *indent([*form.place, *_product_lines(matmul, by, form)]),
            "    for cut in tl.static_range(SLICES):",
            *indent(indent(["x = cut_of(product, cut, SLICES)", *result, *stores])),
        ]
    lines = [
        "ALONG: tl.constexpr = BLOCK_N // SIZE",
        f"ROWS: tl.constexpr = {'DEFERRED' if by.deferred else 'BLOCK_M // SLICES'}",
        "BLOCKS: tl.constexpr = ROWS * ALONG",
        *form.start,
        f"tiles = {form.tiles}",
        *(_descriptor_lines(matmul) if by.descriptors else []),
        *loop,
    ]
    signature = dict(sorted(body.signature.items(), key=lambda each: not each[1].startswith("*")))
    constants = tuple(name for name in CONSTANTS if any(_uses(line, name) for line in lines))
    text = function_text("matmul_encode", [*signature, *map(constant, constants)], lines)
    known = {**generate.KNOWN, **vars(pointwise_tiles), **vars(group_tiles), **vars(tiles)}
    fuses = isinstance(codec.grid, CompandedGrid)
    return Kernel(of_text("matmul_encode", text, known), signature, constants, fuses)


def _uses(line: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", line) is not None


def _within_loop(
    write: Callable[..., None], body: wires.Body, *subjects: Any, **more: Any
) -> list[str]:
    """Return the lines that ``write`` adds to a body, without adding them."""
    before, body.lines = body.lines, []
    write(body, *subjects, **more)
    lines, body.lines = body.lines, before
    return lines


def _descriptor_lines(matmul: Matmul) -> list[str]:
    """Return lines that create the kernel's descriptors, once per program."""
    height = "height" if matmul.form == BATCHED else "ranks * rows"
    shapes = (
        ("a", (height, "depth"), ("BLOCK_M", "BLOCK_K"), matmul.a_by_rows),
        ("b", ("depth", "columns"), ("BLOCK_K", "BLOCK_N"), matmul.b_by_rows),
    )
    lines = []
    for name, shape, block, by_rows in shapes:
        turn = 1 if by_rows else -1
        lengths, widths, steps = list(shape[::turn]), list(block[::turn]), [f"{name}_step", "1"]
        if _is_batched(matmul, name):
            lengths, widths = ["batches", *lengths], ["1", *widths]
            steps = [f"{name}_batch", *steps]
        lines += [
            f"{name}_seen = tl.make_tensor_descriptor(",
            f"    {name}, [{', '.join(lengths)}], [{', '.join(steps)}],",
            f"    [{', '.join(widths)}],",
            ")",
        ]
    return lines


def _is_batched(matmul: Matmul, name: str) -> bool:
    """Whether an operand has a matrix for each batch."""
    return matmul.form == BATCHED or (matmul.form == GROUPED and name == "b")


def _row_of(matmul: Matmul) -> str:
    """Return the row of ``a`` with which a tile begins, through its descriptor."""
    return "inner + line" if matmul.form == BATCHED else "(first + line).to(tl.int32)"


def _part_lines(matmul: Matmul, form: Form) -> list[str]:
    """Return lines that load ``left`` and ``right``, the operands of one step along k."""
    place = f"{form.batch or '0'}, "
    a = f"{matmul.a_by_rows}, {_is_batched(matmul, 'a')}"
    b = f"{matmul.b_by_rows}, {_is_batched(matmul, 'b')}"
    return [
        f"left = part_of(a_seen, {place}{_row_of(matmul)}, deep, BLOCK_M, BLOCK_K, {a})",
        f"right = part_of(b_seen, {place}deep, column, BLOCK_K, BLOCK_N, {b})",
    ]


def _product_lines(matmul: Matmul, by: Configuration, form: Form) -> list[str]:
    batched = matmul.form == BATCHED
    if by.descriptors:
        forms = f"{matmul.a_by_rows}, {matmul.b_by_rows}"
        forms += f", {_is_batched(matmul, 'a')}, {_is_batched(matmul, 'b')}"
        row = _row_of(matmul)
        return [
            "product = product_by_descriptors(",
            f"    a_seen, b_seen, {form.batch or '0'}, {row}, column, {form.depth},",
            f"    BLOCK_M, BLOCK_N, BLOCK_K, {forms}, CASTS",
            ")",
        ]
    a_at = "a_step, 1" if matmul.a_by_rows else "1, a_step"
    b_at = "b_step, 1" if matmul.b_by_rows else "1, b_step"
    first = "inner.to(tl.int64)" if batched else "first"
    a = f"a + {first} * a_step" if matmul.a_by_rows else f"a + {first}"
    a += " + batch.to(tl.int64) * a_batch" if batched else ""
    b = "b + batch.to(tl.int64) * b_batch" if form.batch else "b"
    return [
        "product = product_by_pointers(",
        f"    {a}, {b},",
        f"    line, column, {form.rows}, columns, {form.depth}, {a_at}, {b_at},",
        "    BLOCK_M, BLOCK_N, BLOCK_K, WHOLE_K, CASTS",
        ")",
    ]


def _encode_lines(body: wires.Body, codec: BlockCodec, form: Form, line_of: str) -> None:
    """Write lines that reshape ``x [ROWS, BLOCK_N]`` to blocks at their positions in the row of the
    wire, and encode them. ``line_of`` is as in ``write_epilogue``."""
    block = f"({form.above}down)" if form.above else "down"
    body.add(
        "x = tl.reshape(x, (BLOCKS, PARTS, SIZE // PARTS))",
        *generate.INSIDE,
        "each = tl.arange(0, BLOCKS)[:, None, None]",
        f"down = line + {line_of.format('each // ALONG')}",
        "beside = column // SIZE + each % ALONG",
        "across = columns // SIZE",
        f"block_mask = ({form.stored}) & (beside < across)",
        f"block = {block} * across + beside",
    )
    body.add("blocks = rows * across")
    # No branch: loops that contain one cannot be flattened (Triton 3.7).
    for region, length in wires.write_encode(codec, body):
        body.add(f"filled_by_first({region}, {length}, {form.above}line + cut, column)")
