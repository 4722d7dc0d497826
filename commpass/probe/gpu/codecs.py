"""Compare the kernels of every codec with the codec's plain form on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import CompandedGrid
from commpass.codecs.block.scales import Absmax, SharedExponent, Static
from commpass.codecs.block.transforms import NoTransform
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.entropy.operators import sizes
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.lowering.chain import Chain, Decode, Encode
from commpass.lowering.gpu import entropy, exponent, launch, supported
from commpass.probe.gpu.finding import Finding

NAMES = (
    *("int8", "int6", "int4", "fp8", "rotated", "taco", "table", "tahquant", "sdp4bit"),
    *("equarx(width=1024)", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "exponent", "ecq"),
)
"""The codecs with kernels for dense values. Blocks of EQuARX follow the shape of a tensor; kernels
need a power of two."""
ROWS, NUMEL = 3, 4096 + 51
DIFFERENT = 0.02
"""The largest share of bytes that may differ if a rotation, root or sum is made in another order:
codes at a tie."""
ARITHMETIC = 1e-5
"""The error of float32 arithmetic, relative to the largest value of a block."""
SPACING = 2.0**-7
"""The largest distance of two neighbours in bfloat16, relative to them."""
SAME = "encode and decode give the bits of the plain form"
BROKEN = "do not compress with it on this GPU, and report it"

Form = Callable[[Codec, Tensor], Tensor]


def findings(codecs: list[Codec], device: torch.device) -> Iterator[Finding]:
    """Yield a finding for each codec. A kernel that fails is a finding."""
    for each in codecs:
        if why := unsupported_reason(each):
            yield Finding(f"codec {each.spec}", "no kernel", True, f"torch's own kernels: {why}")
            continue
        try:
            yield compared(each, device)
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            yield Finding(f"codec {each.spec}", f"failed: {why[:200]}", False, BROKEN)


def unsupported_reason(codec: Codec, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return why there are no kernels that encode and decode with a codec, or ""."""
    if isinstance(codec, ExponentCodec):
        return exponent.unsupported_reason(NUMEL, dtype) or ""
    if isinstance(codec, EntropyCodec):
        return entropy.unsupported_reason(NUMEL)
    if not isinstance(codec, BlockCodec):
        return "it is no block codec, and not exponent or ecq"
    chains = Chain(dtype, (Encode(codec),)), Chain(torch.uint8, (Decode(codec, dtype),))
    return next(filter(None, (supported.unsupported_reason(each, NUMEL) for each in chains)), "")


def compared(codec: Codec, device: torch.device) -> Finding:
    """Encode and decode the same values by kernels and by the plain form, and compare them."""
    rows = values()
    plain = codec.encode_rows(rows)
    encode, decode = kernels_of(codec)
    wire = encode(rows.to(device)).cpu()
    decoded = decode(plain.to(device)).cpu().bfloat16()  # Triton's interpreter leaves float32
    want = codec.decode_rows(plain, NUMEL, rows.dtype).bfloat16()
    bytes_apart, values_apart = differing(wire, plain), differing(decoded, want)
    if not (bytes_apart or values_apart):
        return Finding(f"codec {codec.spec}", SAME, True)
    allowed, further = 0.0, values_apart
    if not is_exact(codec):
        allowed, further = DIFFERENT, beyond_rounding(codec, decoded, want)
    state = f"{bytes_apart:.2%} of the wire and {values_apart:.2%} of the values differ"
    if further < values_apart:
        state += f", {further:.2%} by more than rounding"
    works = bytes_apart <= allowed and not further
    meaning = f"up to {allowed:.0%} of the wire may: ties of rounding" if works else BROKEN
    return Finding(f"codec {codec.spec}", state, works, meaning)


def beyond_rounding(codec: Codec, found: Tensor, want: Tensor) -> float:
    """Return the share of values that differ by more than float32 arithmetic and the rounding to
    bfloat16."""
    if found.shape != want.shape:
        return 1.0
    assert isinstance(codec, BlockCodec)
    apart, size = (found.double() - want.double()).abs(), want.double().abs()
    blocks = codec.layout.split(size)
    allowed = blocks * SPACING + blocks.amax(-1, keepdim=True) * ARITHMETIC
    return int((codec.layout.split(apart) > allowed).sum()) / apart.numel()


def values() -> Tensor:
    """Return bfloat16 rows ``[ROWS, NUMEL]`` of random numbers, with zeros, outliers and numbers of
    all sizes."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, NUMEL, generator=random)
    rows[0, :256] = 0
    rows[1, ::97] *= 100
    rows[2] *= torch.exp2(torch.randint(-20, 20, (NUMEL,), generator=random).float())
    return rows.bfloat16()


def kernels_of(codec: Codec) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the kernels that encode rows, and that decode wires to rows."""
    if isinstance(codec, ExponentCodec):
        decode = partial(exponent.decode_rows, codec, numel=NUMEL, dtype=torch.bfloat16)
        return partial(exponent.encode_rows, codec), decode
    if isinstance(codec, EntropyCodec):
        return partial(_encode_entropy, codec), partial(_decode_entropy, codec)
    assert isinstance(codec, BlockCodec)
    encoding = Chain(torch.bfloat16, (Encode(codec),))
    decoding = Chain(torch.uint8, (Decode(codec, torch.bfloat16),))
    return partial(launch.run, encoding, numel=NUMEL), partial(launch.run, decoding, numel=NUMEL)


def _encode_entropy(codec: EntropyCodec, rows: Tensor) -> Tensor:
    regions = entropy.encode_rows(rows, codec.form, codec.rotated)
    return torch.cat(codec.padded(*regions), dim=1)


def _decode_entropy(codec: EntropyCodec, wire: Tensor) -> Tensor:
    first, _ = codec.parts(NUMEL, torch.bfloat16)
    code, side = sizes(NUMEL, codec.form.nbytes, torch.bfloat16)
    regions = wire.narrow(1, 0, code), wire.narrow(1, first, side)
    limit = torch.finfo(torch.bfloat16).max
    return entropy.decode_rows(*regions, codec.form, codec.rotated, limit, NUMEL)


def is_exact(codec: Codec) -> bool:
    """Whether its kernels give all bits of the plain form: there is no rotation, root or sum, or
    they are made in the same order."""
    return isinstance(codec, (ExponentCodec, EntropyCodec)) or (
        isinstance(codec, BlockCodec)
        and isinstance(codec.transform, NoTransform)
        and isinstance(codec.scale, (Absmax, SharedExponent, Static))
        and not isinstance(codec.grid, CompandedGrid)
    )


def differing(found: Tensor, want: Tensor) -> float:
    """Return the share of elements that differ in their bits."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return 1.0
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.itemsize]
    apart = found.contiguous().view(words) != want.contiguous().view(words)
    return float(apart.double().mean())
