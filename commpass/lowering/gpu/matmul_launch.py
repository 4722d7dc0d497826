"""Call the matmul that encodes its own result on tensors: on a GPU, or on a CPU if Triton
interprets."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.noise import Stochastic
from commpass.codecs.block.packing import widths
from commpass.errors import CommpassError
from commpass.lowering.gpu.current import on_device
from commpass.lowering.gpu.launch import casts, interpreting, key_argument, offsets
from commpass.lowering.gpu.matmul_encode import Kernel, kernel, unsupported_reason
from commpass.lowering.gpu.matmul_sizes import Configuration, Matmul, Problem, configuration
from commpass.lowering.gpu.source import load


@dataclass(frozen=True)
class Call:
    """One call of a kernel: integers and compile-time constants by name, and the number of tiles.

    Tensors are also passed by name: ``a``, ``b``, ``output`` and, if the kernel has one, ``bias``.
    """

    kernel: Kernel
    numbers: dict[str, int]
    constants: dict[str, Any]
    by: Configuration
    tiles: int

    def grid(self, processors: int) -> tuple[int]:
        return (min(self.tiles, processors * self.by.programs),)


def call(
    codec: BlockCodec,
    matmul: Matmul,
    problem: Problem,
    by: Configuration,
    steps: Sequence[int],
    casts: Mapping[str, bool],
) -> Call:
    """Return the call of a kernel.

    ``steps`` are the numbers of values from one line of ``a``, and of ``b``, to the next; ``casts``
    is as ``launch.casts`` returns it.
    """
    generated = kernel(codec, matmul, by)
    numel = problem.rows * problem.n
    numbers = {
        "rows": problem.rows,
        "columns": problem.n,
        "depth": problem.k,
        "ranks": problem.ranks,
        "a_step": steps[0],
        "b_step": steps[1],
        "output_stride": codec.wire_bytes(numel, torch.float32),
        **offsets("output", codec, numel, torch.float32),
    }
    if isinstance(codec.rounding, Stochastic):
        numbers["key"] = key_argument(codec.rounding, codec.salt)
    constants = {
        "BLOCK_M": by.block_m,
        "BLOCK_N": by.block_n,
        "BLOCK_K": by.block_k,
        "GROUP": by.group,
        "SLICES": by.cuts,
        "SIZE": codec.block,
        "PARTS": 8 // widths(codec.grid.bits)[0],
        "WHOLE_K": problem.k % by.block_k == 0,
        **casts,
    }
    return Call(
        generated,
        {name: numbers[name] for name in generated.signature if name in numbers},
        {name: constants[name] for name in generated.constants},
        by,
        problem.tiles(by) * problem.ranks,
    )


def lies_by_rows(operand: Tensor) -> bool | None:
    """Return whether a matrix's last dimension is contiguous (True) or its first one (False); None
    if neither is, or if its lines overlap."""
    (down, along), (height, width) = operand.stride(), operand.shape
    if along == 1 and down >= width:
        return True
    return False if down == 1 and along >= height else None


def step_of(operand: Tensor) -> int:
    """Return the number of values from one line to the next."""
    down, along = operand.stride()
    return down if lies_by_rows(operand) else along


def matmul_of(a: Tensor, b: Tensor, bias: Tensor | None, activation: str) -> Matmul | None:
    """Return the ``Matmul`` of two tensors; None if the rows or columns of one are not
    contiguous."""
    by_rows = [lies_by_rows(each) for each in (a, b)]
    if by_rows[0] is None or by_rows[1] is None:
        return None
    added = bias.dtype if bias is not None else None
    return Matmul(a.dtype, by_rows[0], by_rows[1], added, activation)


def for_alignment(by: Configuration, a: Tensor, b: Tensor) -> Configuration:
    """Return the configuration, without descriptors if operands are not aligned."""
    fits = not by.descriptors or are_aligned(a, b)
    return by if fits else replace(by, descriptors=False)


def are_aligned(a: Tensor, b: Tensor) -> bool:
    """Whether descriptors can load the operands: their start and their lines must be at multiples
    of 16 bytes."""
    apart = (step_of(each) * each.itemsize for each in (a, b))
    begin = (each.storage_offset() * each.itemsize for each in (a, b))
    return all(number % 16 == 0 for number in (*apart, *begin))


def run(
    a: Tensor,
    b: Tensor,
    codec: BlockCodec,
    ranks: int,
    *,
    bias: Tensor | None = None,
    activation: str = "",
    by: Configuration | None = None,
    graph: bool = False,
    as_in_graph: bool = False,
) -> Tensor:
    """Return the wires ``[ranks, wire_bytes]`` of ``a @ b`` rounded to their dtype.

    With ``graph``, the call is traced for Inductor, which launches the kernel itself and allocates
    memory for descriptors. With ``as_in_graph`` it is compiled as Inductor compiles it.
    """
    matmul = matmul_of(a, b, bias, activation)
    if matmul is None:
        raise CommpassError("no kernel: an operand is stored neither by rows nor by columns")
    problem = Problem(a.shape[0], b.shape[1], a.shape[1], ranks)
    arch = arch_here(a.device)
    if why := unsupported_reason(codec, matmul, problem, arch=arch):
        raise CommpassError(f"no kernel: {why}")
    width = codec.wire_bytes(problem.rows * problem.n, torch.float32)
    wire = a.new_empty((ranks, width), dtype=torch.uint8)
    by = for_alignment(by or configuration(codec, problem, arch), a, b)
    prepared = call(codec, matmul, problem, by, (step_of(a), step_of(b)), casts(a.device))
    given: dict[str, Any] = {"a": a, "b": b, "bias": bias, "output": wire} | prepared.numbers
    arguments = [given[name] for name in prepared.kernel.signature]
    function, grid = load(prepared.kernel.source), prepared.grid(_processors(a.device))
    compiled = {"num_warps": by.num_warps, "num_stages": by.num_stages}
    if graph:
        wrap_triton(function)[grid](*arguments, **prepared.constants, **compiled)
        return wire
    if not (as_in_graph or interpreting()):
        compiled["enable_fp_fusion"] = prepared.kernel.fuses

    def launch() -> None:
        if by.descriptors:
            triton.set_allocator(_scratch)
        with on_device(a.device):
            function[grid](*arguments, **prepared.constants, **compiled)

    # The allocator is set only for this call, since other users of Triton have their own.
    contextvars.copy_context().run(launch)
    return wire


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory for descriptors, 128 bytes each, from torch's pool in stream order."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; a small number for tests in the interpreter."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def arch_here(device: torch.device) -> str:
    """As ``arch_of``; for tests, that of a GPU if Triton interprets."""
    return "sm_90" if interpreting() else arch_of(device)


def arch_of(device: torch.device) -> str:
    """Return a name such as ``sm_90`` or ``gfx942``, also for a GPU that is not supported."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
