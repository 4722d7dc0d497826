"""The matmul that encodes its result, in Triton's interpreter.

Its wire is that of the codec's aten form for the result of a plain matmul. Operands are small whole
numbers: their products and sums are exact in float32 in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreted
from torch import Tensor

from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import Fp8Grid
from commpass.codecs.block.packing import unpack
from commpass.lowering.gpu import matmul_launch, matmul_sizes, matmul_supported
from commpass.lowering.matmul import BATCHED, GROUPED, Product
from commpass.lowering.pointwise import Epilogue, Operation


@dataclass(frozen=True)
class Case:
    """``m x k @ k x n`` for some ranks."""

    spec: str
    m: int = 32
    n: int = 256
    k: int = 48
    ranks: int = 2
    dtype: torch.dtype = torch.bfloat16
    a_by_rows: bool = True
    b_by_rows: bool = True
    bias: bool = False
    epilogue: Epilogue = field(default_factory=Epilogue)
    by: dict[str, Any] = field(default_factory=dict)


RELU = Epilogue((), (Operation("relu", ("v0",), torch.bfloat16),))
LATER = {"descriptors": True, "deferred": 8}
"""Tiles are encoded during the next one, 8 rows in each step."""
SMALL = {"block_m": 16, "block_n": 256, "block_k": 32, "num_warps": 4, "num_stages": 2}


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    a = torch.randint(-4, 5, (case.m, case.k)).to(case.dtype)
    b = torch.randint(-4, 5, (case.k, case.n)).to(case.dtype)
    bias = torch.randint(-8, 9, (case.n,)).to(torch.bfloat16)
    a = a if case.a_by_rows else a.t().contiguous().t()
    b = b if case.b_by_rows else b.t().contiguous().t()
    return a, b, bias


def kernel_wire(case: Case) -> Tensor:
    """Return the output of the kernel. Called in the interpreter."""
    a, b, bias = operands(case)
    return matmul_launch.run(
        [a, b, bias] if case.bias else [a, b],
        Product(codec(case.spec), case.ranks, bias=case.bias, epilogue=case.epilogue),
        by=matmul_sizes.Configuration(**{**SMALL, **case.by}),
    )


def plain_result(case: Case) -> Tensor:
    """Return the result of the matmul alone, rounded as without fusion."""
    a, b, bias = operands(case)
    exact = a.double() @ b.double()
    exact = (exact + bias.double() if case.bias else exact).to(case.dtype)
    return F.relu(exact) if case.epilogue == RELU else exact


def plain_wire(case: Case) -> Tensor:
    """Return shards of the result, encoded by the codec itself."""
    return codec(case.spec).encode_rows(plain_result(case).reshape(case.ranks, -1))


EXACT = [
    Case("int8"),
    Case("int8", m=48, n=512, k=40, ranks=3),
    Case("int8(block=128)", n=384, by={"block_n": 128}),
    Case("int8(stored=bf16)", b_by_rows=False),
    Case("int8(stored=pow2)", a_by_rows=False, b_by_rows=False),
    Case("int8(static=0.5)"),
    Case("int8(rounding=stochastic)"),
    Case("int6"),
    Case("int4", dtype=torch.float16),
    Case("int2"),
    Case("fp8"),
    Case("fp8(form=e5m2)", b_by_rows=False),
    Case("int4", m=48, ranks=3, by={"cuts": 2}),
    Case("table(bits=4)", m=128, by={"block_m": 64, "cuts": 4}),
    Case("int8(block=64)", n=192, by={"block_n": 128, "block_k": 64}),
    Case("int8", m=64, n=512, by={"block_m": 32, "cuts": 2, "group": 1}),
    Case("int4", m=40, n=384, ranks=2, bias=True),
    Case("int8", bias=True, epilogue=RELU),
    Case("int8", k=64, by={"descriptors": True}),
    Case("int8", m=48, k=40, bias=True, a_by_rows=False, by={"descriptors": True}),
    Case("int8", k=40, b_by_rows=False, by={"descriptors": True, "flatten": False}),
]

LATER_EXACT = [
    # A program has many tiles or one, and the last program may have none.
    Case("int8", m=192, n=512, k=128, ranks=3, by=LATER),
    Case("int8", m=48, k=200, bias=True, epilogue=RELU, ranks=3, by=LATER),
    Case("int4", m=40, n=768, k=128, ranks=5, dtype=torch.float16, by=LATER),
    Case("fp8", m=16, k=192, ranks=1, by={**LATER, "block_m": 32}),
    Case("table(bits=4)", m=128, k=1000, a_by_rows=False, b_by_rows=False, by=LATER),
    Case("int8(rounding=stochastic)", m=96, n=512, k=128, by=LATER | {"block_m": 8}),
]

NEAR = [
    Case("rotated"),
    Case("rotated(bits=4)", bias=True, b_by_rows=False),
    Case("table"),
    Case("taco"),
    Case("tahquant"),
    Case("rotated", m=96, n=512, k=128, ranks=3, by=LATER),
    Case("rotated(bits=4)", m=48, k=200, bias=True, b_by_rows=False, by=LATER),
    Case("table(scale=lsq)", m=64, k=128, by=LATER),
]


def name_of(case: Case) -> str:
    plain = Case("")
    told = [f"{k}={v}" for k, v in vars(case).items() if v != getattr(plain, k) and k != "spec"]
    return " ".join([case.spec, *told])


@pytest.mark.rest_slow(1)
@pytest.mark.few(3)
@pytest.mark.parametrize("case", EXACT, ids=name_of)
def test_wire_is_that_of_the_codec(case: Case) -> None:
    assert torch.equal(interpreted(kernel_wire, case), plain_wire(case))


@pytest.mark.rest_slow(2)
@pytest.mark.parametrize("case", LATER_EXACT, ids=name_of)
def test_wire_is_the_same_if_a_tile_is_encoded_during_the_next(case: Case) -> None:
    test_wire_is_that_of_the_codec(case)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("case", NEAR, ids=name_of)
def test_sums_in_another_order_are_nearly_the_same(case: Case) -> None:
    """The last bits of rotations differ: few codes do, and by one."""
    coder, wire, wanted = codec(case.spec), interpreted(kernel_wire, case), plain_wire(case)
    numel = case.m * case.n // case.ranks
    apart = (codes_of(coder, wire, numel) - codes_of(coder, wanted, numel)).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01
    got, want = (coder.decode_rows(each, numel, torch.bfloat16) for each in (wire, wanted))
    assert torch.isclose(got, want, rtol=1e-4, atol=float(want.std()) / 100).float().mean() > 0.98


def codes_of(coder: BlockCodec, wire: Tensor, numel: int) -> Tensor:
    """Return codes as whole numbers in the order of their values."""
    raw = wire[:, : numel * coder.grid.bits // 8].reshape(-1, coder.block * coder.grid.bits // 8)
    codes = unpack(raw, coder.grid.bits).to(torch.int32)
    signed = isinstance(coder.grid, Fp8Grid)
    return torch.where(codes >= 128, 128 - codes, codes) if signed else codes


def test_non_finite_values_stay_so() -> None:
    """This applies to the blocks with an Inf or NaN, and to no other."""
    wire = interpreted(spoiled_wire)
    decoded = codec("int8").decode_rows(wire, 16 * 256, torch.bfloat16)
    finite = decoded.isfinite().reshape(32, 256)
    assert not finite[[3, 20]].any()
    assert finite[[*range(3), *range(4, 20), *range(21, 32)]].all()


def spoiled_wire() -> Tensor:
    a, b, _ = operands(Case("int8"))
    a[3, 0], a[20, 5] = float("inf"), float("nan")
    by = matmul_sizes.Configuration(**SMALL)
    return matmul_launch.run([a, b], Product(codec("int8"), 2), by=by)


PROBLEM = matmul_sizes.Problem(m=4096, n=4096, k=4096, ranks=8)
LINEAR = matmul_sizes.Matmul(torch.bfloat16, b_by_rows=False)

REFUSED = [
    ("int8", LINEAR, replace(PROBLEM, n=4000), {}, "4000 columns are no multiple"),
    ("int8", LINEAR, replace(PROBLEM, m=4100), {}, "4100 rows for 8 ranks: shards begin inside"),
    ("int8(block=512)", LINEAR, PROBLEM, {}, "blocks of 512 values, wider than a tile"),
    ("int8(block=24)", LINEAR, PROBLEM, {}, "powers of two"),
    ("equarx", LINEAR, PROBLEM, {}, "are not consecutive values"),
    ("exponent", LINEAR, PROBLEM, {}, "no block codec"),
    ("int8", replace(LINEAR, dtype=torch.float32), PROBLEM, {}, "float32 operands"),
    ("int8", replace(LINEAR, bias=torch.int8), PROBLEM, {}, "a bias in int8"),
    ("int8", LINEAR, PROBLEM, {"arch": "sm_75"}, "sm_75: no kernels"),
    ("int8", LINEAR, replace(PROBLEM, m=1 << 20), {}, "kernels count to 2^31"),
    ("int8", LINEAR, replace(PROBLEM, k=0), {}, "nothing to multiply"),
]


@pytest.mark.parametrize(("spec", "matmul", "problem", "others", "reason"), REFUSED)
def test_unfused_products_say_why(
    spec: str,
    matmul: matmul_sizes.Matmul,
    problem: matmul_sizes.Problem,
    others: dict[str, Any],
    reason: str,
) -> None:
    assert reason in matmul_supported.unsupported_reason(codec(spec), matmul, problem, **others)


@pytest.mark.parametrize(
    "spec", ["int8", "int6", "int4", "int2", "fp8", "rotated", "table", "taco"]
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_fused_products_have_tiles_of_whole_blocks(spec: str, arch: str) -> None:
    coder = codec(spec)
    assert isinstance(coder, BlockCodec)
    for problem in (PROBLEM, replace(PROBLEM, m=512, n=1536), replace(PROBLEM, n=128 * 3 * 256)):
        assert matmul_supported.unsupported_reason(coder, LINEAR, problem, arch=arch) == ""
        for by in matmul_sizes.configurations(coder, problem, arch):
            assert by.block_n % coder.block == 0
            shared = matmul_sizes.shared_bytes(by, coder, arch)
            assert shared <= matmul_sizes.SHARED[arch]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_tiles_to_be_measured_have_parts_or_as_few_rows_as_their_registers_hold(arch: str) -> None:
    coder, problem = (
        codec("int8(rounding=stochastic)"),
        replace(PROBLEM, m=64, n=256, k=320, ranks=1),
    )
    found = matmul_sizes.configurations(coder, problem, arch)
    assert found[0].deferred
    assert all(by.block_m == 64 for by in found if not by.deferred)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_tiles_of_operands_without_descriptors_are_encoded_at_their_end(arch: str) -> None:
    coder = codec("int8")
    found = matmul_sizes.configurations(coder, PROBLEM, arch, aligned=False)
    assert len(found) > 1
    assert not any(by.descriptors or by.deferred for by in found)


def test_operands_that_lie_neither_by_rows_nor_by_columns_are_refused() -> None:
    matrix = torch.zeros(8, 6)
    assert matmul_launch.lies_by_rows(matrix) is True
    assert matmul_launch.lies_by_rows(matrix.t()) is False
    assert matmul_launch.lies_by_rows(matrix[:, ::2]) is None
    assert matmul_launch.lies_by_rows(torch.zeros(1, 6).expand(8, 6)) is None


def test_descriptors_only_where_operands_are_aligned() -> None:
    by = matmul_sizes.Configuration(128, 256, 64, 8, 3, descriptors=True)
    matrix = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert matmul_launch.for_alignment(by, matrix, matrix) == by
    assert not matmul_launch.for_alignment(by, matrix[:, 1:], matrix).descriptors
    narrow = torch.zeros(8, 60, dtype=torch.bfloat16)
    assert not matmul_launch.for_alignment(by, matrix, narrow).descriptors


@pytest.mark.parametrize(
    ("k", "rows"), [(4096, 8), (18 * 64, 8), (18 * 64 - 64, 16), (10 * 64, 16), (384, 32), (320, 0)]
)
def test_tile_of_few_steps_is_encoded_at_its_end(k: int, rows: int) -> None:
    """A step of 64 values along k encodes ``rows`` of 128 rows, except in the first two steps."""
    by = matmul_sizes.configuration(codec("int8"), replace(PROBLEM, k=k), "sm_90", LINEAR)
    assert (by.block_m, by.block_k, by.deferred) == (128, 64, rows)
    if rows:
        fewer = replace(PROBLEM, k=(128 // rows + 1) * 64)
        with pytest.raises(ValueError, match="too few steps"):
            matmul_launch.call(codec("int8"), LINEAR, fewer, by, matmul_launch.Steps(k, k), {})


def test_only_aligned_products_without_groups_are_encoded_later() -> None:
    def rows(arch: str, form: str = "", **more: bool) -> int:
        matmul, problem = replace(LINEAR, form=form), replace(PROBLEM, batches=8 if form else 1)
        return matmul_sizes.configuration(codec("int8"), problem, arch, matmul, **more).deferred

    assert rows("sm_90") == rows("sm_100") == rows("sm_90", BATCHED) == 8
    assert rows("sm_80") == rows("gfx942") == rows("sm_90", GROUPED) == 0
    assert rows("sm_90", aligned=False) == 0
