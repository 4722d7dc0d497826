"""Chains, norms, exchanges and matmuls as an NVIDIA GPU with 8-bit floats runs them.

As in ``test_gpu_nvidia``, approximations are off by as much as PTX's manual permits. In addition, a
product that is added is not rounded, as in graphs. Results are compared with float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from exchanging import exchange_of
from interpreter import interpreted
from ptx import as_on_nvidia
from test_gpu_matmul import SMALL
from test_gpu_matmul_forms import RESIDUAL, SILU
from test_gpu_nvidia import BF16, F16, F32, U8, blocks_of, by_block
from test_gpu_sparse import check
from tiers import rarely
from torch import Tensor

from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Normalize,
    Scale,
    Shift,
    Store,
    Sum,
)
from commpass.lowering.decode_matmul import DecodedRows
from commpass.lowering.matmul import BATCHED, GROUPED, SINGLE, Product
from commpass.lowering.pointwise import Epilogue

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

F64 = torch.float64
POISON = 0xAB


def block_codec(text: str) -> BlockCodec:
    coder = codec(text)
    assert isinstance(coder, BlockCodec)
    return coder


def ran(chain: Chain, numel: int, ulps: int, *inputs: Tensor) -> list[Tensor]:
    """Return the results of a kernel. The rows of its output lie apart, between other bytes."""
    from commpass.lowering.gpu import generate, launch

    made, rows = generate.kernel(chain, numel), inputs[0].shape[0] // chain.ranks
    width = launch.empty(made, rows, numel, inputs[0].device)
    room = width.new_empty(rows + 2, width.shape[1] + 128)
    room.view(U8).fill_(POISON)
    out = room[1:-1, : width.shape[1]]
    further = launch.empty_further(made, rows, numel, inputs[0].device)
    with as_on_nvidia(ulps, contracted=True), np.errstate(all="ignore"):
        launch.launch(made, inputs, out, numel, further)
    found = out.clone()
    out.view(U8).fill_(POISON)
    assert (room.view(U8) == POISON).all()
    return [found, *further]


def spread(wires: Tensor) -> Tensor:
    """Return the same wires, further apart in memory."""
    return torch.nn.functional.pad(wires, (0, 128), value=0x7F)[:, : wires.shape[1]]


# --- sums -----------------------------------------------------------------------------------------

SUMMED = [
    ("rotated(bits=4, block=32)", BF16, 2, 3, False),
    rarely("rotated(block=64)", F32, 5, 1, True),
    rarely("taco(block=64)", F16, 3, 2, False),
    rarely("int8(block=64)", F32, 2, 3, False),
    rarely("int4(block=32)", BF16, 9, 1, True),
    rarely("fp8(block=64)", F16, 3, 2, True),
    rarely("int8(stored=bf16, block=64)", BF16, 5, 2, False),
    rarely("fp8(stored=pow2, block=64)", F32, 2, 1, True),
    rarely("rotated(stored=pow2, block=64)", BF16, 3, 2, False),
    rarely("table(bits=3, block=32)", F32, 2, 2, False),
]


@pytest.mark.parametrize(("text", "dtype", "ranks", "rows", "divided"), SUMMED)
def test_sums_of_several_rows_are_encoded_within_the_bound(text, dtype, ranks, rows, divided):
    coder = block_codec(text).domain_codec
    assert isinstance(coder, BlockCodec)
    one, names = blocks_of(coder, dtype)
    numel, block = one.shape[1], coder.block
    turned = [one.roll(turn * block, 1) * (-1) ** (turn // 2) for turn in range(ranks * rows)]
    wires = coder.encode_rows(torch.cat(turned).float())
    decoded = coder.decode_rows(wires, numel, dtype).unflatten(0, (rows, ranks))
    total = sum(decoded.unbind(1)[1:], decoded[:, 0])
    finite = by_block(total, block).isfinite().all(dim=1)
    exact = by_block(decoded.double().sum(dim=1), block) / (ranks if divided else 1)
    terms = by_block(decoded.double().abs().sum(dim=1), block)
    steps = (Decode(coder, dtype), Sum(ranks), *([Divide(float(ranks))] if divided else []))
    (summed,) = interpreted(ran, Chain(U8, steps), numel, 1, spread(wires))
    (wire,) = interpreted(ran, Chain(U8, (*steps, Encode(coder))), numel, 1, spread(wires))
    mine = by_block(summed, block)
    assert torch.equal(mine.isfinite().all(dim=1), finite)
    assert ((mine - exact).abs() <= 2e-6 * terms + 1e-40)[finite].all()
    read = by_block(coder.decode_rows(wire, numel, F32), block)
    assert torch.equal(read.isfinite().all(dim=1), finite)
    size = exact.norm(dim=1)
    bound = coder.bound * size * (1 + 1e-4) + coder.floor(F32) * block**0.5
    worse = ((read - exact).norm(dim=1) > bound + 2e-6 * terms.norm(dim=1)) & finite
    assert not worse.any(), [names[int(at) % len(names)] for at in worse.nonzero()]


# --- norms ----------------------------------------------------------------------------------------


def values_of_norms(width: int, dtype: torch.dtype) -> Tensor:
    """Return values of many kinds to be normalized, ``[norms, width]``."""
    random = torch.Generator().manual_seed(3)
    normal, place = torch.randn(width, generator=random), torch.arange(width)
    largest = torch.finfo(dtype).max
    powers = (-20, -40, -60, -68, -126, -133) if dtype != F16 else (-8, -14, -24)
    made = [
        normal,
        torch.zeros(width),
        torch.full((width,), 1.37),
        torch.where(place == 5, 6e4, normal * 1e-3),
        1.0 - 2.0 * (place % 2),
        (place == 3) * 2.5,
        normal * 1e-3 + 100,
        torch.where(place == 7, math.nan, normal),
        torch.where(place == 2, math.inf, normal),
        *(normal.double().clamp(-2, 2) * 2.0**power for power in powers),
        normal.sign() * min(largest / 8, 1e18),
    ]
    return torch.stack([each.to(dtype) for each in made])


@pytest.mark.parametrize(
    ("dtype", "width", "centered", "eps", "ulps"),
    [
        (BF16, 64, False, 1e-38, 1),
        (F32, 192, True, 1e-5, -1),
        rarely(F32, 64, False, 0.0, 1),
        rarely(F16, 192, True, 1e-12, 1),
        rarely(BF16, 64, True, 1e-30, -1),
    ],
)
def test_norms_and_their_statistics_are_close_to_exact_ones(dtype, width, centered, eps, ulps):
    """Of values of any size; squares below the normal numbers are no zeros."""
    coder = block_codec("int8(block=64)")
    x = values_of_norms(width, dtype)
    norms, wire = x.shape[0], coder.encode_rows(x.reshape(1, -1).float())
    residual = (x.flip(1) / 4).reshape(1, -1)
    random = torch.Generator().manual_seed(5)
    weight, bias = (torch.randn(1, width, generator=random).to(dtype) for _ in range(2))
    saved = ("mean", "rsqrt") if centered else ("rsqrt",)
    steps = (
        *(Decode(coder, dtype), Cast(dtype), Add(dtype), Store()),
        *(Normalize(width, eps, centered, saved), Scale(width, dtype), Shift(width, dtype)),
    )
    numel = norms * width
    given = (wire, residual, weight, bias)
    y, stream, *statistics = interpreted(ran, Chain(U8, steps), numel, ulps, *given)
    decoded = coder.decode_rows(wire, numel, dtype)
    assert torch.equal(stream.nan_to_num(), (decoded.to(dtype) + residual).nan_to_num())
    row = stream.double().view(norms, width)
    mean = row.mean(dim=1, keepdim=True)
    apart = row - mean if centered else row
    factor = (apart.square().mean(dim=1, keepdim=True) + eps).rsqrt()
    finite = row.isfinite().all(dim=1)
    assert int(finite.sum()) == norms - 2
    if eps == 0:  # a row whose squares are zeros has no norm
        finite &= factor.flatten() < 2.0**70
    # The squares of values of 2^-68 have few bits.
    few = factor > 2.0**63
    close = torch.where(few, 2e-3, 2e-6)
    lost = close * row.abs().amax(dim=1, keepdim=True) * factor if centered else 0.0
    want, sizes = apart * factor * weight.double(), (apart * factor * weight.double()).abs()
    allowed = close * sizes + lost * weight.double().abs() + 2e-6
    assert y.view(norms, width)[finite].isfinite().all()
    assert not y.view(norms, width)[~finite & ~row.isfinite().all(dim=1)].isfinite().all(1).any()
    error = (y.double().view(norms, width) - want - bias.double()).abs()
    assert not ((error > allowed).any(dim=1) & finite).nonzero().tolist()
    root = statistics[-1].double().view(norms, 1)
    assert ((root - factor).abs() <= (close * 2 + lost) * factor)[finite].all()
    if centered:
        off = (statistics[0].double().view(norms, 1) - mean).abs()
        assert (off <= 1e-6 * row.abs().amax(dim=1, keepdim=True) + 1e-44)[finite].all()


# --- exchanges ------------------------------------------------------------------------------------


def exchanged(name: str, text: str, inputs: list[Tensor], programs: int) -> list[Tensor]:
    """Return the results of all ranks of an exchange in one kernel.

    Nothing waits: the kernel runs for each rank in turn, once more than it sends signals. So all
    that is read at last was written in a run before.
    """
    from commpass.lowering.exchange import result_shape
    from commpass.lowering.gpu.exchange import capacity_for, memory_of, numbers
    from commpass.lowering.gpu.exchange_kernel import kernel
    from commpass.lowering.gpu.source import load

    ranks, dtype = len(inputs), inputs[0].dtype
    exchange = exchange_of(name, codec(text), dtype, inputs[0].numel(), ranks, programs=programs)
    made, capacity = kernel(exchange), capacity_for([exchange])
    memory = memory_of(capacity)
    waits = "missing = tl.sum(nothing, axis=0) + 1"
    assert waits in made.source.text
    function = load(
        replace(made.source, text=made.source.text.replace(waits, waits.removesuffix(" + 1")))
    )
    rooms = [torch.full((memory.total + 256,), POISON, dtype=U8) for _ in inputs]
    begins = [-room.data_ptr() % 128 for room in rooms]
    own = [room[begin:][: memory.total] for room, begin in zip(rooms, begins, strict=True)]
    peers = torch.tensor([each.data_ptr() for each in own])
    width = math.prod(result_shape(exchange.kind, (exchange.numel,), ranks))
    outputs = torch.empty(ranks, width + 64, dtype=dtype)
    outputs.view(U8).fill_(POISON)
    constants = made.constants | {"CASTS": False, "FP8": True, "STORES": False, "SPINS": 0}
    with as_on_nvidia(1, contracted=True), np.errstate(all="ignore"):
        for _ in range(exchange.phases + 1):
            for rank, x in enumerate(inputs):
                own[rank][memory.signals : memory.wires] = 0
                tensors = {"peers": peers, "input": x, "output": outputs[rank]}
                known = tensors | numbers(exchange, rank, capacity)
                arguments = [known[each] for each in made.signature]
                grid = (exchange.programs, exchange.rows)
                function[grid](*arguments, **constants, num_warps=made.num_warps)
    assert (outputs[:, width:].contiguous().view(U8) == POISON).all()
    for room, begin in zip(rooms, begins, strict=True):
        assert (room[:begin] == POISON).all()
        assert (room[begin + memory.total :] == POISON).all()
    return list(outputs[:, :width])


EXCHANGES = [("one_shot", 3), ("two_shot", 2), ("reduce_scatter", 2), ("all_gather", 3)]


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("rotated(bits=4, block=32)", BF16),
        rarely("rotated(block=64)", F32),
        rarely("int8(block=64)", F16),
        rarely("int4(block=32)", F32),
        rarely("taco(block=64)", BF16),
        rarely("fp8(block=64)", BF16),
        rarely("mxfp4", F16),
    ],
)
@pytest.mark.parametrize(("name", "ranks"), [*EXCHANGES, rarely("one_shot", 5)])
def test_ranks_of_an_exchange_have_sums_within_the_bound(name, ranks, text, dtype):
    coder = block_codec(text)
    block, one = coder.block, blocks_of(coder, dtype)[0][0]
    numel = 37 * block // ranks * ranks
    numel -= (ranks if name == "reduce_scatter" else 1) * 3
    inputs = [
        torch.cat([one, one])[turn * block :][:numel] * (-1) ** (turn // 2) for turn in range(ranks)
    ]
    found = interpreted(exchanged, name, text, inputs, 2)
    if name != "reduce_scatter":
        assert all(torch.equal(each.view(U8), found[0].view(U8)) for each in found)
    got = torch.cat(found) if name == "reduce_scatter" else found[0]
    shards = ranks if name == "reduce_scatter" else 1
    given = torch.stack(inputs).double()
    if name == "all_gather":
        got, want = got.view(ranks, -1), given
        brought = by_block(want, block)[None]
    else:
        got, want = got.view(shards, -1), given.sum(dim=0).view(shards, -1)
        brought = torch.stack([by_block(each.view(shards, -1), block) for each in given])
    mine, exact, sizes = by_block(got, block), by_block(want, block), brought.norm(dim=2)
    most = torch.finfo(dtype).max / 4
    finite, small = brought.isfinite().all(dim=2).all(dim=0), sizes.sum(dim=0) < most
    assert torch.equal(mine.isfinite().all(dim=1)[small], finite[small])
    assert not mine.isfinite().all(dim=1)[~finite].any()
    root = block**0.5
    allowed = (coder.bound * sizes * (1 + 1e-4) + coder.floor(dtype) * root).sum(dim=0)
    if name == "two_shot":  # whose only padding is that of the last block
        allowed += coder.bound * (exact.norm(dim=1) + allowed) + coder.floor(F32) * root
    form = torch.finfo(dtype)
    allowed += (form.eps + 1e-6) * sizes.sum(dim=0) + form.tiny * form.eps * root
    assert ((mine - exact).norm(dim=1) <= allowed)[finite & small].all()


# --- matmuls --------------------------------------------------------------------------------------


def uneven(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix with heavy tails whose rows have very different sizes."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) ** 3
    rows = x.view(-1, shape[-1])
    rows[1] = 0
    rows[2] *= 1e-18 if dtype == BF16 else 1e-4
    rows[3] *= 1e15 if dtype == BF16 else 20
    rows[4, 0] = 1e4
    rows[5] = -0.0
    rows[7, ::2] *= -1
    rows[8] *= 1e-38 if dtype == BF16 else 1e-7
    rows[9, 0], rows[-1, -1] = math.inf, math.nan
    return x.to(dtype)


def wire_of_product(tensors: list[Tensor], product: Product, ulps: int) -> Tensor:
    from commpass.lowering.gpu import matmul_launch, matmul_sizes

    by = matmul_sizes.Configuration(**SMALL)
    with as_on_nvidia(ulps, contracted=True), np.errstate(all="ignore"):
        return matmul_launch.run(tensors, product, by=by)


OFFSETS = (0, 20, 20, 21, 128)


@pytest.mark.parametrize(
    ("text", "form", "dtype", "epilogue", "ulps"),
    [
        ("int8", SINGLE, BF16, SILU, 1),
        ("rotated", GROUPED, BF16, RESIDUAL, -1),
        ("rotated(bits=4)", BATCHED, BF16, Epilogue(), 1),
        rarely("int4", SINGLE, F16, SILU, -1),
        rarely("fp8", GROUPED, BF16, SILU, 1),
        rarely("taco", SINGLE, BF16, RESIDUAL, 1),
        rarely("int8(stored=bf16)", GROUPED, F16, Epilogue(), 1),
        rarely("tahquant", BATCHED, BF16, SILU, -1),
    ],
)
def test_product_is_encoded_within_the_bound(text, form, dtype, epilogue, ulps):
    """Groups may be empty, the depth is no multiple of a tile's, and two rows are not finite."""
    coder, m, n, k = block_codec(text), 128, 256, 41
    random = torch.Generator().manual_seed(2)
    lead = {SINGLE: (), BATCHED: (2,), GROUPED: (len(OFFSETS),)}[form]
    a, b = uneven(m, k, dtype=dtype), torch.randn(*lead, k, n, generator=random).to(dtype)
    bias = torch.randn(*((2, 1) if form == BATCHED else ()), n, generator=random).to(dtype)
    other = torch.randn(m, n, generator=random).to(dtype)
    taken = [a.view(2, -1, k) if form == BATCHED else a, b]
    biased, added = form != GROUPED, bool(epilogue.operands)
    taken += [bias if biased else torch.tensor(OFFSETS, dtype=torch.int32)]
    taken += [other] if added else []
    product = Product(coder, 2, form, biased, epilogue)
    wire = interpreted(wire_of_product, taken, product, ulps)
    ends = {SINGLE: (m,), BATCHED: (m // 2, m), GROUPED: OFFSETS}[form]
    matrix = torch.searchsorted(torch.tensor(ends), torch.arange(m), right=True)
    wide, deep = a.double()[:, None], b.double().view(-1, k, n)[matrix]
    y, terms = (wide @ deep)[:, 0], (wide.abs() @ deep.abs())[:, 0]
    y = y + bias.double().view(-1, n)[matrix] if biased else y
    want = y / (1 + (-y).exp()) if epilogue == SILU else y + other.double() if added else y
    got = by_block(coder.decode_rows(wire, m * n // 2, F32), coder.block)
    exact, root = by_block(want, coder.block), coder.block**0.5
    finite = exact.isfinite().all(dim=1)
    small = exact.abs().amax(dim=1) < torch.finfo(dtype).max / 2
    assert torch.equal(got.isfinite().all(dim=1)[small], finite[small])
    assert not got.isfinite().all(dim=1)[~finite].any()
    rounding = torch.finfo(dtype).eps * (y.abs() + want.abs()) + k * 2.0**-24 * terms + 1e-30
    rounding += 2 * torch.finfo(dtype).eps if biased or added else 0
    off = by_block(rounding, coder.block).norm(dim=1) * (1 + coder.bound) * 1.2
    allowed = coder.bound * exact.norm(dim=1) * (1 + 1e-3) + coder.floor(F32) * root + off
    assert ((got - exact).norm(dim=1) <= allowed)[finite & small].all()


def product_of_decoded(tensors: list[Tensor], rows: DecodedRows, ulps: int) -> Tensor:
    from commpass.lowering.gpu import decode_matmul, decode_matmul_launch

    with as_on_nvidia(ulps, contracted=True), np.errstate(all="ignore"):
        tile = decode_matmul.Tile(16, 32, 16, num_warps=4, num_stages=2, group=2)
        return decode_matmul_launch.run(tensors, rows, by=tile)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("int4(block=32)", BF16),
        rarely("int8(block=32)", F16),
        rarely("fp8(block=32)", BF16),
        rarely("int2(block=64)", F16),
        rarely("mxfp8", BF16),
    ],
)
def test_product_of_decoded_rows_is_rounded_once(text, dtype):
    coder, lines, n = block_codec(text), 11, 33
    k = 2 * coder.block
    wire = coder.encode_rows(uneven(2 * lines, k, dtype=dtype).view(2, -1))
    random = torch.Generator().manual_seed(2)
    b, bias = (torch.randn(*size, n, generator=random).to(dtype) for size in ((k,), ()))
    rows = DecodedRows(coder, lines * k, dtype, True)
    found = interpreted(product_of_decoded, [wire, b, bias], rows, 1).double()
    a = coder.decode_rows(wire, lines * k, dtype).to(dtype).view(-1, k).double()
    want = a @ b.double() + bias.double()
    terms = a.abs() @ b.double().abs() + bias.double().abs()
    finite = want.isfinite()
    small = want.abs() < torch.finfo(dtype).max / 2
    assert torch.equal(found.isfinite(), finite | (found.isfinite() & ~small))
    allowed = torch.finfo(dtype).eps / 2 * want.abs() + k * 2.0**-24 * terms + 1e-38
    assert ((found - want).abs() <= allowed)[finite & small].all()


# --- sparse codecs --------------------------------------------------------------------------------


def checked(cases: list[tuple[str, torch.dtype, str, int, int]]) -> dict[object, list[str]]:
    with as_on_nvidia(1, contracted=True), np.errstate(all="ignore"):
        return check(cases)


@pytest.mark.parametrize(
    ("spec", "dtype", "content"),
    [
        ("gaussiank(density=0.1, values=fp16)", F32, "not finite"),
        rarely("gaussiank(density=0.1)", BF16, "subnormal"),
        rarely("dgc(density=0.1)", F16, "large"),
        rarely("redsync(density=0.1)", F32, "ties"),
        rarely("sidco(density=0.1, values=rotated)", BF16, "not finite"),
        rarely("topk(density=0.1)", F16, "lost"),
    ],
)
def test_sparse_wire_and_what_is_left_are_those_of_the_aten_form(spec, dtype, content):
    assert interpreted(checked, [(spec, dtype, content, 2, 270)]) == {}


# --- what the interpreter follows -----------------------------------------------------------------


def arithmetic(ulps: int, contracted: bool) -> list[list[float]]:
    """Return the results of operations on 3 numbers."""
    from commpass.lowering.gpu.source import constant, function_text, load, of_text

    operations = ["tl.minimum(x, y)", "tl.maximum(x, y)", "x * y - x", "x + y * y", "tl.exp(x)"]
    lines = ["at = tl.arange(0, COUNT)", "x = tl.load(a + at)", "y = tl.load(b + at)"]
    lines += [f"tl.store(out + {row} * COUNT + at, {each})" for row, each in enumerate(operations)]
    source = of_text("made", function_text("made", ["a", "b", "out", constant("COUNT")], lines), {})
    a, b = torch.tensor([[math.nan, 1 + 2**-12, 1.0, 3.0], [2.0, 1 + 2**-12, math.nan, 1 / 3]])
    out = torch.empty(len(operations), 4)
    with as_on_nvidia(ulps, contracted), np.errstate(all="ignore"):
        load(source)[(1,)](a, b, out, COUNT=4)
    return out.tolist()


def test_arithmetic_is_that_of_the_instructions():
    least, most, once, sums, high = interpreted(arithmetic, 1, True)
    _, _, twice, _, low = interpreted(arithmetic, -1, False)
    third, small = float(torch.tensor(1 / 3)), 2.0**-12
    assert (least[0], most[0], least[2], most[2]) == (2.0, 2.0, 1.0, 1.0)
    assert (once[1], twice[1]) == (small + small**2, small)
    assert sums[3] == float(torch.tensor(3 + third**2, dtype=F64).float())
    assert math.isclose(low[3], math.exp(3), rel_tol=1e-6)
    assert low[3] < high[3]
