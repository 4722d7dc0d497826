"""Compilable kernels of matmuls that encode their result."""

from __future__ import annotations

import math

import torch

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.errors import KernelError
from commpass.lowering.gpu.matmul_encode import unsupported_reason
from commpass.lowering.gpu.matmul_launch import call
from commpass.lowering.gpu.matmul_sizes import Matmul, Problem, configuration
from commpass.lowering.inspect.lowerable import Lowerable, casts

EDGE = 4096
"""Rows, columns and depth of the matmul that is compiled."""


def of_matmul(codec: Codec, dtype: torch.dtype, ranks: int, arch: str) -> Lowerable:
    """Return the matmul of two square matrices, the second stored like the weight of ``F.linear``,
    with the result encoded for a two-shot. Counts and times per program are those of one tile."""
    matmul = Matmul(dtype, b_by_rows=False)
    problem = Problem(EDGE, EDGE, EDGE, ranks)
    if why := unsupported_reason(codec, matmul, problem, arch=arch):
        raise KernelError(f"no kernel: {why}")
    assert isinstance(codec, BlockCodec)
    by = configuration(codec, problem, arch)
    prepared = call(codec, matmul, problem, by, (EDGE, EDGE), casts(arch))
    operands = 2 * EDGE * EDGE * dtype.itemsize
    wire = ranks * codec.wire_bytes(problem.rows * EDGE, torch.float32)
    steps = float(math.ceil(EDGE / by.block_k))
    return Lowerable(
        name="matmul_encode",
        source=prepared.kernel.source,
        signature=prepared.kernel.signature,
        constants=prepared.constants,
        hints={name: 16 for name, number in prepared.numbers.items() if number % 16 == 0},
        num_warps=by.num_warps,
        num_stages=by.num_stages,
        fuses=prepared.kernel.fuses,
        moved=(operands + wire) / prepared.tiles,
        flops=2.0 * EDGE**3 / prepared.tiles,
        # If two loops are flattened to one, the end of a tile is a branch.
        trips=((steps, 1.0),) if by.flatten else (1.0, steps),
        of="tensor",
        stays=True,
    )
