"""The kernels of the sparse codecs, interpreted, against the aten form bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
import triton.language as tl
from interpreter import interpreted
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from commpass.codecs import codec
from commpass.codecs.sparse import SparseCodec, sum_by_index
from commpass.codecs.sparse import indices as index_codes
from commpass.codecs.sparse.measure import AtenStatistics, magnitude_bits
from commpass.lowering.gpu import sparse, sparse_measure
from commpass.lowering.gpu.source import load, of_function
from commpass.lowering.gpu.tiles.sparse import (
    BF16,
    COUNTED,
    FP16,
    SUMMED,
    code_of,
    counted_before,
    floats,
    least_pattern,
    pattern_of,
)

SMALL = sparse.Sizes(block=256, tile=128, step=32, warps=1, part=512, laps=1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def coder_of(spec: str) -> SparseCodec:
    made = codec(spec)
    assert isinstance(made, SparseCodec)
    return made


def gaussian(rows: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn((rows, n), generator=torch.Generator().manual_seed(seed))


def with_some(rows: int, n: int, step: int, *values: float) -> Tensor:
    x = gaussian(rows, n)
    for place, value in enumerate(values):
        x[0, 3 + place :: step] = value
    return x


CONTENTS = {
    "gaussian": gaussian,
    "ties": lambda rows, n: (gaussian(rows, n) * 2).round() / 2,
    "equal": torch.ones,
    "two magnitudes": lambda rows, n: torch.where(gaussian(rows, n) > 1.5, -3.0, 1e-3),
    "zeros": torch.zeros,
    "negative zeros": lambda rows, n: torch.full((rows, n), -0.0),
    "few": lambda rows, n: gaussian(rows, n) * (torch.arange(n) % 97 == 5),
    "large": lambda rows, n: gaussian(rows, n) * 3e4,
    "subnormal": lambda rows, n: gaussian(rows, n) * 1e-39,
    "not finite": lambda rows, n: with_some(rows, n, 211, math.nan, math.inf, -math.inf),
    "lost": lambda rows, n: with_some(rows, n, 2, math.inf),
}


def reference(coder: SparseCodec, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The same as ``collectives.reductions.sparse_steps``."""
    wanted = x.float() + residual
    wire = coder.encode_rows(wanted.to(x.dtype))
    own = coder.decode_rows(wire, x.shape[1], x.dtype).float()
    return wire, torch.where(own.isfinite() & wanted.isfinite(), wanted - own, 0)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether bits are equal; all NaNs are equal, because processors differ in how they
    round a NaN to 16 bits."""
    if a.is_floating_point():
        nans = a.isnan() & b.isnan()
        whole = {2: torch.int16, 4: torch.int32}[a.itemsize]
        return bool(((a.view(whole) == b.view(whole)) | nans).all())
    return torch.equal(a, b)


def differences(spec: str, dtype: torch.dtype, x: Tensor, residual: Tensor) -> list[str]:
    """Return in what the kernels differ from the aten form; expected to be empty."""
    coder, x = coder_of(spec), x.to(dtype)
    n = x.shape[1]
    wire, left = sparse.encode(coder, x, residual, SMALL)
    want, rest = reference(coder, x, residual)
    layout = sparse.layout_of(coder, n, dtype)
    found = []
    if not same(left, rest):
        found.append("what is left")
    if not torch.equal(wire[:, layout.split :], want[:, layout.split :]):
        found.append("indices")
    values, right = wire[:, : layout.gap], want[:, : layout.gap]
    if not layout.later and not wanted_is_finite(x, residual):
        form = torch.float32 if layout.value == 2 else (torch.float16, torch.bfloat16)[layout.value]
        values, right = (each.contiguous().view(form) for each in (values, right))
    if not (same(values, right) or (layout.later and not wanted_is_finite(x, residual))):
        found.append("values")
    if not torch.equal(wire[:, layout.gap : layout.split], want[:, layout.gap : layout.split]):
        found.append("padding")
    if not same(
        sparse.decode(coder, want, n, dtype, SMALL), coder.decode_rows(want, n, dtype).float()
    ):
        found.append("decoded")
    total = sum_by_index(*coder.decode_sparse(want, n, dtype), n)
    if not same(sparse.sum_rows(coder, want, n, dtype, SMALL), total):
        found.append("sum")
    return found


def wanted_is_finite(x: Tensor, residual: Tensor) -> bool:
    return bool((x.float() + residual).to(x.dtype).isfinite().all())


def check(cases: list[tuple[str, torch.dtype, str, int, int]]) -> dict[object, list[str]]:
    """Return the cases that differ, and in what."""
    torch.manual_seed(0)
    found: dict[object, list[str]] = {}
    for case in cases:
        spec, dtype, content, rows, n = case
        x = CONTENTS[content](rows, n)
        exact = content in ("zeros", "ties", "equal", "two magnitudes")
        residual = torch.zeros(rows, n) if exact else gaussian(rows, n, 1) * x.abs()
        different = differences(spec, dtype, x, residual.nan_to_num(0, 0, 0) * 0.1)
        if different:
            found[case] = different
    return found


SELECTORS = ["topk", "randomk", "dgc", "gaussiank", "redsync", "sidco"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("content", list(CONTENTS))
def test_wire_and_what_is_left_are_those_of_the_aten_form(content):
    """Selectors and dtypes alternate: ties at the threshold, fewer candidates than slots and more,
    non-finite values, and more of those than slots."""
    cases = [
        (f"{name}(density=0.05)", DTYPES[(place + len(content)) % 3], content, 1, 500)
        for place, name in enumerate(SELECTORS)
        if (place + list(CONTENTS).index(content)) % 2 or content in ("ties", "not finite")
    ]
    assert interpreted(check, cases) == {}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (7, 2), (256, 1), (300, 2)])
def test_any_length_and_several_rows(n, rows):
    cases = [
        (f"{name}(density=0.1)", dtype, "gaussian", rows, n)
        for name, dtype in zip(["gaussiank", "dgc", "topk"], DTYPES, strict=True)
    ]
    assert interpreted(check, cases) == {}


FOUND = [
    ("gaussiank", torch.bfloat16, "ties"),
    ("redsync", torch.float16, "large"),
    ("topk", torch.float32, "gaussian"),
    ("sidco", torch.float32, "not finite"),
    ("dgc", torch.bfloat16, "lost"),
]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("parameters", "which"),
    [
        ("density=0.3", (0, 2, 4)),
        ("density=1.0", (1, 2)),
        ("density=0.2, indices=bitmap", (1, 2, 3)),
        ("indices=blocks16", (0, 1, 2, 3, 4)),
        ("density=1.0, indices=elias_fano", (0,)),
        ("density=0.1, values=bf16", (1, 2, 3, 4)),
        ("values=fp16", (0, 1, 2, 3, 4)),
        ("density=0.1, values=int8", (0, 2, 4)),
        ("values=rotated", (1, 3)),
    ],
)
def test_all_codes_of_indices_and_values(parameters, which):
    cases = [
        (f"{name}({parameters})", dtype, content, 2, 270)
        for name, dtype, content in (FOUND[place] for place in which)
    ]
    assert interpreted(check, cases) == {}


# --- decode ---------------------------------------------------------------------------------------


def read_from_noise() -> list[str]:
    found = []
    for spec, n in [
        ("topk(density=0.3)", 500),
        ("topk(density=0.01)", 3000),
        ("topk(density=0.1, indices=blocks16)", 900),
    ]:
        coder = coder_of(spec)
        layout = sparse.layout_of(coder, n, torch.float32)
        noise = torch.randint(
            0, 256, (2, layout.pitch), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
        )
        read = sparse.indices_of(layout, SMALL, noise)
        if not 0 <= int(read.min()) <= int(read.max()) <= n:
            found.append(f"{spec}: outside")
        coded = noise[:, layout.split : layout.split + layout.first + layout.second]
        want = index_codes.decode(coder.index, coded, n, layout.chosen)
        # A binary search in ends that do not ascend may end anywhere.
        if "blocks16" not in spec and not torch.equal(read.long(), want):
            found.append(f"{spec}: not those of the aten form")
        out = sparse.sum_rows(coder, noise, n, torch.float32, SMALL)
        if out.shape != (n,):
            found.append(f"{spec}: shape")
    return found


@pytest.mark.slow
def test_no_bytes_are_read_as_an_index_outside_of_the_row():
    assert interpreted(read_from_noise) == []


def summed(ranks: int) -> list[bool]:
    coder, n = coder_of("gaussiank(density=0.2)"), 600
    wires = coder.encode_rows(gaussian(ranks, n))
    total = sparse.sum_rows(coder, wires, n, torch.float32, SMALL)
    indices, values = coder.decode_sparse(wires, n, torch.float32)
    backwards = sum_by_index(indices.flip(0), values.flip(0), n)
    return [
        torch.equal(total, sum_by_index(indices, values, n)),
        torch.equal(total, backwards),
    ]


def test_sums_are_in_the_order_of_ranks():
    """Their bits show it: another order gives other bits."""
    assert interpreted(summed, 5) == [True, False]


# --- parts ----------------------------------------------------------------------------------------


def least_entry(thresholds, below, enough, FORM: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    threshold = tl.load(thresholds + at)
    least = least_pattern(threshold, FORM)
    one = pattern_of(floats(code_of(least.to(tl.float32, bitcast=True), FORM), FORM))
    other = pattern_of(floats(code_of((least - 1).to(tl.float32, bitcast=True), FORM), FORM))
    tl.store(enough + at, (one >= threshold).to(tl.int32))
    tl.store(below + at, (other < threshold).to(tl.int32))


def least(form: int, dtype: torch.dtype, infinity: int) -> list[bool]:
    codes = torch.arange(0, infinity + 1, dtype=torch.int16).view(dtype).float().view(torch.int32)
    around = torch.cat([codes, codes + 1, codes[1:] - 1])
    thresholds = around[(around >= 1) & (around <= 0x7F800000)]
    tile = 8192
    padded = torch.ones(-(-len(thresholds) // tile) * tile, dtype=torch.int32)
    padded[: len(thresholds)] = thresholds
    below, enough = torch.zeros_like(padded), torch.zeros_like(padded)
    kernel = load(of_function(least_entry))
    kernel[(len(padded) // tile,)](padded, below, enough, FORM=form, TILE=tile)
    return [bool(below.all()), bool(enough.all())]


@pytest.mark.parametrize(
    ("form", "dtype", "infinity"), [(FP16, torch.float16, 0x7C00), (BF16, torch.bfloat16, 0x7F80)]
)
def test_threshold_before_rounding_is_that_after_it(form, dtype, infinity):
    """At each number of the form, and one pattern to either side."""
    assert interpreted(least, form, dtype, infinity) == [True, True]


def before_entry(state, out, first, mine, WINDOW: tl.constexpr):
    tl.store(out, counted_before(state, first, mine, WINDOW))


def looked_back(first: int, mine: int, summed_at: list[int]) -> tuple[int, int, int, int]:
    """Return what is found for blocks with 3 i certain and 2^24 possible entries, and the expected
    values."""
    state = torch.zeros(mine + 2, dtype=torch.int64)
    sures = maybes = 0
    for block in range(first, mine):
        sures, maybes = sures + 3 * block, maybes + 2**24
        whole = block in summed_at
        counts = sures + (maybes << 31) if whole else 3 * block + (2**24 << 31)
        word = (counts << 2) + (SUMMED if whole else COUNTED)
        state[block] = word - (2**64 if word >= 2**63 else 0)
    out = torch.zeros(1, dtype=torch.int64)
    load(of_function(before_entry))[(1,)](state, out, first, mine, WINDOW=16)
    return int(out) & (2**31 - 1), int(out) >> 31, sures, maybes


@pytest.mark.parametrize(
    ("first", "mine", "summed_at"),
    [
        (0, 0, []),
        (0, 1, [0]),
        (0, 100, [0]),
        (0, 100, [0, 83, 84]),
        (0, 100, [0, 50, 99]),
        (40, 57, [40]),
        (40, 56, [40]),
    ],
)
def test_look_back_adds_up_blocks_to_the_last_that_is_summed(first, mine, summed_at):
    found = interpreted(looked_back, first, mine, summed_at)
    assert found[:2] == found[2:]


def no_launch(call: object) -> None:
    pass


@pytest.mark.parametrize("values", ["raw", "int8"])
@pytest.mark.parametrize("name", SELECTORS)
def test_nothing_is_read_on_the_host(name, values, monkeypatch):
    """All computations between the kernels run on tensors without values."""
    monkeypatch.setattr(sparse, "launch", no_launch)
    monkeypatch.setattr(sparse_measure, "launch", no_launch)
    coder = coder_of(f"{name}(density=0.05, values={values})")
    with FakeTensorMode():
        x, residual = torch.empty(1, 700, dtype=torch.bfloat16), torch.empty(1, 700)
        wire, left = sparse.encode(coder, x, residual)
        assert (wire.shape, left.shape) == ((1, coder.wire_bytes(700, x.dtype)), (1, 700))
        assert sparse.decode(coder, wire, 700, x.dtype).shape == (1, 700)
        assert sparse.sum_rows(coder, wire, 700, x.dtype).shape == (700,)


def measured(dtype: torch.dtype, content: str, rows: int, n: int) -> list[str]:
    """Return the statistics in which kernels and aten operations differ; expected to be none."""
    x = CONTENTS[content](rows, n).to(dtype)
    residual = gaussian(rows, n, 1) * 0.1
    wanted = (x.float() + residual).to(dtype)
    aten = AtenStatistics(wanted, magnitude_bits(wanted))
    kernel = sparse_measure.statistics_of(x, residual, 64, 2)
    peak = aten.peak()
    places = torch.arange(0, n, 3).unsqueeze(0)
    around = torch.cat([peak - 1, peak, peak + 1, peak // 2 + 12345], dim=1).clamp(min=1)
    half = torch.full((rows, 1), 0.3, dtype=torch.float64)
    pairs = {
        "peak": (aten.peak(), kernel.peak()),
        "nonfinite": (aten.nonfinite(), kernel.nonfinite()),
        "at": (aten.at(places), kernel.at(places)),
        "counts": (aten.counts(around), kernel.counts(around)),
        "moments": (aten.moments(peak), kernel.moments(peak)),
        "above": (aten.above(peak, None), kernel.above(peak, None)),
        "above a half": (aten.above(peak, half), kernel.above(peak, half)),
    }
    return [name for name, (one, other) in pairs.items() if not equal(one, other)]


def equal(one: Tensor | tuple[Tensor, ...], other: Tensor | tuple[Tensor, ...]) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        nans = bool(((one >= 0x7F800000) & (other >= 0x7F800000)).any())
        return one.dtype == other.dtype and (torch.equal(one, other) or nans)
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("content", ["gaussian", "zeros", "large", "subnormal", "not finite"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_the_aten_form(dtype, content):
    assert interpreted(measured, dtype, content, 1 + (content == "gaussian"), 300) == []


def test_codecs_without_a_kernel_say_why():
    coder = coder_of("topk")
    assert sparse.unsupported_reason(coder, 1000, torch.bfloat16) is None
    assert "float64" in str(sparse.unsupported_reason(coder, 1000, torch.float64))
    assert "at least one" in str(sparse.unsupported_reason(coder, 0, torch.float32))
    assert "longer" in str(sparse.unsupported_reason(coder, 2**31, torch.float32))
