"""Check the kernels of block codecs against float64, on fresh random inputs, into poisoned memory.

If no rotation, root or sum is involved, a kernel must also give the bits of the codec's plain form
on a CPU. Otherwise the share of bytes that differ is reported, and must be small.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import exact
from benchmarks.gpu.bench import Bench, poisoned
from commpass.codecs import codec, operators
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.domain import VALUES
from commpass.codecs.block.grids import CompandedGrid
from commpass.codecs.block.scales import Absmax, SharedExponent, Static, row_numbers
from commpass.codecs.block.transforms import NoTransform
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

CODECS = (
    "int8",
    "rotated",
    "fp8",
    "int4",
    "rotated(bits=4)",
    "taco",
    "int6",
    "fp8(form=e5m2)",
    "taco(scale=absmax)",
    "sdp4bit",
    "rotated(form=int)",
    "table",
    "equarx(width=1024)",
    "tahquant",
    "int8(rounding=stochastic)",
    "mxfp8",
    "mxfp4",
    "mxfp6",
    "nvfp4",
)
DIFFERENT = 0.02
"""The largest share of bytes that may differ from the plain form if sums are made in another order:
codes at a tie."""
ARITHMETIC = 1e-5
"""The error of float32 arithmetic, relative to the largest value of a block: two hundred values are
added."""


def block(bench: Bench, spec: str) -> None:
    """Check all kernels of a codec: first those of the timed sizes, then others."""
    coder = codec(spec).salted(1, 2)
    assert isinstance(coder, BlockCodec)
    for dtype, numel, checks in cases(bench):
        where = f"{spec} {str(dtype).removeprefix('torch.')} {numel:,}"
        for check in checks:
            if not bench.late(f"{where} {check.__name__}"):
                with bench.part(f"{where} {check.__name__}"):
                    check(bench, coder, dtype, numel, where)


def cases(bench: Bench) -> list[tuple[torch.dtype, int, tuple[Any, ...]]]:
    """Return one size with whole blocks, whose kernels are the timed ones, and others without."""
    every = (coded, summed, in_domain, added, not_finite)
    if bench.small:
        return [(torch.bfloat16, 1024 + 51, every)]
    return [
        (torch.bfloat16, 1 << 20, every),
        (torch.float32, 300_007, (coded, summed, in_domain, added, not_finite)),
        (torch.float16, 65_536 + 129, (coded, not_finite)),
    ]


def plainly(coder: BlockCodec) -> bool:
    """Return whether a kernel must give the bits of the plain form."""
    return (
        isinstance(coder.transform, NoTransform)
        and isinstance(coder.scale, (Absmax, SharedExponent, Static))
        and not isinstance(coder.grid, CompandedGrid)
    )


def ran(bench: Bench, chain: Chain, taken: Tensor, numel: int, *others: Tensor) -> Tensor | None:
    """Return the output of the kernel of a chain; if there is no kernel, report a failed check and
    return None."""
    from commpass.lowering.gpu import launch, supported

    if why := supported.unsupported_reason(chain, numel):
        steps = " + ".join(type(s).__name__ for s in chain.steps)
        bench.check(f"a kernel for {steps} of {numel:,}", False, why)
        return None
    with poisoned():
        made = launch.run(chain, taken, numel, *others)
    bench.synchronize()
    return made


# --- comparisons ----------------------------------------------------------------------------------


def share(found: Tensor, want: Tensor) -> float:
    """Return the share of values that differ in their bits; any two NaNs are equal."""
    found, want = found.cpu(), want.cpu()
    assert (found.shape, found.dtype) == (want.shape, want.dtype), (found.shape, want.shape)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.itemsize]
    apart = found.contiguous().view(bits) != want.contiguous().view(bits)
    if found.is_floating_point():
        apart &= ~(found.isnan() & want.isnan())
    return float(apart.double().mean()) if apart.numel() else 0.0


def same_bits(bench: Bench, name: str, coder: BlockCodec, found: Tensor, want: Tensor) -> None:
    """Compare with the plain form on a CPU."""
    part = share(found, want)
    if plainly(coder):
        bench.check(f"{name}: bits of the plain form", part == 0, f"{part:.2%} differ", differ=part)
    elif found.dtype == torch.uint8:
        few = part <= DIFFERENT
        bench.check(f"{name}: bytes of the plain form", few, f"{part:.3%} differ", differ=part)
    else:
        bench.note(f"{name}: bits of the plain form", f"{part:.2%} differ", differ=part)


def close(
    bench: Bench, name: str, coder: BlockCodec, found: Tensor, want: Tensor, size: Tensor
) -> None:
    """Check that values differ from the float64 ones by float32 arithmetic only.

    ``size`` is the magnitude of the values that they were computed from.
    """
    finite = want.isfinite()
    peak = exact.blocks_of(coder, size.double().nan_to_num(0, 0, 0).abs()).amax(-1, keepdim=True)
    most = peak.expand(-1, -1, coder.layout.size(found.shape[1]))
    most = exact.joined(coder, most.contiguous(), found.shape[1])
    worst = _worst((found.double() - want).abs()[finite], most[finite] * ARITHMETIC + 1e-44)
    good = bool(torch.equal(found.isfinite(), finite)) and worst <= 1
    bench.check(f"{name}: float64", good, f"{worst:.2g} of the error allowed", of_allowed=worst)


def within_bound(
    bench: Bench, name: str, coder: BlockCodec, wire: Tensor, want: Tensor, dtype: torch.dtype
) -> float:
    """Check that the error of every block is within the codec's bound, and return the relative
    error of all."""
    numel = want.shape[1]
    want = want.double()
    error = exact.blocks_of(coder, exact.decode(coder, wire, numel, dtype) - want).norm(dim=-1)
    norms = exact.blocks_of(coder, want).norm(dim=-1)
    floor = math.sqrt(coder.layout.size(numel)) * coder.floor(dtype)
    allowed = coder.bound * norms + floor + ARITHMETIC * (coder.bound + 1) * norms
    worst, relative = _worst(error, allowed + 1e-44), float(error.norm() / norms.norm())
    said = f"{worst:.2g} of the bound, relative error {relative:.2e}"
    bench.check(f"{name}: bound", worst <= 1, said, of_bound=worst, relative_error=relative)
    filled = exact.gaps(coder, wire, numel)
    bench.check(f"{name}: gaps", not bool(filled.any()), f"{filled.numel()} bytes between regions")
    return relative


def _worst(error: Tensor, allowed: Tensor) -> float:
    ratio = error / allowed
    return float(ratio.nan_to_num(math.inf).max()) if ratio.numel() else 0.0


# --- kernels --------------------------------------------------------------------------------------


def coded(bench: Bench, coder: BlockCodec, dtype: torch.dtype, numel: int, where: str) -> None:
    """Check encode, decode, and decode to the dtype that was encoded."""
    x = bench.rows(3, numel, dtype)
    plain = coder.encode_rows(x.cpu())
    wire = ran(bench, Chain(dtype, (Encode(coder),)), x, numel)
    if wire is None:
        return
    relative = within_bound(bench, f"{where} encode", coder, wire, x, dtype)
    back = exact.decode(coder, plain.to(x.device), numel, dtype)
    theirs = float((back - x.double()).norm() / x.double().norm())
    bench.check(
        f"{where} encode: error of the plain form",
        relative <= 1.01 * theirs + 1e-7,
        f"{relative:.3e}, the plain form's {theirs:.3e}",
    )
    same_bits(bench, f"{where} encode", coder, wire, plain)
    decode = Decode(coder, dtype)
    values = ran(bench, Chain(torch.uint8, (decode,)), plain.to(x.device), numel)
    assert values is not None
    close(bench, f"{where} decode", coder, values, back, back)
    same_bits(bench, f"{where} decode", coder, values, coder.decode_rows(plain, numel, dtype))
    cast = ran(bench, Chain(torch.uint8, (decode, Cast(dtype))), plain.to(x.device), numel)
    assert cast is not None
    part = share(cast, values.to(dtype))
    bench.check(f"{where} decode to the dtype: rounded", part == 0, f"{part:.2%} differ")


def summed(bench: Bench, coder: BlockCodec, dtype: torch.dtype, numel: int, where: str) -> None:
    """Check decode and sum, and decode, sum, mean and encode, over several ranks."""
    inner = coder.domain_codec
    assert isinstance(inner, BlockCodec)
    for ranks, wanted in summing(bench, dtype).items():
        per = numel if bench.small else max(numel // ranks, 1)
        x = bench.rows(ranks, per, dtype).float()
        plain = inner.encode_rows(x.cpu())
        wires = plain.to(x.device)
        each = exact.decode(inner, wires, per, dtype)
        total = each.sum(dim=0, keepdim=True)
        want = operators.sum_rows(inner.decode_rows(plain, per, dtype))
        steps = (Decode(inner, dtype), Sum(ranks))
        for what in wanted:
            name = f"{where} {what}({ranks})"
            if what == "decode_sum":
                made = ran(bench, Chain(torch.uint8, steps), wires, per)
                if made is not None:
                    size = each.abs().sum(dim=0, keepdim=True)
                    close(bench, name, inner, made, total, size)
                    same_bits(bench, name, inner, made, want)
                continue
            if row_numbers(inner.scale):
                continue  # the peak of a row of sums is known only when all of it was summed
            shared = ranks if "mean" in what else 1
            by = (Divide(float(ranks)),) if shared > 1 else ()
            wire = ran(bench, Chain(torch.uint8, (*steps, *by, Encode(inner))), wires, per)
            if wire is not None:
                within_bound(bench, name, inner, wire, total / shared, torch.float32)
                same_bits(bench, name, inner, wire, inner.encode_rows(want / shared))


def summing(bench: Bench, dtype: torch.dtype) -> dict[int, tuple[str, ...]]:
    """Return numbers of ranks, and what is made of their sum.

    For many ranks a kernel takes many seconds to compile. Each timed kernel is checked, and any
    other once.
    """
    kinds = ("decode_sum", "decode_sum_encode", "decode_sum_mean_encode")
    if bench.small:
        return {4: kinds, 8: kinds[:2]}
    return {4: kinds[:2], 8: kinds[1:2]} if dtype == torch.bfloat16 else {4: kinds[2:]}


def in_domain(bench: Bench, coder: BlockCodec, dtype: torch.dtype, numel: int, where: str) -> None:
    """Check values that are converted to a domain and encoded there, and the way back."""
    if coder.domain == VALUES:
        return
    domain, inner, numel = coder.domain, coder.domain_codec, coder.padded_numel(numel)
    assert isinstance(inner, BlockCodec)
    x = bench.rows(2, numel, dtype)
    wire = ran(bench, Chain(dtype, (Enter(domain), Encode(inner))), x, numel)
    if wire is None:
        return
    entered = exact.enter(domain, x.double())
    within_bound(bench, f"{where} enter_encode", inner, wire, entered, torch.float32)
    plain = inner.encode_rows(domain.to_domain(x.cpu().float()))
    same_bits(bench, f"{where} enter_encode", coder, wire, plain)
    steps = (Decode(inner, dtype), Leave(domain), Cast(torch.float32))
    made = ran(bench, Chain(torch.uint8, steps), wire, numel)
    assert made is not None
    want = exact.leave(domain, exact.decode(inner, wire, numel, dtype))
    close(bench, f"{where} decode_leave", coder, made, want, want)


def added(bench: Bench, coder: BlockCodec, dtype: torch.dtype, numel: int, where: str) -> None:
    """Check decode to the dtype with a residual added."""
    x, other = bench.rows(2, numel, dtype), bench.normal(2, numel, dtype=dtype)
    wire = coder.encode_rows(x.cpu()).to(x.device)
    steps = (Decode(coder, dtype), Cast(dtype))
    plain = ran(bench, Chain(torch.uint8, steps), wire, numel)
    made = ran(bench, Chain(torch.uint8, (*steps, Add(dtype))), wire, numel, other)
    if plain is None or made is None:
        return
    part = share(made, plain + other)
    bench.check(f"{where} decode_add: decode, then add", part == 0, f"{part:.2%} differ")
    want = exact.decode(coder, wire, numel, dtype) + other.double()
    near = torch.finfo(dtype).eps * (want.abs() + other.double().abs() * 2)
    size = exact.blocks_of(coder, want - other.double()).abs().amax(-1, keepdim=True)
    most = size.expand(-1, -1, coder.layout.size(numel)).contiguous()
    near = near + ARITHMETIC * exact.joined(coder, most, numel)
    worst = _worst((made.double() - want).abs(), near + 1e-44)
    bench.check(f"{where} decode_add: float64", worst <= 1, f"{worst:.2g} of the error allowed")


def not_finite(bench: Bench, coder: BlockCodec, dtype: torch.dtype, numel: int, where: str) -> None:
    """Law 2: NaN and Inf are preserved, and affect their block only; a row of zeros stays zero."""
    x = bench.normal(3, numel, dtype=dtype)
    x[0, numel // 2], x[0, -1], x[1, numel // 3] = math.nan, math.inf, -math.inf
    x[2] = 0.0
    chain = Chain(torch.uint8, (Decode(coder, dtype), Cast(dtype)))
    wire = ran(bench, Chain(dtype, (Encode(coder),)), x, numel)
    if wire is None:
        return
    back = ran(bench, chain, wire, numel)
    assert back is not None
    kept = not bool((~x.isfinite() & back.isfinite()).any())
    spoiled = exact.blocks_of(coder, (~x.isfinite()).double()).amax(-1, keepdim=True)
    of_spoiled = spoiled.expand(-1, -1, coder.layout.size(numel)).contiguous()
    others = exact.joined(coder, of_spoiled, numel) == 0
    bench.check(f"{where}: what is not finite stays so", kept)
    bench.check(f"{where}: other blocks stay finite", bool(back.isfinite()[others].all()))
    zeros = float(back[2].abs().max())
    bench.check(f"{where}: zeros stay zeros", zeros <= coder.floor(dtype), f"largest {zeros:.1e}")
