"""Kernels as an NVIDIA GPU with 8-bit floats runs them: the interpreter follows the inline PTX.

Approximations are off by as much as PTX's manual permits, and ``ftz`` instructions flush subnormal
numbers. A block of any size is encoded within the codec's bound, and one that is not finite changes
no other.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from interpreter import interpreted
from plain_form import plainly
from ptx import as_on_nvidia, inverse, prmt
from tiers import rarely

from commpass.codecs import codec
from commpass.codecs.block import storage, transforms
from commpass.lowering.chain import Chain, Decode, Encode, Sum

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

U8, F32, BF16, F16 = torch.uint8, torch.float32, torch.bfloat16, torch.float16
LIMITS = {F32: (-149.0, 127.9), BF16: (-133.0, 127.9), F16: (-24.0, 15.9)}
"""The powers of two of the smallest and the largest block."""


def blocks_of(coder, dtype: torch.dtype) -> tuple[torch.Tensor, list[str]]:
    """Return one row of blocks of many kinds, the last of which is not full, and their names."""
    block = coder.block
    random = torch.Generator().manual_seed(7)
    normal = torch.randn(block, generator=random)
    low, high = LIMITS[dtype]
    largest = torch.finfo(dtype).max
    alone = (torch.arange(block) == 3).float()
    gathered = transforms.inverse(coder.transform, alone, torch.zeros(1)).sign()
    made = {
        "normal": normal,
        "zeros": torch.zeros(block),
        "minus zeros": torch.full((block,), -0.0),
        "constant": torch.full((block,), 1.37),
        "one outlier": torch.where(torch.arange(block) == 5, 1e4, normal),
        "signs in turn": 1.0 - 2.0 * (torch.arange(block) % 2),
        "one value": (torch.arange(block) == 3) * 2.5,
        "heavy tails": normal / torch.randn(block, generator=random).abs().clamp_min(1e-3),
        "largest": normal.sign() * largest,
        "all largest": torch.full((block,), largest),
        "largest that a rotation gathers in one": gathered * largest,
        "half of these": gathered * (largest / 2),
        "nan": torch.where(torch.arange(block) == 7, math.nan, normal),
        "inf": torch.where(torch.arange(block) == 2, math.inf, normal),
        "both infs": torch.where(torch.arange(block) < 2, normal.sign() * math.inf, normal),
    }
    for power in torch.linspace(low, high, 18).tolist():
        share = torch.rand(block, generator=random, dtype=torch.float64) * 2 - 1
        made[f"2^{power:.0f}"] = (share * 2.0**power).clamp(-largest, largest)
    made["tail"] = normal[: block // 2 + 1]
    return torch.cat([each.to(dtype) for each in made.values()])[None], list(made)


def ran(
    chain: Chain, taken: torch.Tensor, numel: int, ulps: int, pairs: bool = False
) -> torch.Tensor:
    from commpass.lowering.gpu import generate, launch

    made = generate.kernel(chain, numel)
    out = launch.empty(made, taken.shape[0] // chain.ranks, numel, taken.device)
    with as_on_nvidia(ulps, pairs=pairs), np.errstate(all="ignore"):
        launch.launch(made, [taken], out, numel)
    return out


def by_block(x: torch.Tensor, block: int) -> torch.Tensor:
    padding = -x.shape[1] % block
    return torch.nn.functional.pad(x.double(), (0, padding)).view(-1, block)


SPECS = [
    *(
        "rotated(block=64)",
        rarely("rotated(bits=4, block=32)"),
        rarely("rotated(bits=2, block=64)"),
    ),
    *(rarely("rotated(bits=3, block=16)"), rarely("rotated(bits=5, block=64)")),
    *(rarely("rotated(bits=6, block=64)"), rarely("rotated(bits=7, block=128)")),
    *(rarely("rotated(stored=pow2, block=64)"), rarely("rotated(scale=rms, block=64)")),
    rarely("rotated(bits=4, scale=lsq, block=64)"),
    *(rarely("rotated(form=int, bits=3, block=32)"), rarely("rotated(form=e5m2, block=64)")),
    rarely("rotated(form=table, bits=2, scale=absmax, stored=pow2, block=64)"),
    *(rarely("table(bits=3, block=32)"), rarely("table(bits=3, scale=lsq, block=32)")),
    *(rarely("taco(block=64)"), rarely("sdp4bit(block=32)"), rarely("tahquant(block=32)")),
    *(rarely("tahquant(bits=3, form=companded, block=32)"), rarely("int8(stored=bf16, block=64)")),
    *(rarely("int4(stored=pow2, block=64)"), rarely("fp8(stored=bf16, block=64)")),
]


@pytest.mark.parametrize("ulps", [1, rarely(-1)])
@pytest.mark.parametrize("dtype", [BF16, rarely(F32), rarely(F16)])
@pytest.mark.parametrize("text", SPECS)
def test_blocks_of_every_size_are_encoded_within_the_bound(text, dtype, ulps):
    coder = codec(text)
    x, names = blocks_of(coder, dtype)
    numel = x.shape[1]
    with plainly():
        plain = coder.encode_rows(x)
        want = coder.decode_rows(plain, numel, dtype)
    wire = interpreted(ran, Chain(dtype, (Encode(coder),)), x, numel, ulps)
    decoded = interpreted(ran, Chain(U8, (Decode(coder, dtype),)), plain, numel, ulps)
    with plainly():
        found = coder.decode_rows(wire, numel, dtype)
    finite = want.isfinite()
    assert torch.equal(found.isfinite(), finite)
    assert torch.equal(decoded.isfinite(), finite)
    exact = torch.where(finite, x.double(), 0.0)
    kept = [torch.where(finite, each.double(), 0.0) for each in (found, want, decoded)]
    mine, its, read = (by_block(each, coder.block) for each in kept)
    sizes = by_block(exact, coder.block)
    floor = coder.floor(dtype)
    error, before = (mine - sizes).norm(dim=1), (its - sizes).norm(dim=1)
    bound = coder.bound * sizes.norm(dim=1) * (1 + 1e-4) + floor * coder.block**0.5
    worse = (error > bound) | (error > before * 1.05 + 1e-6 * sizes.norm(dim=1) + 0.01 * floor)
    assert not worse.any(), [name for name, bad in zip(names, worse, strict=True) if bad]
    off = (read - its).abs().amax(dim=1) > 1e-5 * its.abs().amax(dim=1) + 1e-42
    assert not off.any(), [name for name, bad in zip(names, off, strict=True) if bad]


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_inverse_of_every_stored_scale_is_rounded_to_the_nearest(ulps):
    """So a block has the codes of an exact division, whatever an approximation gives."""
    stored = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(BF16).float()
    normal = stored[stored <= 2.0**125]  # of the smallest grid that has a stored peak
    for scales, is_normal in ((normal, True), (stored, False)):
        found = interpreted(inverses, scales, is_normal, ulps)
        assert torch.equal(found, 1 / scales)


def inverses(scales: torch.Tensor, normal: bool, ulps: int) -> torch.Tensor:
    import triton

    from commpass.lowering.gpu.source import constant, function_text, load, of_text
    from commpass.lowering.gpu.tiles import numbers

    lines = [
        "place = tl.arange(0, COUNT)",
        "x = tl.load(input + place, mask=place < numel, other=1.0)",
        "tl.store(output + place, reciprocal_of_short(x, NORMAL), mask=place < numel)",
    ]
    taken = ["input", "output", "numel", constant("COUNT"), constant("NORMAL")]
    known = {"reciprocal_of_short": numbers.reciprocal_of_short}
    source = of_text("inverted", function_text("inverted", taken, lines), known)
    out, numel = torch.empty_like(scales), scales.numel()
    with as_on_nvidia(ulps), np.errstate(all="ignore"):
        count = triton.next_power_of_2(numel)
        load(source)[(1,)](scales, out, numel, COUNT=count, NORMAL=normal)
    return out


def test_approximate_inverse_flushes_subnormal_numbers():
    x = np.array([1e-40, -1e-40, 2.0**-126, 2.0**126, 2.5e38, 3.0, np.inf, 0.0], np.float32)
    with np.errstate(all="ignore"):
        found = inverse(x, 0)
    want = [np.inf, -np.inf, 2.0**126, 2.0**-126, 0.0, np.float32(1 / 3), 0.0, np.inf]
    assert found.tolist() == want


def test_bytes_are_permuted():
    a, b, selector = (np.array([each], np.uint32) for each in (0x44332211, 0x88776655, 0x7604))
    assert prmt(a, b, selector).tolist() == [0x88771155]


@pytest.mark.parametrize("ranks", [2, rarely(5), rarely(16)])
@pytest.mark.parametrize("text", ["rotated(bits=4, block=32)", rarely("rotated(block=64)")])
def test_sums_are_those_of_the_plain_form(text, ranks):
    """A sum of blocks of all sizes; one rank's is not finite."""
    coder, dtype = codec(text).domain_codec, BF16
    one, _ = blocks_of(coder, dtype)
    numel = one.shape[1]
    wires = coder.encode_rows(torch.cat([one.roll(rank, 1) for rank in range(ranks)]).float())
    first, *others = coder.decode_rows(wires, numel, dtype).split(1)
    total = sum(others, first)
    found = interpreted(ran, Chain(U8, (Decode(coder, dtype), Sum(ranks))), wires, numel, 1)
    finite = total.isfinite()
    assert torch.equal(found.isfinite(), finite)
    torch.testing.assert_close(found[finite], total[finite], rtol=1e-5, atol=1e33)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("largest", [2.0**99, math.inf])
@pytest.mark.parametrize("ranks", [3, rarely(9)])
def test_sums_of_int4_have_the_bits_of_the_plain_form(ranks, largest, pairs):
    """Of blocks of all sizes: with small ones only, no program decodes the usual way."""
    coder, dtype = codec("int4(block=32)"), BF16
    one, _ = blocks_of(coder, dtype)
    one = torch.where(one.abs() < largest, one, 1.5) if largest < math.inf else one
    numel = one.shape[1]
    turned = [one.roll(32 * turn, 1) * (-1) ** (turn // 2) for turn in range(ranks)]
    wires = coder.encode_rows(torch.cat(turned).float())
    first, *others = coder.decode_rows(wires, numel, dtype).float().split(1)
    total = sum(others, first)
    found = interpreted(ran, Chain(U8, (Decode(coder, dtype), Sum(ranks))), wires, numel, 1, pairs)
    assert torch.equal(found.isnan(), total.isnan())
    assert torch.equal(found.nan_to_num(0.0), total.nan_to_num(0.0))
    zero = total == 0
    assert torch.equal(found[zero].signbit(), total[zero].signbit())


FORMS = [f"form={form}, bits={bits}" for form in ("companded", "int") for bits in range(2, 9)]
FORMS += [f"form=table, bits={bits}" for bits in range(2, 7)] + ["form=e4m3", "form=e5m2"]


@pytest.mark.parametrize("stored", ["bf16", "pow2"])
@pytest.mark.parametrize("rule", ["absmax", "rms", "lsq", "dual"])
def test_inverse_that_flushes_is_for_scales_whose_inverse_is_normal(rule, stored):
    from commpass.lowering.gpu import parts

    flushed = 0
    for form in FORMS:
        coder = codec(f"rotated({form}, scale={rule}, stored={stored})")
        *_, line = parts.divide(coder.scale, coder.grid)
        if re.search(r"in_units\w*\(\w, number_\d, FP8, True", line):
            peak = torch.tensor(torch.finfo(torch.float32).max)
            number = storage.round_up(peak / coder.grid.largest, stored)
            assert rule == "absmax"
            assert number < 2.0**126
            flushed += 1
    assert (flushed > 0) == (rule == "absmax")
