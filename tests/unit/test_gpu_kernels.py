"""Generated kernels in Triton's interpreter give the bits of the codecs' plain form, for every
part.

A rotation adds in another order than the plain form's small matmuls, so the plain form uses a
butterfly there. A root mean square and a least-squares fit are sums as well: there the last bit of
scales may differ, and codes at a tie.
"""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import interpreted
from plain_form import plainly, same, sample
from test_codecs import CORE
from tiers import examples, rarely, sampled

from commpass.codecs import codec
from commpass.codecs.block import grids, layouts, noise, scales, storage, transforms
from commpass.codecs.block.storage import STORED
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Sum,
)

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON = 0xAB


# --- in the interpreter ---------------------------------------------------------------------------


def ran(chain: Chain, taken: torch.Tensor, numel: int, *others: torch.Tensor) -> torch.Tensor:
    """Return the output of the kernel of a chain, in a buffer that held other data before."""
    from commpass.lowering.gpu import generate, launch, supported

    assert supported.unsupported_reason(chain, numel) == ""
    made = generate.kernel(chain, numel)
    out = launch.empty(made, taken.shape[0] // chain.ranks, numel, taken.device)
    out.view(torch.uint8).fill_(POISON)
    launch.launch(made, [taken, *others], out, numel)
    return out


def unsupported_reason_of(chain: Chain, numel: int) -> str:
    from commpass.lowering.gpu import supported

    return supported.unsupported_reason(chain, numel)


def texts() -> list[str]:
    """Return the texts of kernels of all settings, in all chains that they support."""
    from commpass.lowering.gpu import generate, supported

    made, numel = [], 1024 * 8
    for coder in map(codec, [*generated(), "mxfp6(form=e3m2)", "int8(static=0.05)"]):
        decode = Decode(coder, torch.bfloat16)
        chains = [
            Chain(torch.bfloat16, (Encode(coder),)),
            Chain(torch.uint8, (decode, Cast(torch.bfloat16))),
            Chain(torch.uint8, (decode, Sum(8), Divide(8), Encode(coder))),
            Chain(torch.uint8, (decode, Sum(19))),
        ]
        possible = [each for each in chains if not supported.unsupported_reason(each, numel)]
        made += [generate.kernel(each, numel).source.text for each in possible]
    return made


def without_tile() -> list[str]:
    """Return the parts of codecs that some function of ``parts`` does not support."""
    from commpass.lowering.gpu import generate, grid_parts, parts

    kinds = {
        parts.place: layouts.Layout,
        parts.split: layouts.Layout,
        parts.join: layouts.Layout,
        parts.forward: transforms.Transform,
        parts.inverse: transforms.Transform,
        parts.measure: scales.Scale,
        parts.divide: scales.Scale,
        parts.refit: scales.Scale,
        parts.multiply: scales.Scale,
        grid_parts.encode: grids.Grid,
        grid_parts.decode: grids.Grid,
        parts.noise: noise.Rounding,
        grid_parts.significant_bits: grids.Grid,
    }
    assert set(kinds) == set(parts.PARTS)
    lacking = [
        f"{function.__name__} of {kind.__name__}"
        for function, union in kinds.items()
        for kind in typing.get_args(union)
        if kind not in function.registry
    ]
    names = [f"{what}_{form}" for what in ("up", "nearest", "store", "load") for form in STORED]
    names += [f"{what}_e4m3" for what in ("nearest", "store", "load")]
    return lacking + [name for name in names if name not in generate.KNOWN]


def sums(coder) -> bool:
    """Return whether a scale is made from a sum, and is sent with all its bits, or determines
    codes."""
    rule = coder.scale
    return isinstance(rule, (scales.Rms, scales.Dual, scales.LeastSquares))


ALL = [text for text in CORE if text not in ("outlier(width=4)",)]


def generated() -> list[str]:
    """Return the settings for which kernels are generated, for any number of values."""
    return [text for text in [*ALL, "nvfp4"] if getattr(codec(text), "grid", None) is not None]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("text", sampled(generated(), generated()[::2]))
def test_encode_and_decode_give_the_bits_of_the_plain_form(text):
    coder = codec(text).salted(3, 1)
    for dtype, some in zip(DTYPES, (2051, 1024, 999), strict=True):
        encode, numel = Chain(dtype, (Encode(coder),)), some
        if why := interpreted(unsupported_reason_of, encode, numel):
            assert "blocks of" in why, why
            numel = 1024 * 8  # the block size of equarx follows from this number
        x = sample(numel, dtype)
        decode = Chain(torch.uint8, (Decode(coder, dtype), Cast(dtype)))
        with plainly():
            wire = coder.encode_rows(x)
            values = coder.decode_rows(wire, numel, dtype).to(dtype)
        found = interpreted(ran, encode, x, numel)
        if sums(coder):
            nearly(coder, found, wire, numel, dtype)
        else:
            same(found, wire)
        same(interpreted(ran, decode, wire, numel), values)


@pytest.mark.few(1)
@pytest.mark.parametrize("text", ["int4(rounding=stochastic)", "int8(rounding=stochastic, seed=9)"])
def test_equal_blocks_draw_the_noise_of_the_plain_form(text):
    coder = codec(text).salted(3, 1)
    numel = 4 * coder.block
    x = sample(coder.block, torch.float32).repeat(1, 4)
    with plainly():
        wire = coder.encode_rows(x)
    same(interpreted(ran, Chain(torch.float32, (Encode(coder),)), x, numel), wire)


def nearly(coder, found: torch.Tensor, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
    """Compare two wires of which one in a hundred values may differ by a level, and scales in a
    last bit."""
    with plainly():
        mine, its = (coder.decode_rows(each, numel, dtype) for each in (found, wire))
    with_peak = its.abs().amax(dim=1, keepdim=True)
    off = (mine - its).abs() > 1e-5 * with_peak
    assert off.float().mean() < 0.01
    assert bool(((mine - its).abs() <= 0.6 * with_peak).all())
    assert (found != wire).float().mean() < 0.02


KINDS = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 3e38, -3.3e38, float("inf"), float("-inf")]
KINDS += [float("nan"), 0.5, 1.5, -2.5, 126.5, 127.0, 2.0**-126, 65504.0, 1e-7]
VALUES = st.sampled_from(KINDS)
TEXTS = ["int8", "int4", "int6", "int2", "fp8", "fp8(form=e5m2)", "int8(static=0.05)"]
TEXTS += ["fp8(static=1.0)", "rotated(block=64)", "rotated(bits=4, block=32)", "tahquant(block=32)"]
TEXTS += ["mxfp8", "mxfp6", "mxfp6(form=e3m2)", "mxfp4", "mxfp4(scale=ceil)", "nvfp4"]
TEXTS += ["int8(stored=bf16)", "int4(stored=pow2)", "int8(rounding=stochastic)", "sdp4bit"]


@pytest.mark.every
@settings(max_examples=examples(20, 60), deadline=None)
@example("int8(rounding=stochastic)", torch.bfloat16, [-1e-40], 0)
@given(
    st.sampled_from(TEXTS),
    st.sampled_from(DTYPES),
    st.lists(VALUES, min_size=1, max_size=200),
    st.integers(0, 3),
)
def test_values_of_every_kind(text, dtype, values, seed):
    coder = codec(text)
    x = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(1, -1)
    if seed:
        random = torch.Generator().manual_seed(seed)
        x = x[:, torch.randint(x.shape[1], (130,), generator=random)]
    numel = x.shape[1]
    with plainly():
        wire = coder.encode_rows(x)
        want = coder.decode_rows(wire, numel, dtype)
    found = interpreted(ran, Chain(dtype, (Encode(coder),)), x, numel)
    decode = Chain(torch.uint8, (Decode(coder, dtype),))
    with plainly():
        mine = coder.decode_rows(found, numel, dtype)
    finite = want.isfinite()
    assert torch.equal(mine.isfinite(), finite)  # law 2
    assert torch.equal(mine[finite], want[finite])
    same(interpreted(ran, decode, wire, numel), want)


# --- chains ---------------------------------------------------------------------------------------

SUMMED = [
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "int8",
    "int4(stored=bf16)",
    "fp8",
    "int6",
    "rotated",
    "rotated(bits=4)",
    "sdp4bit",
]


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("text", SUMMED)
@pytest.mark.parametrize("ranks", [1, 2, 5, 19])
def test_sums_are_made_in_rank_order(text, ranks):
    coder = codec(text).domain_codec
    numel, dtype = 700, torch.bfloat16
    x = torch.cat([sample(numel, dtype, seed) for seed in range(8)])[:ranks].float()
    with plainly():
        wires = coder.encode_rows(x)
        total = torch.zeros(0)
        for row in coder.decode_rows(wires, numel, dtype):
            total = total + row if total.numel() else row
        total = total.reshape(1, -1)
        wire = coder.encode_rows(total / ranks)
    steps = (Decode(coder, dtype), Sum(ranks))
    same(interpreted(ran, Chain(torch.uint8, steps), wires, numel), total)
    again = Chain(torch.uint8, (*steps, Divide(float(ranks)), Encode(coder)))
    same(interpreted(ran, again, wires, numel), wire)


@pytest.mark.parametrize("ranks", [19, rarely(16), rarely(9)])
@pytest.mark.parametrize("text", ["int8(block=64)", rarely("mxfp4"), rarely("tahquant(block=32)")])
def test_sums_of_many_ranks_are_made_in_rank_order(text, ranks):
    """Groups of ranks, the last of which is not full; in one the values must be clamped."""
    coder, numel, dtype = codec(text), 96, torch.bfloat16
    x = torch.cat([sample(numel, dtype, seed)[:1] for seed in range(ranks)])
    x[ranks - 2] *= 3e38 / x[ranks - 2].abs().max()
    with plainly():
        wires = coder.encode_rows(x)
        first, *others = coder.decode_rows(wires, numel, dtype).split(1)
        total = sum(others, first)
    chain = Chain(torch.uint8, (Decode(coder, dtype), Sum(ranks)))
    same(interpreted(ran, chain, wires, numel), total)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("text", ["int8(stored=pow2)", "int4(stored=pow2)", "fp8(stored=pow2)"])
@pytest.mark.parametrize("first", [0.0, float("nan"), float("inf")])
def test_largest_values_are_cut_beside_a_block_that_is_not_finite(text, first):
    """Scales rounded up to a power of two decode the largest values to more than the largest
    number."""
    coder, numel, dtype = codec(text), 1024, torch.float32
    x = torch.full((2, numel), 3.3e38)
    x[:, ::2] *= -1
    x[1] *= -1  # without clipping, the sum of the two would be NaN
    x[0, 0] = first
    wires = coder.encode_rows(x)
    rows = coder.decode_rows(wires, numel, dtype)
    assert rows[0, coder.block :].isfinite().all()
    chain = Chain(torch.uint8, (Decode(coder, dtype), Sum(2)))
    same(interpreted(ran, chain, wires, numel), rows[:1] + rows[1:])


@pytest.mark.parametrize("text", ["rotated(block=64)", "rotated(bits=4)", "rotated(bits=5)"])
def test_tiles_that_are_rotated_in_groups_have_the_bytes_of_the_plain_form(text):
    coder, numel = codec(text), 2048
    x = sample(numel, torch.bfloat16)
    with plainly():
        wire = coder.encode_rows(x)
    same(interpreted(ran, Chain(torch.bfloat16, (Encode(coder),)), x, numel), wire)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["rotated", "rotated(bits=3, block=64)", "sdp4bit", "taco"])
def test_domain_is_entered_and_left_within_the_kernel(text):
    coder = codec(text)
    numel, dtype = coder.padded_numel(900), torch.bfloat16
    x = sample(numel, dtype).float()
    domain, within = coder.domain, coder.domain_codec
    with plainly():
        entered = domain.to_domain(x)
        wire = within.encode_rows(entered)
        left = domain.from_domain(within.decode_rows(wire, numel, dtype)).to(dtype)
    found = interpreted(ran, Chain(dtype, (Enter(domain), Encode(within))), x.to(dtype), numel)
    if sums(coder):
        nearly(within, found, wire, numel, dtype)
    else:
        same(found, wire)
    back = Chain(torch.uint8, (Decode(within, dtype), Leave(domain), Cast(dtype)))
    same(interpreted(ran, back, wire, numel), left)


def test_residual_is_added_after_the_values_were_rounded():
    coder, numel, dtype = codec("int8"), 1500, torch.bfloat16
    wire, other = coder.encode_rows(sample(numel, dtype)), sample(numel, dtype, 5)
    chain = Chain(torch.uint8, (Decode(coder, dtype), Cast(dtype), Add(dtype)))
    want = coder.decode_rows(wire, numel, dtype).to(dtype) + other
    same(interpreted(ran, chain, wire, numel, other), want)


def test_residuals_of_several_rows_are_added_before_an_encode():
    """Rows of the residual do not lie as far apart as those of the wire."""
    coder, numel, dtype = codec("int8"), 700, torch.bfloat16
    wire, other = coder.encode_rows(sample(numel, dtype)), sample(numel, dtype, 5)
    chain = Chain(torch.uint8, (Decode(coder, dtype), Cast(dtype), Add(dtype), Encode(coder)))
    want = coder.encode_rows(coder.decode_rows(wire, numel, dtype).to(dtype) + other)
    same(interpreted(ran, chain, wire, numel, other), want)


def test_row_peak_is_that_of_values_before_they_are_widened():
    coder, numel = codec("nvfp4"), 500
    x = sample(numel, torch.bfloat16)
    chain = Chain(torch.bfloat16, (Cast(torch.float32), Encode(coder)))
    same(interpreted(ran, chain, x, numel), coder.encode_rows(x.float()))


def test_rows_may_lie_apart():
    coder, numel = codec("int4"), 640
    wide = sample(2000, torch.bfloat16)
    x = wide[:, 64 : 64 + numel]
    same(interpreted(strided, coder, wide, 64, numel), coder.encode_rows(x.contiguous()))


def strided(coder, wide: torch.Tensor, first: int, numel: int) -> torch.Tensor:
    return ran(Chain(wide.dtype, (Encode(coder),)), wide[:, first : first + numel], numel)


@pytest.mark.slow
def test_rows_may_exceed_the_programs_of_an_axis():
    """A grid's second and third axis have at most 65,535 programs."""
    coder, numel = codec("int8"), 300
    x = sample(4 * numel, torch.bfloat16).view(12, numel)[:11]
    wire = coder.encode_rows(x)
    same(interpreted(on_small_grid, Chain(x.dtype, (Encode(coder),)), x, numel), wire)
    back = Chain(torch.uint8, (Decode(coder, x.dtype), Cast(x.dtype)))
    values = interpreted(on_small_grid, back, wire, numel)
    same(values, coder.decode_rows(wire, numel, x.dtype).to(x.dtype))


def on_small_grid(chain: Chain, rows: torch.Tensor, numel: int) -> torch.Tensor:
    from unittest.mock import patch

    from commpass.lowering.gpu import generate, launch

    with patch.object(launch, "LARGEST_GRID", 4):
        assert launch.grid(generate.kernel(chain, numel), numel, 11) == (1, 4, 3)
        return ran(chain, rows, numel)


def test_nothing_is_written_for_no_values():
    coder = codec("int8")
    empty = torch.zeros(2, 0)
    assert interpreted(ran, Chain(torch.float32, (Encode(coder),)), empty, 0).shape == (2, 0)


# --- unsupported chains ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "numel", "said"),
    [
        (Chain(torch.float64, (Encode(codec("int8")),)), 512, "float64 values"),
        (Chain(torch.float32, (Encode(codec("int8", block=24)),)), 512, "blocks of 24 values"),
        (Chain(torch.float32, (Encode(codec("int8", block=8192)),)), 512, "more than a tile"),
        (Chain(torch.float32, (Encode(codec("int8")),)), 2**31, "values in a row: kernels count"),
        (
            Chain(torch.bfloat16, (Encode(codec("int8")),)),
            2_120_000_000,  # with its scales, a wire of more than 2^31 bytes
            "bytes of a wire in a row: kernels count to 2^31",
        ),
        (Chain(torch.bfloat16, (Encode(codec("int4")),)), 2**31 - 2**15, "values in a row"),
        (Chain(torch.float32, (Encode(codec("exponent")),)), 512, "no block codec"),
        (
            Chain(torch.uint8, (Decode(codec("nvfp4"), torch.bfloat16), Encode(codec("nvfp4")))),
            512,
            "the peak of a row must be known",
        ),
        (Chain(torch.float32, (Cast(torch.bfloat16),)), 512, "nothing is encoded or decoded"),
        (
            Chain(
                torch.uint8,
                (Decode(codec("int8"), torch.float32), Encode(codec("int4"))),
            ),
            512,
            "codecs of different blocks",
        ),
    ],
)
def test_operations_without_a_kernel_say_why(chain, numel, said):
    assert said in interpreted(unsupported_reason_of, chain, numel)


@pytest.mark.slow
def test_texts_use_no_name_that_is_not_defined(tmp_path):
    found = interpreted(texts)
    assert len(found) > 100
    for number, text in enumerate(found):
        (tmp_path / f"kernel_{number}.py").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        *((text, True) for text in ("int8(stored=bf16)", "int4(stored=pow2)", "fp8(stored=bf16)")),
        *((text, True) for text in ("mxfp8", "mxfp6", "mxfp4")),
        *((text, False) for text in ("int8", "fp8", "nvfp4", "taco", "rotated", "tahquant")),
    ],
)
def test_sums_are_fused_with_products_that_float32_holds(text, exact):
    """Each code times each of many scales, in float64, is a float32 if the kernels rely on it."""
    from commpass.lowering.gpu import parts

    coder = codec(text)
    assert parts.has_exact_products(coder) == exact
    if exact:
        codes = torch.arange(2**coder.grid.bits, dtype=torch.uint8)
        levels = grids.decode(coder.grid, codes, torch.float32).double()
        levels = levels[levels.isfinite()]
        some = torch.rand(500, generator=torch.Generator().manual_seed(0)) + 0.5
        stored = storage.round_up(some, coder.scale.stored).double()
        products = levels[:, None] * stored[None, :]
        assert torch.equal(products.float().double(), products)


def test_every_part_has_a_tile():
    assert interpreted(without_tile) == []
