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
from commpass.lowering.gpu.matmul_encode import Kernel, kernel
from commpass.lowering.gpu.matmul_sizes import Configuration, Matmul, Problem, configuration
from commpass.lowering.gpu.matmul_supported import TOO_MANY, unsupported_reason
from commpass.lowering.gpu.source import load
from commpass.lowering.matmul import HELD, Operands, Product, operands_of


@dataclass(frozen=True)
class Call:
    """One call of a kernel: integers and compile-time constants by name, and the number of tiles.

    Tensors are also passed by name: ``a``, ``b``, ``output`` and, if the kernel has them, ``bias``,
    ``offsets`` and ``other_1``, ``other_2``, ...
    """

    kernel: Kernel
    numbers: dict[str, int]
    constants: dict[str, Any]
    by: Configuration
    tiles: int

    def grid(self, processors: int) -> tuple[int]:
        return (min(self.tiles, processors * self.by.programs),)


@dataclass(frozen=True)
class Steps:
    """The numbers of values from one line of ``a``, and of ``b``, to the next, and from the matrix
    of one batch to that of the next."""

    a: int
    b: int
    a_batch: int = 0
    b_batch: int = 0


def call(
    codec: BlockCodec,
    matmul: Matmul,
    problem: Problem,
    by: Configuration,
    steps: Steps,
    casts: Mapping[str, int],
) -> Call:
    """Return the call of a kernel; ``casts`` is as ``launch.casts`` returns it.

    Raises ValueError if a tile has too few steps for the parts of the tile before.
    """
    if by.deferred and by.deferred * problem.free_steps(by) < by.block_m:
        raise ValueError(f"{by.block_m // by.deferred} parts of a tile, and too few steps for them")
    generated = kernel(codec, matmul, by)
    numel = problem.rows * problem.n
    numbers = {
        "rows": problem.rows,
        "columns": problem.n,
        "depth": problem.k,
        "ranks": problem.ranks,
        "a_step": steps.a,
        "b_step": steps.b,
        "a_batch": steps.a_batch,
        "b_batch": steps.b_batch,
        "batches": problem.batches,
        "height": problem.height,
        "segment": problem.segment(matmul.form),
        "segments": problem.m // problem.segment(matmul.form),
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
        "DEFERRED": by.deferred,
        "SIZE": codec.block,
        "PARTS": 8 // widths(codec.grid.bits)[0],
        "WHOLE_K": problem.k % by.block_k == 0,
        "GROUPS": triton.next_power_of_2(problem.batches + 2),
        **casts,
    }
    return Call(
        generated,
        {name: numbers[name] for name in generated.signature if name in numbers},
        {name: constants[name] for name in generated.constants},
        by,
        problem.tiles(by, matmul.form),
    )


# --- operands -------------------------------------------------------------------------------------


def lies_by_rows(operand: Tensor) -> bool | None:
    """Return whether the last dimension of matrices is contiguous (True) or the one before it
    (False); None if neither is, or if their lines overlap."""
    (down, along), (height, width) = operand.stride()[-2:], operand.shape[-2:]
    if along == 1 and down >= width:
        return True
    return False if down == 1 and along >= height else None


def step_of(operand: Tensor) -> int:
    """Return the number of values from one line to the next."""
    down, along = operand.stride()[-2:]
    return down if lies_by_rows(operand) else along


def batch_step_of(operand: Tensor) -> int:
    """Return the number of values from one matrix to the next: 0 if there is one, or if all are the
    same."""
    return operand.stride(0) if operand.dim() == 3 and operand.shape[0] > 1 else 0


def steps_of(a: Tensor, b: Tensor) -> Steps:
    return Steps(step_of(a), step_of(b), batch_step_of(a), batch_step_of(b))


def unsupported_layout(operands: Operands) -> str:
    """Return why a kernel cannot read the operands as they lie in memory, or "" if it can."""
    for each in (operands.a, operands.b):
        if lies_by_rows(each) is None:
            return "an operand is stored neither by rows nor by columns"
        lines = each.shape[-2] if lies_by_rows(each) else each.shape[-1]
        if step_of(each) * lines >= TOO_MANY:
            return "the lines of an operand lie far apart: kernels count to 2^31"
    if operands.offsets is not None and operands.offsets.dtype != torch.int32:
        return "offsets that are not int32"
    further = (operands.bias, operands.offsets, *operands.others)
    if not all(each.is_contiguous() for each in further if each is not None):
        return "a further operand is not contiguous"
    return ""


def matmul_of(operands: Operands, product: Product) -> Matmul:
    """Return the ``Matmul`` of operands for which ``unsupported_layout`` returns ""."""
    return Matmul(
        operands.a.dtype,
        a_by_rows=bool(lies_by_rows(operands.a)),
        b_by_rows=bool(lies_by_rows(operands.b)),
        bias=operands.bias.dtype if operands.bias is not None else None,
        epilogue=product.epilogue,
        form=product.form,
    )


def problem_of(operands: Operands, product: Product) -> Problem:
    m, n, k, batches = map(int, operands.sizes)
    return Problem(m, n, k, product.rows, batches)


def for_alignment(by: Configuration, a: Tensor, b: Tensor) -> Configuration:
    """Return the configuration, without descriptors if operands are not aligned. A tile is then
    encoded at its end."""
    fits = not by.descriptors or are_aligned(a, b)
    return by if fits else replace(by, descriptors=False, deferred=0)


def are_aligned(a: Tensor, b: Tensor) -> bool:
    """Whether descriptors can load the operands: their start, their lines and their matrices must
    be at multiples of 16 bytes, and matrices must not be the same."""
    apart = [step_of(each) for each in (a, b)]
    batched = [each for each in (a, b) if each.dim() == 3]
    apart += [batch_step_of(each) or 1 for each in batched if each.shape[0] > 1]
    begin = [each.storage_offset() for each in (a, b)]
    return all(number * a.itemsize % 16 == 0 for number in (*apart, *begin))


# --- launch ---------------------------------------------------------------------------------------


def run(
    tensors: Sequence[Tensor],
    product: Product,
    *,
    by: Configuration | None = None,
    graph: bool = False,
    as_in_graph: bool = False,
) -> Tensor:
    """Return the wires ``[ranks, wire_bytes]`` of a product, with its operands in the order of the
    operator (``lowering.matmul``).

    With ``graph``, the call is traced for Inductor, which launches the kernel itself and allocates
    memory for descriptors. With ``as_in_graph`` it is compiled as Inductor compiles it.
    """
    given, codec = operands_of(product, tensors), product.codec
    a, b = given.a, given.b
    why, arch = unsupported_layout(given), arch_here(a.device)
    if not why:
        matmul, problem = matmul_of(given, product), problem_of(given, product)
        why = unsupported_reason(codec, matmul, problem, arch=arch)
    if why:
        raise CommpassError(f"no kernel: {why}")
    assert isinstance(codec, BlockCodec)
    width = codec.wire_bytes(problem.rows * problem.n, torch.float32)
    wire = a.new_empty((product.rows, width), dtype=torch.uint8)
    aligned = are_aligned(a, b)
    by = for_alignment(by or configuration(codec, problem, arch, matmul, aligned=aligned), a, b)
    prepared = call(codec, matmul, problem, by, steps_of(a, b), casts(a.device))
    named: dict[str, Any] = {"a": a, "b": b, "bias": given.bias, "offsets": given.offsets}
    named |= {f"other_{number}": each for number, each in enumerate(given.others, 1)}
    function, grid = load(prepared.kernel.source), prepared.grid(_processors(a.device))
    named |= {"output": wire} | prepared.numbers
    if by.deferred:
        named[HELD] = a.new_empty(grid[0] * 2 * by.block_m * by.block_n)
    arguments = [named[name] for name in prepared.kernel.signature]
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
