"""Check kernels of decode, sum, addition and norm against float64, then time them against separate
kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import exact
from benchmarks.gpu.bench import Bench, poisoned
from benchmarks.gpu.checks import share
from benchmarks.gpu.timing import MIB, PLAIN, Copies, copies, measured, sets, told
from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Encode,
    Normalize,
    Scale,
    Step,
    Store,
    Sum,
)

EPS = 1e-5
CODECS = ("int8", "rotated", "fp8")
WIDTHS = (2048, 4096, 5120, 8192)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""The largest error of a norm, relative to the largest result: a rounding to the dtype, twice."""
MIB_OF = 64


def norm_steps(dtype: torch.dtype, width: int, centered: bool) -> tuple[Step, ...]:
    """The steps of an RMSNorm as Llama writes it, or of a LayerNorm without bias."""
    saved = ("mean", "rsqrt") if centered else ("rsqrt",)
    normalize = Normalize(width, EPS, centered, saved)
    if centered:
        return normalize, Scale(width, dtype), Cast(dtype)
    return normalize, Cast(dtype), Scale(width, dtype)


def check(bench: Bench) -> None:
    """Check sums and statistics and norms, for all codecs, widths and dtypes."""
    for spec in CODECS:
        for dtype in CLOSE:
            for width in (256,) if bench.small else WIDTHS:
                for centered, ranks in ((False, 1), (True, 4)):
                    kind = "LayerNorm" if centered else "RMSNorm"
                    name = f"{spec} {str(dtype).removeprefix('torch.')} {kind} {width}, {ranks}"
                    if not bench.late(name):
                        with bench.part(name):
                            _check(bench, spec, dtype, width, centered, ranks, name)


def _check(
    bench: Bench,
    spec: str,
    dtype: torch.dtype,
    width: int,
    centered: bool,
    ranks: int,
    name: str,
) -> None:
    from commpass.lowering.gpu import launch, supported

    coder = codec(spec)
    assert isinstance(coder, BlockCodec)
    rows, numel = 2, (3 if bench.small else 37) * width
    x = bench.normal(rows * ranks, numel) * bench.normal(rows * ranks, numel).exp()
    wire = coder.encode_rows(x.to(dtype).cpu()).to(bench.device)
    residual, weight = bench.normal(rows, numel, dtype=dtype), bench.normal(1, width, dtype=dtype)
    total = () if ranks == 1 else (Sum(ranks),)
    steps = (Decode(coder, dtype), *total, Cast(dtype), Add(dtype), Store())
    chain = Chain(torch.uint8, (*steps, *norm_steps(dtype, width, centered)))
    if why := supported.unsupported_reason(chain, numel):
        bench.check(f"{name}: a kernel", False, why)
        return
    with poisoned():
        y, stream, *saved = launch.run_all(chain, wire, numel, residual, weight)
    plain = Chain(torch.uint8, steps[:-1])
    part = share(stream, launch.run(plain, wire, numel, residual))
    bench.check(f"{name}: stream as without the norm", part == 0, f"{part:.2%} differ")
    decoded = exact.decode(coder, wire, numel, dtype).reshape(rows, ranks, numel).sum(dim=1)
    size = decoded.abs().max() + residual.double().abs().max()
    error = (stream.double() - decoded - residual.double()).abs().max() / size
    bench.check(f"{name}: stream", bool(error <= 2 * CLOSE[dtype]), f"error {float(error):.2e}")
    by_width = stream.double().unflatten(1, (-1, width))
    mean = by_width.mean(-1, keepdim=True)
    shifted = by_width - mean if centered else by_width
    factor = (shifted.square().mean(-1, keepdim=True) + EPS).rsqrt()
    wanted = {"rsqrt": factor} | ({"mean": mean} if centered else {})
    for what, found in zip(("mean", "rsqrt") if centered else ("rsqrt",), saved, strict=True):
        scale = by_width.abs().mean(-1) if what == "mean" else factor.squeeze(-1)
        error = ((found.double() - wanted[what].squeeze(-1)).abs() / scale).max()
        bench.check(f"{name}: {what}", bool(error <= 1e-5), f"error {float(error):.2e}")
    want = (shifted * factor * weight.double()).flatten(1)
    error = (y.double() - want).abs().max() / want.abs().max()
    bench.check(f"{name}: norm", bool(error <= CLOSE[dtype]), f"error {float(error):.2e}")


def time(bench: Bench) -> None:
    """Time one kernel, and the three that it replaces: decode, addition, and Inductor's norm."""
    limit = copies(bench)
    for spec in CODECS[:1] if bench.dry else CODECS:
        for width in (256,) if bench.dry else (4096, 8192):
            name = f"{spec} + add + RMSNorm {width}"
            if not bench.late(name):
                with bench.part(f"timing {name}"):
                    _time(bench, spec, width, name, limit)


def _time(bench: Bench, spec: str, width: int, name: str, limit: Copies | None) -> None:
    from commpass.lowering.gpu import launch

    dtype, coder = torch.bfloat16, codec(spec)
    numel = 8 * width if bench.dry else MIB_OF * MIB // 2
    size = coder.wire_bytes(numel, dtype)
    count = sets(bench, 3 * 2 * numel + size)
    weight = bench.normal(1, width, dtype=dtype)
    decode = Chain(torch.uint8, (Decode(coder, dtype), Cast(dtype)))
    steps = (Decode(coder, dtype), Cast(dtype), Add(dtype), Store())
    whole = Chain(torch.uint8, (*steps, Normalize(width, EPS), Cast(dtype), Scale(width, dtype)))
    encode = Chain(dtype, (Encode(coder),))
    pairs = [
        (
            launch.run(encode, bench.normal(1, numel, dtype=dtype), numel),
            bench.normal(1, numel, dtype=dtype),
        )
        for _ in range(count)
    ]
    normed = _compiled_norm(width)

    def one(wire: Tensor, residual: Tensor) -> list[Tensor]:
        return launch.run_all(whole, wire, numel, residual, weight)

    def apart(wire: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return normed(launch.run(decode, wire, numel), residual, weight)

    coded = Chain(torch.uint8, (*whole.steps, Encode(coder)))

    def one_encoded(wire: Tensor, residual: Tensor) -> list[Tensor]:
        return launch.run_all(coded, wire, numel, residual, weight)

    def then_encoded(wire: Tensor, residual: Tensor) -> Tensor:
        return launch.run(encode, one(wire, residual)[0], numel)

    once = measured(bench, [partial(one_encoded, *pair) for pair in pairs])
    twice = measured(bench, [partial(then_encoded, *pair) for pair in pairs])
    ahead = {"ahead_of_apart": round(twice.seconds / once.seconds, 3)} if once and twice else {}
    moved = 2 * size + 2 * 2 * numel
    told(bench, name, "one kernel, with an encode", once, moved, limit, PLAIN, **ahead)
    told(bench, name, "one kernel, then an encode", twice, moved + 2 * 2 * numel, limit)
    ours = measured(bench, [partial(one, *pair) for pair in pairs])
    theirs = measured(bench, [partial(apart, *pair) for pair in pairs])
    more = {"apart_us": round(theirs.us, 2)} if theirs else {}
    if ours and theirs:
        more["ahead_of_apart"] = round(theirs.seconds / ours.seconds, 3)
    told(bench, name, "one kernel", ours, size + 3 * 2 * numel, limit, PLAIN, **more)
    told(
        bench,
        name,
        "decode, then Inductor's addition and norm",
        theirs,
        size + 5 * 2 * numel,
        limit,
    )  # type: ignore[arg-type]


def _compiled_norm(width: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Inductor's kernel of an addition and an RMSNorm as Llama writes it."""
    torch._dynamo.reset()

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = (x + residual).view(-1, width)
        h = total.float()
        factor = torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
        return weight * (h * factor).to(total.dtype), total

    return torch.compile(add_norm, dynamic=False)
