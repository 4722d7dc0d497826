"""The matmul that decodes its left operand, in Triton's interpreter and compiled for GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from interpreter import interpreted
from tiers import rarely
from torch import Tensor

from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.lowering.decode_matmul import DecodedRows
from commpass.lowering.gpu import decode_matmul, decode_matmul_launch
from commpass.lowering.gpu.matmul_sizes import SHARED
from commpass.lowering.gpu.source import load
from commpass.lowering.inspect.architectures import ARCHITECTURES
from commpass.lowering.inspect.compiled import compile_kernel
from commpass.lowering.inspect.matmuls import of_decode_matmul

RANKS = 2
REGISTERS = 65536
"""Of a processor."""


@dataclass(frozen=True)
class Case:
    """``RANKS`` wires of ``lines`` rows of ``blocks`` blocks, times a matrix with ``n`` columns."""

    spec: str
    lines: int = 20
    blocks: int = 2
    n: int = 40
    dtype: torch.dtype = torch.bfloat16
    b_by_rows: bool = True
    bias: bool = False
    block_m: int = 16
    block_k: int = 32
    kind: str = "heavy"


def coder_of(case: Case) -> BlockCodec:
    coder = codec(case.spec)
    assert isinstance(coder, BlockCodec)
    return coder


def operands(case: Case) -> tuple[list[Tensor], DecodedRows]:
    coder = coder_of(case)
    k = case.blocks * coder.block
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(RANKS * case.lines, k, generator=generator)
    if case.kind == "heavy":  # tails, rows of zeros, and rows of very different sizes
        x = x**5
        x[3] = 0
        x[5] *= 1e-30
        x[7] *= 1e3
    if case.kind == "nonfinite":
        x[2, 5], x[4, k - 1], x[6, 0] = float("inf"), float("nan"), -float("inf")
    wire = coder.encode_rows(x.to(case.dtype).reshape(RANKS, -1))
    b = torch.randn(k, case.n, generator=generator).to(case.dtype)
    b = b if case.b_by_rows else b.t().contiguous().t()
    bias = torch.randn(case.n, generator=generator).to(case.dtype)
    rows = DecodedRows(coder, case.lines * k, case.dtype, case.bias)
    return [wire, b, *([bias] if case.bias else [])], rows


def kernel_result(case: Case) -> Tensor:
    """Return the output of the kernel. Called in the interpreter."""
    tensors, rows = operands(case)
    block_k = min(case.block_k, decode_matmul.part_of_block(coder_of(case)))
    by = decode_matmul.Tile(case.block_m, 32, block_k, num_warps=4, num_stages=2, group=2)
    return decode_matmul_launch.run(tensors, rows, by=by)


def exact_result(case: Case) -> tuple[Tensor, Tensor]:
    """Return the result in float64 and the sum of the sizes of its terms."""
    (wire, b, *bias), rows = operands(case)
    a = rows.codec.decode_rows(wire, rows.numel, case.dtype).to(case.dtype)
    a, b = a.reshape(-1, b.shape[0]).double(), b.double()
    added = bias[0].double() if bias else torch.zeros(case.n).double()
    return a @ b + added, a.abs() @ b.abs() + added.abs()


CASES = [
    Case("int8"),
    Case("int8", lines=16, blocks=1, n=32),
    Case("fp8"),
    Case("int8", bias=True, b_by_rows=False, block_k=64),
    Case("int4", dtype=torch.float16, bias=True, b_by_rows=False),
    Case("fp8(form=e5m2)", dtype=torch.float16),
    Case("int4"),  # half a block in two steps
    Case("int8(block=64)", blocks=5, n=1),
    Case("int2(block=64)", block_k=16),
    Case("int2(block=64)", block_m=128, block_k=16),  # more rows than there are
    Case("int8(stored=bf16)"),
    Case("int8(stored=pow2)", blocks=3),
    Case("int8(static=0.5)"),
    Case("mxfp8"),
]


@pytest.mark.rest_slow(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_the_product_of_decoded_values(case: Case) -> None:
    """The result is rounded once. A sum of k terms in float32 is off by at most k units of rounding
    of their sizes."""
    got, (wanted, terms) = interpreted(kernel_result, case).double(), exact_result(case)
    rounding = torch.finfo(case.dtype).eps / 2
    depth = case.blocks * coder_of(case).block
    within = rounding * wanted.abs() + depth * 2**-24 * terms + torch.finfo(case.dtype).tiny
    assert got.shape == wanted.shape == (RANKS * case.lines, case.n)
    largest = torch.finfo(case.dtype).max
    held = wanted.abs() < largest
    assert held.float().mean() > 0.9
    assert ((got - wanted).abs() <= within)[held].all()
    if case.kind == "heavy" and not case.bias:
        assert (got[3] == 0).all()


@pytest.mark.parametrize("spec", ["int8", "fp8", "int4"])
def test_non_finite_values_stay_so(spec: str) -> None:
    """This applies to the rows with an Inf or NaN, and to no other."""
    case = Case(spec, kind="nonfinite")
    finite = interpreted(kernel_result, case).isfinite()
    assert not finite[[2, 4, 6]].any()
    assert finite[[0, 1, 3, 5, *range(7, RANKS * case.lines)]].all()


# --- what is refused ------------------------------------------------------------------------------


PROBLEM = decode_matmul.Problem(m=4096, n=128, k=4096, ranks=8)
MATMUL = decode_matmul.Matmul(torch.bfloat16)


@pytest.mark.parametrize(
    ("spec", "matmul", "problem", "arch", "said"),
    [
        ("rotated", MATMUL, PROBLEM, "sm_90", "a rotated block is decoded as a whole"),
        ("int6", MATMUL, PROBLEM, "sm_90", "codes of 6 bits are stored in several parts"),
        ("nvfp4", MATMUL, PROBLEM, "sm_90", "stored in another order"),
        ("exponent", MATMUL, PROBLEM, "sm_90", "no block codec"),
        ("mxfp4", MATMUL, PROBLEM, "sm_90", "stored in another order"),
        ("equarx", MATMUL, PROBLEM, "sm_90", "stored in another order"),
        ("int8(block=8)", MATMUL, PROBLEM, "sm_90", "blocks of 8 bytes"),
        ("int8", MATMUL, replace(PROBLEM, k=4000), "sm_90", "blocks cross rows"),
        ("int8", MATMUL, replace(PROBLEM, m=4097), "sm_90", "wires begin inside a row"),
        ("int8", MATMUL, replace(PROBLEM, n=0), "sm_90", "nothing to multiply"),
        ("int8", MATMUL, replace(PROBLEM, m=2**19), "sm_90", "kernels count to 2^31"),
        ("int8", MATMUL, PROBLEM, "sm_75", "sm_75: no kernels"),
        ("int8", decode_matmul.Matmul(torch.float32), PROBLEM, "sm_90", "float32 operands"),
    ],
)
def test_reason_says_why_a_matmul_does_not_decode(spec, matmul, problem, arch, said) -> None:
    assert said in decode_matmul.unsupported_reason(codec(spec), matmul, problem, arch=arch)


def test_largest_problem_is_supported() -> None:
    largest = replace(PROBLEM, m=2**19 - 8)
    assert not decode_matmul.unsupported_reason(codec("int8"), MATMUL, largest, arch="sm_90")


@pytest.mark.parametrize("n", [1, 2**14])
@pytest.mark.parametrize("arch", SHARED)
def test_grid_is_within_the_limit(arch: str, n: int) -> None:
    """A grid has at most 2^31 - 1 programs; AMD counts its threads in 32 bits."""
    coder = coder_of(Case("int8(block=16)"))
    problem = decode_matmul.Problem(m=2**27 - 64 if n == 1 else 2**17 - 64, n=n, k=16, ranks=64)
    assert not decode_matmul.unsupported_reason(coder, MATMUL, problem, arch=arch)
    by = decode_matmul.tile_of(coder, problem, arch)
    programs = by.count(problem)
    assert programs < 2**31
    assert programs * by.num_warps * ARCHITECTURES[arch].warp < 2**32


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["int8", *map(rarely, ("int4", "int2", "fp8"))])
@pytest.mark.parametrize("arch", ["sm_90", *map(rarely, ("sm_80", "sm_100", "gfx942"))])
def test_no_tile_spills(arch: str, spec: str) -> None:
    check_fits(arch, spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["int4", "int2", "int2(block=128)"])
def test_parts_of_a_byte_do_not_spill_in_narrow_registers(spec: str) -> None:
    """Each part has addresses of its own. A card without 8-bit floats has the smallest tiles."""
    check_fits("sm_80", spec)


@pytest.mark.parametrize("rows", [8, 64, 512])
def test_eight_warps_decode_parts_of_a_byte(rows: int) -> None:
    problem = decode_matmul.Problem(rows * 8, 128, 4096, 8)
    tiles = [decode_matmul.tile_of(codec(spec), problem, "sm_80") for spec in ("int8", "int2")]
    assert [(tile.block_m, tile.num_warps) for tile in tiles] == [(64, 4), (128, 8)]


def check_fits(arch: str, spec: str) -> None:
    one = of_decode_matmul(codec(spec), torch.bfloat16, 8, arch)
    made = compile_kernel(
        load(one.source),
        one.signature,
        one.constants,
        arch,
        num_warps=one.num_warps,
        num_stages=one.num_stages,
        hints=one.hints,
        enable_fp_fusion=one.fuses,
    )
    threads = one.num_warps * ARCHITECTURES[arch].warp
    assert made.spills == 0
    assert made.shared <= SHARED[arch]
    if arch != "gfx942":
        assert made.registers * threads <= REGISTERS
