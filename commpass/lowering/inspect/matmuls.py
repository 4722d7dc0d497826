"""Compilable kernels of matmuls that encode their result, or decode their left operand."""

from __future__ import annotations

import math

import torch

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.errors import KernelError
from commpass.lowering.gpu import decode_matmul, decode_matmul_launch
from commpass.lowering.gpu.matmul_launch import Steps, call
from commpass.lowering.gpu.matmul_sizes import Matmul, Problem, configuration
from commpass.lowering.gpu.matmul_supported import unsupported_reason
from commpass.lowering.inspect.architectures import cards_of
from commpass.lowering.inspect.lowerable import Lowerable, Multiplies, casts
from commpass.lowering.matmul import BATCHED, GROUPED, SINGLE
from commpass.lowering.pointwise import Epilogue

EDGE = 4096
"""Rows, columns and depth of the matmul that is compiled."""
BATCHES = 8
"""Its batches or groups, of equal heights."""
FORMS = {
    "matmul_encode": SINGLE,
    "batched_matmul_encode": BATCHED,
    "grouped_matmul_encode": GROUPED,
}
"""The forms of products, by the names of kernels."""
DECODES = "decode_matmul"
"""The name of the matmul that decodes its left operand."""
NARROW = 128
"""Its columns: a wider matmul decodes its rows more than once."""


def of_matmul(
    codec: Codec,
    dtype: torch.dtype,
    ranks: int,
    arch: str,
    name: str = "matmul_encode",
    epilogue: Epilogue | None = None,
) -> Lowerable:
    """Return the matmul of two square matrices, or of batches or groups, the second operand stored
    like the weight of ``F.linear``, with the result encoded for a two-shot. Counts and times per
    program are those of one tile."""
    form = FORMS[name]
    matmul = Matmul(dtype, b_by_rows=False, form=form, epilogue=epilogue or Epilogue())
    batches = 1 if form == SINGLE else BATCHES
    problem = Problem(EDGE, EDGE, EDGE, ranks, batches)
    if why := unsupported_reason(codec, matmul, problem, arch=arch):
        raise KernelError(f"no kernel: {why}")
    assert isinstance(codec, BlockCodec)
    by = configuration(codec, problem, arch, matmul)
    steps = Steps(EDGE, EDGE, EDGE * EDGE // batches, EDGE * EDGE)
    prepared = call(codec, matmul, problem, by, steps, casts(arch))
    operands = (1 + batches) * EDGE * EDGE * dtype.itemsize
    wire = ranks * codec.wire_bytes(problem.rows * EDGE, torch.float32)
    further = sum(each.dtype.itemsize for each in matmul.epilogue.operands) * EDGE * EDGE
    depth = float(math.ceil(EDGE / by.block_k))
    parts = by.block_m // by.deferred if by.deferred else 0
    programs = max((card.units for card in cards_of(arch)), default=1) * by.programs
    tiles = max(prepared.tiles / programs, 1.0)
    return Lowerable(
        name=name,
        source=prepared.kernel.source,
        signature=prepared.kernel.signature,
        constants=prepared.constants,
        hints={each: 16 for each, number in prepared.numbers.items() if number % 16 == 0},
        num_warps=by.num_warps,
        num_stages=by.num_stages,
        fuses=prepared.kernel.fuses,
        moved=(operands + wire + further) / prepared.tiles,
        flops=2.0 * EDGE**3 / prepared.tiles,
        # If two loops are flattened to one, the end of a tile is a branch. Those of groups are not,
        # since a group may be empty. Behind the loop, the last tile of a program is encoded.
        trips=((depth, 1.0), parts / tiles)
        if by.deferred
        else ((depth, 1.0),)
        if by.flatten and form != GROUPED
        else (1.0, depth),
        parts=parts,
        tiles=tiles,
        of="tensor",
        stays=True,
        multiplies=Multiplies(EDGE, EDGE, EDGE, (by.block_m, by.block_n, by.block_k), batches),
    )


def of_decode_matmul(codec: Codec, dtype: torch.dtype, ranks: int, arch: str) -> Lowerable:
    """Return the matmul of gathered wires and a narrow matrix that is stored like the weight of
    ``F.linear``. Counts and times per program are those of one tile."""
    matmul = decode_matmul.Matmul(dtype, b_by_rows=False)
    problem = decode_matmul.Problem(EDGE, NARROW, EDGE, ranks)
    if why := decode_matmul.unsupported_reason(codec, matmul, problem, arch=arch):
        raise KernelError(f"no kernel: {why}")
    assert isinstance(codec, BlockCodec)
    by, width = decode_matmul.tile_of(codec, problem, arch), codec.wire_bytes(problem.numel, dtype)
    made = decode_matmul_launch.call(codec, matmul, problem, by, width, EDGE, casts(arch))
    step = by.block_k * 8 // codec.grid.bits  # by.block_k counts bytes of codes
    moved = ranks * width + NARROW * (EDGE + EDGE) * dtype.itemsize
    return Lowerable(
        name=DECODES,
        source=made.kernel.source,
        signature=made.kernel.signature,
        constants=made.constants,
        hints={each: 16 for each, number in made.numbers.items() if number % 16 == 0},
        num_warps=by.num_warps,
        num_stages=by.num_stages,
        fuses=made.kernel.fuses,
        moved=moved / made.programs,
        flops=2.0 * EDGE * EDGE * NARROW / made.programs,
        trips=(float(made.numbers["row_bytes"] // by.block_k),),
        of="tensor",
        multiplies=Multiplies(EDGE, NARROW, EDGE, (by.block_m, by.block_n, step)),
    )
