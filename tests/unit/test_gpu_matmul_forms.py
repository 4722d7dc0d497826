"""Batched and grouped matmuls that encode their results, and epilogues, in Triton's interpreter.

The wire is that of the codec's aten form for the result of plain torch. Operands are small whole
numbers: their products and sums are exact in float32 in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreted
from test_gpu_matmul import SMALL
from torch import Tensor

from commpass.codecs import codec
from commpass.lowering import matmul, pointwise
from commpass.lowering.gpu import matmul_launch, matmul_sizes, matmul_supported
from commpass.lowering.matmul import BATCHED, GROUPED, Product
from commpass.lowering.pointwise import BATCH, COLUMN, VALUE, Epilogue, Operand, Operation

BF16, F32 = torch.bfloat16, torch.float32


def matrices(*shape: int, by_rows: bool = True, dtype: torch.dtype = BF16) -> Tensor:
    """Return small whole numbers; the last two dimensions are stored by rows or by columns."""
    whole = torch.randint(-4, 5, shape).to(dtype)
    return whole if by_rows else whole.transpose(-2, -1).contiguous().transpose(-2, -1)


def wire_of_kernel(tensors: list[Tensor], product: Product, by: dict[str, Any]) -> Tensor:
    """Return the output of the kernel. Called in the interpreter."""
    made = matmul_sizes.Configuration(**{**SMALL, **by})
    return matmul_launch.run(tensors, product, by=made)


def encoded(values: Tensor, product: Product) -> Tensor:
    return product.codec.encode_rows(values.reshape(product.rows, -1))


# --- batched --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batched:
    """``batches`` products of ``height x k @ k x n``."""

    spec: str
    batches: int = 2
    height: int = 64
    n: int = 256
    k: int = 40
    ranks: int = 2
    dtype: torch.dtype = BF16
    a_by_rows: bool = True
    b_by_rows: bool = True
    bias: bool = False
    by: dict[str, Any] = field(default_factory=dict)

    def operands(self) -> list[Tensor]:
        torch.manual_seed(1)
        e, t, k, n = self.batches, self.height, self.k, self.n
        a = matrices(e, t, k, by_rows=self.a_by_rows, dtype=self.dtype)
        b = matrices(e, k, n, by_rows=self.b_by_rows, dtype=self.dtype)
        bias = [torch.randint(-8, 9, (e, 1, n)).to(BF16)] if self.bias else []
        return [a, b, *bias]

    @property
    def product(self) -> Product:
        return Product(codec(self.spec), self.ranks, BATCHED, self.bias)


def exact_batched(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    a, b, *bias = tensors
    exact = torch.bmm(a.double(), b.double())
    return (exact + bias[0].double() if bias else exact).to(dtype)


DESCRIPTORS = {"descriptors": True}
LATER = {"descriptors": True, "deferred": 8}
"""Tiles are encoded during the next one, 8 rows in each step."""
BATCHES = [
    Batched("int8", batches=3, height=128, by={"block_m": 64}),  # one in shards of two ranks
    Batched("int8"),
    Batched("int8", batches=3, ranks=1, n=512, by={"block_m": 32, "cuts": 2}),
    Batched("int4", batches=3, ranks=2, height=128, by={"block_m": 64, "group": 2}),
    Batched("int8", batches=4, ranks=8, height=128, by={"block_m": 32}),
    Batched("fp8", b_by_rows=False),
    Batched("int6", a_by_rows=False, b_by_rows=False, dtype=torch.float16),
    Batched("int8", bias=True, by={"block_m": 64, "block_k": 64}),
    Batched("int8(stored=bf16)", bias=True, batches=3, ranks=6, height=128),
    Batched("int8", k=64, by=DESCRIPTORS),
    Batched("int8", bias=True, a_by_rows=False, by=DESCRIPTORS),
    Batched("int4", batches=3, ranks=2, height=128, b_by_rows=False, by=DESCRIPTORS),
    Batched("int8(block=64)", n=192, by={"block_n": 128}),
    Batched("int8", batches=3, height=128, n=512, k=128, bias=True, by=LATER),
    Batched("int4", batches=3, height=128, k=200, b_by_rows=False, by=LATER),
]


def name_of(case: Any) -> str:
    plain = type(case)("")
    told = [f"{k}={v}" for k, v in vars(case).items() if v != getattr(plain, k) and k != "spec"]
    return " ".join([case.spec, *told])


@pytest.mark.rest_slow(2)
@pytest.mark.few(4)
@pytest.mark.parametrize("case", BATCHES, ids=name_of)
def test_batched_wire_is_that_of_the_codec(case: Batched) -> None:
    tensors = case.operands()
    wire = interpreted(wire_of_kernel, tensors, case.product, case.by)
    assert torch.equal(wire, encoded(exact_batched(tensors, case.dtype), case.product))


def strided_wire(spread: bool) -> Tensor:
    """Return the wire of batches that are one matrix, or that lie ``spread`` in memory."""
    tensors = strided(spread)
    return wire_of_kernel(tensors, Product(codec("int8"), 2, BATCHED), DESCRIPTORS)


def strided(spread: bool) -> list[Tensor]:
    a, b = Batched("int8", k=64).operands()
    if not spread:
        return [a, b[:1].expand(2, 64, 256)]
    room = a.new_zeros(2, 3, 64, 64)
    room[:, 1] = a
    return [room[:, 1], b]


@pytest.mark.parametrize("spread", [False, True])
def test_batches_may_lie_anywhere(spread: bool) -> None:
    wire = interpreted(strided_wire, spread)
    assert torch.equal(wire, codec("int8").encode_rows(torch.bmm(*strided(spread)).view(2, -1)))


def test_batches_that_are_one_matrix_have_no_descriptors() -> None:
    by = matmul_sizes.Configuration(128, 256, 64, 8, 3, descriptors=True)
    a, b = strided(True)
    assert matmul_launch.for_alignment(by, a, b) == by
    assert not matmul_launch.for_alignment(by, *strided(False)).descriptors
    one = a[:1]
    assert matmul_launch.for_alignment(by, one.as_strided(one.shape, (3, 64, 1)), b[:1]) == by


# --- grouped --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grouped:
    """A product whose rows end, for each group, at ``offsets``."""

    spec: str
    offsets: tuple[int, ...] = (20, 20, 75, 128)
    m: int = 128
    n: int = 256
    k: int = 40
    ranks: int = 2
    a_by_rows: bool = True
    b_by_rows: bool = True
    by: dict[str, Any] = field(default_factory=dict)

    def operands(self) -> list[Tensor]:
        torch.manual_seed(1)
        a = matrices(self.m, self.k, by_rows=self.a_by_rows)
        b = matrices(len(self.offsets), self.k, self.n, by_rows=self.b_by_rows)
        return [a, b, torch.tensor(self.offsets, dtype=torch.int32)]

    @property
    def product(self) -> Product:
        return Product(codec(self.spec), self.ranks, GROUPED)


def exact_grouped(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    found, begin = torch.zeros(a.shape[0], b.shape[-1], dtype=torch.float64), 0
    for matrix, end in zip(b, offsets.tolist(), strict=True):
        found[begin:end] = a[begin:end].double() @ matrix.double()
        begin = end
    return found.to(a.dtype)


GROUPS = [
    Grouped("int8"),
    Grouped("int8", ranks=4, by={"block_m": 64}),
    Grouped("int8", ranks=1, offsets=(128, 128, 128)),
    Grouped("int8", offsets=(0, 0, 0, 0, 128), b_by_rows=False),
    Grouped("int4", offsets=(16, 32, 48, 64, 80, 96, 112, 128)),
    Grouped("int8", offsets=(17, 60), by={"block_m": 32, "cuts": 2}),
    Grouped("int8", offsets=(17, 60), by={"block_m": 64, "cuts": 4}),
    Grouped("int8", offsets=(0, 0, 0)),
    Grouped("fp8", offsets=(64, 65, 66, 127, 128), a_by_rows=False, by={"group": 2}),
    Grouped("int8", m=144, ranks=3, offsets=(47, 49, 100, 140), n=512, by={"block_m": 32}),
    Grouped("int8", k=64, by=DESCRIPTORS),
    Grouped("int8", offsets=(31, 70, 90), b_by_rows=False, by=DESCRIPTORS),
    Grouped("int6", a_by_rows=False, by={**DESCRIPTORS, "flatten": False}),
]


@pytest.mark.rest_slow(2)
@pytest.mark.few(4)
@pytest.mark.parametrize("case", GROUPS, ids=name_of)
def test_grouped_wire_is_that_of_the_codec(case: Grouped) -> None:
    """Rows behind the last offset are zero."""
    tensors = case.operands()
    wire = interpreted(wire_of_kernel, tensors, case.product, case.by)
    assert torch.equal(wire, encoded(exact_grouped(*tensors), case.product))


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("last", [64, 60])
def test_groups_do_not_see_the_matrices_of_others(last: int) -> None:
    """Neither infinite weights, nor NaN behind the last offset."""
    a, b, _ = Grouped("int8").operands()
    offsets = torch.tensor([20, 40, 40, last], dtype=torch.int32)
    a, spoiled = a[:64].clone(), b.clone()
    spoiled[2] = math.inf
    a[last:] = math.nan
    product = Product(codec("int8"), 2, GROUPED)
    wire = interpreted(wire_of_kernel, [a, spoiled, offsets], product, {})
    assert torch.equal(wire, encoded(exact_grouped(a, b, offsets), product))


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [(300, 64, -5), (90, 10, 200)])
def test_wrong_offsets_write_nothing_outside(offsets: tuple[int, ...]) -> None:
    a, b, _ = Grouped("int8", offsets=(1, 2, 3)).operands()
    tensors = [a, b, torch.tensor(offsets, dtype=torch.int32)]
    wire = interpreted(wire_of_kernel, tensors, Product(codec("int8"), 2, GROUPED), {})
    assert wire.shape == (2, codec("int8").wire_bytes(64 * 256, F32))


# --- epilogues ------------------------------------------------------------------------------------


def operations(*lines: str, dtype: torch.dtype = F32, first: int = 0) -> tuple[Operation, ...]:
    """Return operations as text, ``mul v0 0.5``. The last one is rounded to bfloat16."""
    made = [Operation(name, tuple(rest), dtype) for name, *rest in map(str.split, lines)]
    return (*made[:-1], replace(made[-1], dtype=BF16))


SILU = Epilogue((), operations("neg v0", "exp v1", "add v2 1.0", "div v0 v3"))
GELU = Epilogue(
    (), operations("mul v0 0.5", "mul v0 0.7071067811865476", "erf v2", "add v3 1.0", "mul v1 v4")
)
TANH = Epilogue(
    (),
    operations(
        *("mul v0 v0", "mul v1 v0", "mul v2 0.044715", "add v0 v3", "mul v4 0.7978845608028654"),
        *("mul v0 0.5", "tanh v5", "add v7 1.0", "mul v6 v8"),
    ),
)
RESIDUAL = Epilogue((Operand(BF16, VALUE),), operations("add v0 v1"))
GATED = Epilogue((Operand(BF16, VALUE),), operations("sigmoid v0", "mul v0 v2", "mul v3 v1"))
ROWS = Epilogue((Operand(F32, COLUMN), Operand(BF16, VALUE)), operations("mul v0 v1", "sub v3 v2"))
PER_BATCH = Epilogue((Operand(BF16, BATCH),), operations("add v0 v1"))

PLAIN: dict[str, tuple[Epilogue, Callable[..., Tensor]]] = {
    "silu": (SILU, lambda y: (y.float() / (1 + (-y.float()).exp())).to(BF16)),
    "gelu": (GELU, lambda y: (y.float() * 0.5 * (1 + (y.float() * 2**-0.5).erf())).to(BF16)),
    "gelu by tanh": (TANH, lambda y: F.gelu(y, approximate="tanh")),
    "residual": (RESIDUAL, torch.add),
    "gated": (GATED, lambda y, r: ((y.float() * y.float().sigmoid()) * r.float()).to(BF16)),
    "rows": (ROWS, lambda y, c, r: (y.float() * c - r.float()).to(BF16)),
}


@dataclass(frozen=True)
class Applied:
    spec: str
    epilogue: str = "silu"
    form: str = matmul.SINGLE
    by: dict[str, Any] = field(default_factory=dict)


APPLIED = [
    Applied("int8", "silu"),
    Applied("int8", "gelu"),
    Applied("fp8", "gelu by tanh"),
    Applied("int8", "residual", by={"block_m": 32, "cuts": 2}),
    Applied("int8", "gated"),
    Applied("int4", "rows"),
    Applied("int8", "residual", BATCHED),
    Applied("int8", "gated", GROUPED),
    Applied("int8", "rows", GROUPED, by=DESCRIPTORS),
    Applied("int8", "rows", BATCHED, by={"block_m": 32, "cuts": 2, "descriptors": True}),
    *(Applied("int8", name, by={**LATER, "block_k": 8}) for name in ("gelu", "gated", "rows")),
    Applied("int4", "residual", BATCHED, by={**LATER, "block_k": 8}),
    Applied("fp8", "rows", BATCHED, by={**LATER, "block_k": 8}),
]


@pytest.mark.rest_slow(3)
@pytest.mark.few(5)
@pytest.mark.parametrize("case", APPLIED, ids=name_of)
def test_epilogue_computes_what_torch_does(case: Applied) -> None:
    epilogue, plain = PLAIN[case.epilogue]
    if case.form == GROUPED:
        tensors = Grouped("int8").operands()
        y = exact_grouped(*tensors)
    else:
        tensors = Batched("int8").operands()
        y = exact_batched(tensors, BF16).flatten(0, 1)
        if case.form == matmul.SINGLE:
            tensors = [tensors[0].flatten(0, 1), tensors[1][0]]
            y = (tensors[0].double() @ tensors[1].double()).to(BF16)
    others = [
        torch.randint(-9, 10, y.shape if each.per == VALUE else y.shape[1:]).to(each.dtype) / 4
        for each in epilogue.operands
    ]
    product = Product(codec(case.spec), 2, case.form, epilogue=epilogue)
    wire = interpreted(wire_of_kernel, [*tensors, *others], product, case.by)
    assert torch.equal(wire, encoded(plain(y, *others), product))


@pytest.mark.slow
def test_rows_for_each_batch_are_added() -> None:
    tensors = [*Batched("int8").operands(), torch.randint(-9, 10, (2, 1, 256)).to(BF16) / 4]
    product = Product(codec("int8"), 2, BATCHED, epilogue=PER_BATCH)
    wire = interpreted(wire_of_kernel, tensors, product, {})
    assert torch.equal(wire, encoded(torch.bmm(*tensors[:2]) + tensors[2], product))


def tanh_of(x: Tensor) -> Tensor:
    """Return the kernel's tanh. Called in the interpreter."""
    from commpass.lowering.gpu.source import load, of_text
    from commpass.lowering.gpu.tiles import pointwise as tiles

    text = (
        "def kernel(x, y):\n    at = tl.arange(0, 1024)\n"
        "    tl.store(y + at, tanh_of(tl.load(x + at)))\n"
    )
    y = torch.empty_like(x)
    load(of_text("kernel", text, vars(tiles)))[(1,)](x, y)
    return y


def test_tanh_is_accurate_everywhere() -> None:
    sizes = torch.logspace(-30, 2, 511, dtype=F32)
    x = torch.cat([sizes, -sizes, torch.tensor([math.inf, math.nan])])
    want = torch.tanh(x.double())
    got = interpreted(tanh_of, x).double()
    assert torch.equal(got.isnan(), want.isnan())
    assert ((got - want).abs() / want.abs())[:-1].max() < 4e-7


# --- the plain form -------------------------------------------------------------------------------


def test_plain_form_computes_the_same() -> None:
    for case in (Batched("int8", bias=True), Batched("int4", batches=3, ranks=1)):
        tensors = case.operands()
        wire = matmul.MATMUL(tensors, matmul.name_of(case.product))
        assert torch.equal(wire, encoded(exact_batched(tensors, BF16), case.product))
    for grouped in (Grouped("int8"), Grouped("int8", offsets=(17, 60))):
        tensors = grouped.operands()
        wire = matmul.MATMUL(tensors, matmul.name_of(grouped.product))
        assert torch.equal(wire, encoded(exact_grouped(*tensors), grouped.product))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_epilogue_computes_the_same(name: str) -> None:
    epilogue, plain = PLAIN[name]
    y = torch.randn(12, 32).to(BF16)
    others = [
        torch.randn(y.shape if each.per == VALUE else y.shape[1:]).to(each.dtype)
        for each in epilogue.operands
    ]
    assert torch.equal(pointwise.apply(epilogue, y, others, 3).to(BF16), plain(y, *others))


def test_plain_epilogue_adds_rows_to_batches() -> None:
    y, rows = torch.randn(12, 8).to(BF16), torch.randn(3, 1, 8).to(BF16)
    want = (y.view(3, 4, 8) + rows).view(12, 8)
    assert torch.equal(pointwise.apply(PER_BATCH, y, [rows], 3).to(BF16), want)


# --- limits ---------------------------------------------------------------------------------------

LINEAR = matmul_sizes.Matmul(BF16, b_by_rows=False)
PROBLEM = matmul_sizes.Problem(m=4096, n=4096, k=4096, ranks=8, batches=8)


@pytest.mark.parametrize(
    ("form", "problem", "reason"),
    [
        (BATCHED, replace(PROBLEM, m=8 * 96, batches=16), "parts of both have 48, and tiles 64"),
        (BATCHED, replace(PROBLEM, k=2**20, m=512), "kernels count to 2^31"),
        (BATCHED, replace(PROBLEM, batches=0), "nothing to multiply"),
        (GROUPED, replace(PROBLEM, batches=1023), "1023 groups: more than 1022"),
        (GROUPED, replace(PROBLEM, m=4100), "shards begin inside"),
    ],
)
def test_forms_without_a_kernel_say_why(
    form: str, problem: matmul_sizes.Problem, reason: str
) -> None:
    matmul_of_form = replace(LINEAR, form=form)
    found = matmul_supported.unsupported_reason(codec("int8"), matmul_of_form, problem)
    assert reason in found


@pytest.mark.parametrize("spec", ["int8", "int4", "fp8", "rotated", "table"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (BATCHED, PROBLEM),
        (BATCHED, replace(PROBLEM, m=8 * 500)),
        (BATCHED, replace(PROBLEM, m=64 * 64, batches=64, ranks=32)),
        (GROUPED, PROBLEM),
        (GROUPED, replace(PROBLEM, n=1536, batches=1022, k=128)),
    ],
)
@pytest.mark.parametrize("epilogue", [Epilogue(), GATED])
def test_tiles_fit_and_cover_all_rows_once(
    spec: str, arch: str, form: str, problem: matmul_sizes.Problem, epilogue: Epilogue
) -> None:
    """A program has enough shared memory, and the launch is within the limits of a grid."""
    coder, of_form = codec(spec), replace(LINEAR, form=form, epilogue=epilogue)
    assert not matmul_supported.unsupported_reason(coder, of_form, problem, arch=arch)
    steps = matmul_launch.Steps(problem.k, problem.k, problem.k * problem.height, 4096)
    casts = {"CASTS": True, "FP8": False}
    for by in matmul_sizes.configurations(coder, problem, arch, of_form):
        assert matmul_sizes.shared_bytes(by, coder, arch, of_form) <= matmul_sizes.SHARED[arch]
        made = matmul_launch.call(coder, of_form, problem, by, steps, casts)
        along = -(-problem.n // by.block_n)
        down = problem.ranks * -(-problem.rows // by.block_m)
        if form == GROUPED:
            assert made.tiles == (down + problem.batches) * along
            assert made.constants["GROUPS"] > problem.batches + 1
        else:
            parts, rows = made.numbers["segments"], made.numbers["segment"]
            assert parts * rows == problem.m
            assert problem.rows % rows == problem.height % rows == 0
            assert made.tiles == parts * -(-rows // by.block_m) * along
        assert made.grid(132)[0] == min(made.tiles, 132 * by.programs) < 2**31


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b, offsets: (a[:, ::2], b[:, ::2], offsets), "neither by rows nor by columns"),
        (lambda a, b, offsets: (a, b, offsets.long()), "offsets that are not int32"),
        (lambda a, b, offsets: (a, b, offsets.repeat(2)[::2]), "not contiguous"),
        (lambda a, b, offsets: (a.as_strided(a.shape, (2**30, 1)), b, offsets), "far apart"),
    ],
)
def test_operands_that_kernels_cannot_read_say_why(change: Any, reason: str) -> None:
    with torch.device("meta"):
        a, b = torch.empty(128, 40, dtype=BF16), torch.empty(4, 40, 256, dtype=BF16)
        offsets = torch.empty(4, dtype=torch.int32)
    product = Product(codec("int8"), 2, GROUPED)
    given = matmul.operands_of(product, change(a, b, offsets))
    assert reason in matmul_launch.unsupported_layout(given)
    assert not matmul_launch.unsupported_layout(matmul.operands_of(product, (a, b, offsets)))
