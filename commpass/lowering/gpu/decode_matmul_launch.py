"""Call the matmul that decodes its left operand: on a GPU, or on a CPU if Triton interprets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.library import wrap_triton

from commpass.codecs.block.codec import BlockCodec
from commpass.errors import CommpassError
from commpass.lowering.decode_matmul import DecodedRows
from commpass.lowering.gpu.current import on_device
from commpass.lowering.gpu.decode_matmul import (
    Matmul,
    Problem,
    Tile,
    constants_of,
    kernel,
    tile_of,
    unsupported_reason,
)
from commpass.lowering.gpu.launch import casts, interpreting, offsets
from commpass.lowering.gpu.matmul_encode import Kernel
from commpass.lowering.gpu.matmul_launch import arch_here, lies_by_rows, step_of
from commpass.lowering.gpu.matmul_supported import TOO_MANY
from commpass.lowering.gpu.source import load


@dataclass(frozen=True)
class Call:
    """One call of a kernel: integers and compile-time constants by name, and the number of
    programs."""

    kernel: Kernel
    numbers: dict[str, int]
    constants: dict[str, Any]
    by: Tile
    programs: int


def call(
    codec: BlockCodec,
    matmul: Matmul,
    problem: Problem,
    by: Tile,
    input_stride: int,
    b_step: int,
    casts: Mapping[str, int],
) -> Call:
    """Return the call of a kernel; ``casts`` is as ``launch.casts`` returns it."""
    generated = kernel(codec, matmul)
    numbers = {
        "input_stride": input_stride,
        "rows": problem.rows,
        "columns": problem.n,
        "row_bytes": problem.k * codec.grid.bits // 8,
        "ranks": problem.ranks,
        "b_step": b_step,
        **offsets("input", codec, problem.numel, matmul.dtype),
    }
    return Call(
        generated,
        {name: numbers[name] for name in generated.signature if name in numbers},
        {**constants_of(codec, by), **casts},
        by,
        by.count(problem),
    )


def unsupported_layout(wire: Tensor, b: Tensor, bias: Sequence[Tensor]) -> str:
    """Return why a kernel cannot read the operands as they lie in memory, or "" if it can."""
    if wire.stride(-1) != 1:
        return "the bytes of a wire do not lie side by side"
    if lies_by_rows(b) is None:
        return "an operand is stored neither by rows nor by columns"
    if step_of(b) * (b.shape[0] if lies_by_rows(b) else b.shape[1]) >= TOO_MANY:
        return "the lines of an operand lie far apart: kernels count to 2^31"
    return "" if all(each.is_contiguous() for each in bias) else "the bias is not contiguous"


def unsupported_call(tensors: Sequence[Tensor], rows: DecodedRows, arch: str) -> str:
    """Return why no kernel computes a call of the operator, or "" if one does."""
    wire, b, *bias = tensors
    if why := unsupported_layout(wire, b, bias):
        return why
    return unsupported_reason(rows.codec, matmul_of(tensors), problem_of(tensors, rows), arch=arch)


def matmul_of(tensors: Sequence[Tensor]) -> Matmul:
    """Return the ``Matmul`` of operands for which ``unsupported_layout`` returns ""."""
    _, b, *bias = tensors
    return Matmul(b.dtype, bool(lies_by_rows(b)), bias[0].dtype if bias else None)


def problem_of(tensors: Sequence[Tensor], rows: DecodedRows) -> Problem:
    wire, b, *_ = tensors
    (k, n), ranks = b.shape, wire.shape[0]
    return Problem(ranks * rows.numel // k, n, k, ranks)


def run(
    tensors: Sequence[Tensor], rows: DecodedRows, *, by: Tile | None = None, graph: bool = False
) -> Tensor:
    """Return the result ``[m, n]`` for the operands of the operator (``lowering.decode_matmul``).

    With ``graph``, the call is traced for Inductor, which launches the kernel itself.
    """
    wire, b, *bias = tensors
    arch = arch_here(wire.device)
    if why := unsupported_call(tensors, rows, arch):
        raise CommpassError(f"no kernel: {why}")
    codec, problem = rows.codec, problem_of(tensors, rows)
    assert isinstance(codec, BlockCodec)
    by = by or tile_of(codec, problem, arch)
    strides = wire.stride(0), step_of(b)
    made = call(codec, matmul_of(tensors), problem, by, *strides, casts(wire.device))
    output = b.new_empty((problem.m, problem.n))
    named: dict[str, Any] = {"input": wire, "b": b, "output": output, **made.numbers}
    named |= dict(zip(("bias",), bias, strict=False))
    arguments = [named[name] for name in made.kernel.signature]
    function, grid = load(made.kernel.source), (made.programs,)
    compiled: dict[str, Any] = {"num_warps": by.num_warps, "num_stages": by.num_stages}
    if graph:
        wrap_triton(function)[grid](*arguments, **made.constants, **compiled)
        return output
    if not interpreting():
        compiled["enable_fp_fusion"] = made.kernel.fuses
    with on_device(wire.device):
        function[grid](*arguments, **made.constants, **compiled)
    return output
