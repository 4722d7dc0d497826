"""Generate the text of a Triton kernel from a chain, composed of the tile functions of its parts.

A program processes some blocks of a row as a tile ``[BLOCKS, PARTS, SIZE / PARTS]`` of float32
values. All values stay in registers between the first and the last step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from commpass.codecs.block.domain import VALUES
from commpass.codecs.block.grids import CompandedGrid
from commpass.codecs.block.layouts import Flat
from commpass.codecs.block.packing import widths
from commpass.codecs.block.transforms import NoTransform
from commpass.codecs.dispatch import by_type
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Normalize,
    Scale,
    Shift,
    Step,
    Store,
    Sum,
    dtype_after,
)
from commpass.lowering.gpu import parts
from commpass.lowering.gpu.parts import Group
from commpass.lowering.gpu.source import Kernel, constant, function_text, of_text
from commpass.lowering.gpu.sums import write_sum
from commpass.lowering.gpu.supported import TYPES, block_codec, codecs_of
from commpass.lowering.gpu.tile_sizes import DECODED_PART, Tile, is_sum, static_tile
from commpass.lowering.gpu.tiles import (
    grids,
    layouts,
    noise,
    norms,
    numbers,
    packing,
    scales,
    transforms,
)
from commpass.lowering.gpu.wires import Body, short_name, write_decode, write_encode

CONSTANTS = ("SIZE", "PARTS", "BLOCKS", "CASTS", "FP8", "CHECKS")
"""Compile-time arguments of kernels.

- ``SIZE``: values of a block.
- ``PARTS``: parts of a block, which is the number of values that share a byte.
- ``BLOCKS``: blocks of a tile.
- ``CASTS``, ``FP8``: whether the GPU's casts to 16 and to 8 bits give the required bits. ``FP8`` is
  2 if the GPU (NVIDIA's from sm_100 on) also has instructions on pairs of float32, else 1 or 0.
- ``CHECKS``: whether sums check for values that must be clamped to the largest number. The usual
  cost is that without the check.
"""
INSIDE = (
    "inside = tl.arange(0, SIZE // PARTS)[None, None, :]",
    "inside += tl.arange(0, PARTS)[None, :, None] * (SIZE // PARTS)",
)
"""Lines that number the values of a block, parts of a byte apart."""
LARGEST_GRID = 65535
"""The most programs along the second and the third axis of a grid."""
ROW_LINES = (
    "row = tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)",
    "row = tl.minimum(row, rows - 1)",
)
"""Lines that number the row of a program. Programs beyond the last row write it again."""


@dataclass(frozen=True, kw_only=True)
class Generated(Kernel):
    """The kernel of a chain. One program processes ``blocks`` blocks of one row; the grid is
    ``(programs of a row, y, z)`` with at least as many programs ``y * z`` as rows."""

    chain: Chain
    blocks: int


# --- kernel text ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def kernel(
    chain: Chain, numel: int = 1 << 20, lanes: int = 32, tile: Tile | None = None
) -> Generated:
    """Return the kernel of a chain for rows of ``numel`` values (``unsupported_reason`` must return
    "") on a GPU whose warps have ``lanes`` threads, with the static tile or another one of
    ``tile_sizes.tiles``.

    It depends on ``numel`` if the size of a block does, or if the last block is not full.
    """
    layout = block_codec(codecs_of(chain)[0]).layout
    size = layout.size(numel)
    tile = tile or static_tile(chain, numel, lanes)
    body = Body(size, layout, _group(chain, tile, size, lanes))
    body.add(*ROW_LINES)
    norm_blocks = chain.width // size
    if norm_blocks:
        body.add("lane = tl.arange(0, BLOCKS)[:, None, None]")
        body.add(f"block = tl.program_id(0) * {norm_blocks} + lane")
    else:
        body.add("block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None, None]")
    body.add(*INSIDE)
    body.add(f"place = {parts.place(layout, size)}")
    body.add("value_mask = place < numel", "block_mask = block < blocks")
    if norm_blocks:
        body.add(f"value_mask = value_mask & (lane < {norm_blocks})")
        body.add(f"block_mask = block_mask & (lane < {norm_blocks})")
        body.add(f"along = place - tl.program_id(0) * {chain.width}")
    if chain.decodes is None:
        body.add_argument("input", TYPES[chain.input_dtype])
        body.add(f"x = {body.load('input + row * input_stride + place')}")
    else:
        body.add_argument("input", "*u8")
    dtype = chain.input_dtype if chain.decodes is None else torch.float32
    for step in chain.steps:
        if isinstance(step, Encode) and chain.decodes and layout.blocks(numel) * size != numel:
            padded = f"tl.where({parts.split(layout, 'value_mask')}, x, 0.0)"
            body.add(f"x = {padded}")  # clear the padding of the last block
        if isinstance(step, Store):
            _write_store(dtype, body)
            continue
        dtype = dtype_after(step, dtype)
        _write(step, body, chain)
        if isinstance(step, (Scale, Shift)) and step is not chain.steps[-1]:
            body.add(*([] if dtype == torch.float32 else [_through(dtype)]))
    if chain.encodes is None:
        body.add_argument("output", TYPES[dtype])
        body.store(dtype, "output + row * output_stride + place")
    for name in ("input_stride", "output_stride"):
        body.add_argument(name, "i64")
    for name in ("numel", "blocks", "rows"):
        body.add_argument(name, "i32")
    split = max(8 // widths(block_codec(each).grid.bits)[0] for each in codecs_of(chain))
    grids_ = [block_codec(each).grid for each in codecs_of(chain)]
    fuses = any(isinstance(grid, CompandedGrid) for grid in grids_)
    entry = _name(chain)
    text = _entry(entry, body)
    constants = (size, split, tile.padded_blocks, True, True, True)
    return Generated(
        chain=chain,
        source=of_text(entry, text, KNOWN),
        signature=body.signature,
        constants=dict(zip(CONSTANTS, constants, strict=True)),
        blocks=tile.blocks,
        num_warps=tile.num_warps,
        fuses=fuses,
    )


def _group(chain: Chain, tile: Tile, size: int, lanes: int) -> Group | None:
    """Return the form in which the tile of a chain is rotated, or None if it keeps its own.

    It does for tiles of several warps, which would wait for each other, for chains whose other
    steps read more values in the same form, and if a thread would not hold pairs of values. On AMD,
    an encode in this form would need over 400 registers.
    """
    further = (Add, Normalize, Encode) if chain.decodes else (Add, Normalize)
    if tile.num_warps > 1 or any(isinstance(step, further) for step in chain.steps):
        return None
    if chain.decodes is None and lanes != 32:
        return None
    group = tile.group(lanes, DECODED_PART if chain.decodes else 1)
    return group if 2 * group.part <= size else None


def _entry(name: str, body: Body) -> str:
    pointers = [each for each in body.signature if body.signature[each].startswith("*")]
    # The outputs come last of the pointers: the result, then the further results.
    order = sorted(pointers, key=lambda each: 2 * each.startswith("further") + (each == "output"))
    order += [each for each in body.signature if each not in pointers]
    body.signature = {each: body.signature[each] for each in order}
    functions = "".join(f"{text}\n\n@triton.jit\n" for text in body.functions)
    return functions + function_text(name, [*order, *map(constant, CONSTANTS)], body.lines)


UNNAMED = (Cast, Store, Scale, Shift)
"""Steps that the names of kernels omit."""


def _name(chain: Chain) -> str:
    named = (step for step in chain.steps if not isinstance(step, UNNAMED))
    words = ("norm" if isinstance(s, Normalize) else type(s).__name__.lower() for s in named)
    return "_".join(words)


# --- steps ----------------------------------------------------------------------------------------


def lines_of(step: Divide | Enter | Leave, size: int) -> list[str]:
    """Return the lines of a step without further inputs; they update ``x``."""
    body = Body(size, Flat(size))
    _write(step, body, Chain(torch.float32, (step,)))
    return body.lines


@by_type
def _write(step: Step, body: Body, chain: Chain) -> None:
    """Write the lines of a step, which updates ``x``."""
    raise NotImplementedError(step)


@_write.register
def _encode(step: Encode, body: Body, chain: Chain) -> None:
    ends = write_encode(block_codec(step.codec), body)
    fills = (f"    filled({region}, {length})" for region, length in ends)
    body.add("if tl.program_id(0) == 0:", *fills)


@_write.register
def _decode(step: Decode, body: Body, chain: Chain) -> None:
    codec = block_codec(step.codec)
    if is_sum(chain):
        write_sum(codec, step.dtype, body, chain)
        return
    call = write_decode(codec, step.dtype, body, "decoded")
    body.add("wire = input + row * input_stride", f"x = {call}")


@_write.register
def _sum(step: Sum, body: Body, chain: Chain) -> None:
    """Do nothing: the preceding decode writes the sum."""
    if chain.decodes is None:
        raise NotImplementedError("a sum of values that were not decoded")


@_write.register
def _divide(step: Divide, body: Body, chain: Chain) -> None:
    body.add(f"x = divided(x, {float(step.by)!r})")


@_write.register
def _enter(step: Enter, body: Body, chain: Chain) -> None:
    body.add(*parts.forward(step.domain.transform))


@_write.register
def _leave(step: Leave, body: Body, chain: Chain) -> None:
    if step.domain == VALUES or isinstance(step.domain.transform, NoTransform):
        return
    width = step.domain.width
    body.add(
        f"x = x * {1 / width!r}", *parts.inverse(step.domain.transform, float(width), body.group)
    )


@_write.register
def _cast(step: Cast, body: Body, chain: Chain) -> None:
    if step.dtype != torch.float32 and step is not chain.steps[-1]:
        body.add(f"x = through_{short_name(step.dtype)}(x, CASTS, FP8)")


@_write.register
def _add(step: Add, body: Body, chain: Chain) -> None:
    name = body.add_argument(f"added_{next(body.numbers)}", TYPES[step.dtype])
    # Not by ``output_stride``: a chain may end with a wire.
    body.add(f"x = x + {body.load(f'{name} + row * numel + place')}")
    if step is not chain.steps[-1]:
        body.add(f"x = through_{short_name(step.dtype)}(x, CASTS, FP8)")


def _write_store(dtype: torch.dtype, body: Body) -> None:
    name = body.add_argument(f"further_{next(body.results)}", TYPES[dtype])
    body.store(dtype, f"{name} + row * numel + place")


@_write.register
def _normalize(step: Normalize, body: Body, chain: Chain) -> None:
    body.add("x = tl.where(value_mask, x, 0.0)")
    if step.centered:
        body.add(f"mean = tl.sum(x) / {float(step.width)!r}")
        body.add("x = tl.where(value_mask, x - mean, 0.0)")
    body.add(f"rsqrt = root_inverse(tl.sum(x * x) / {float(step.width)!r} + {step.eps!r})")
    body.add("x = x * rsqrt")
    for statistic in step.saved:
        name = body.add_argument(f"further_{next(body.results)}", TYPES[torch.float32])
        body.add(
            f"tl.store({name} + row * (numel // {step.width}) + tl.program_id(0), {statistic})"
        )


@_write.register
def _scale(step: Scale, body: Body, chain: Chain) -> None:
    offset = f" + {step.offset!r}" if step.offset else ""
    body.add(f"x = x * ({_row_expression(step.weight, body)}{offset})")


@_write.register
def _shift(step: Shift, body: Body, chain: Chain) -> None:
    body.add(f"x = x + {_row_expression(step.bias, body)}")


def _row_expression(dtype: torch.dtype, body: Body) -> str:
    """Return the values of a weight or bias, the next input."""
    name = body.add_argument(f"added_{next(body.numbers)}", TYPES[dtype])
    return body.load(f"{name} + along")


def _through(dtype: torch.dtype) -> str:
    return f"x = through_{short_name(dtype)}(x, CASTS, FP8)"


def _tiles(*modules: ModuleType) -> dict[str, Any]:
    """Return the tile functions and numbers of modules by name."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "is_tile", False) or (isinstance(value, (int, float)) and name.isupper())
    }


KNOWN = _tiles(grids, layouts, noise, norms, numbers, packing, scales, transforms)
"""Names that the text of a generated kernel may use."""
