"""Time other implementations of the same work in the same run.

These are torch.compile's kernel of a codec's plain form, a few lines of eager torch, and libraries
if they are installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import checks
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.others import module
from benchmarks.gpu.timing import MIB, Time, caller, measured, sets
from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.lowering.chain import Cast, Chain, Decode, Encode

CODECS = ("int8", "rotated", "fp8", "taco", "int4", "rotated(bits=4)", "sdp4bit")
MIB_OF = 64
AHEAD = 1.0
"""Goal: the time of another implementation over ours."""
DIETGPU = 2.0


def compiled(bench: Bench) -> None:
    """Compile the plain forms, so that their timing finds them in Inductor's cache, and compare
    their results with the kernels'."""
    numel = 2048 if bench.dry else MIB_OF * MIB // 2
    for spec in CODECS[:1] if bench.dry else CODECS:
        if bench.late(f"torch.compile of {spec}"):
            continue
        with bench.part(f"torch.compile of {spec}"):
            coder = codec(spec)
            assert isinstance(coder, BlockCodec)
            x = bench.normal(1, numel, dtype=torch.bfloat16)
            encode, decode = _compiled(coder, numel)
            wire = caller(Chain(x.dtype, (Encode(coder),)), numel)(x)
            apart = checks.share(encode(x), wire)
            bench.note(f"{spec}: torch.compile's wire", f"{apart:.3%} of bytes differ")
            steps = (Decode(coder, x.dtype), Cast(x.dtype))
            mine = caller(Chain(torch.uint8, steps), numel)(wire)
            apart = checks.share(decode(wire), mine)
            bench.note(f"{spec}: torch.compile's values", f"{apart:.3%} differ")


def _compiled(coder: BlockCodec, numel: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    torch._dynamo.reset()  # earlier compiled code counts against a limit

    def decode(wire: Tensor) -> Tensor:
        return coder.decode_rows(wire, numel, torch.bfloat16).to(torch.bfloat16)

    def encode(x: Tensor) -> Tensor:
        return coder.encode_rows(x)

    return torch.compile(encode, dynamic=False), torch.compile(decode, dynamic=False)


def timed(bench: Bench) -> None:
    """Time 64 MiB of bf16, with our kernels and with the others."""
    numel = 2048 if bench.dry else MIB_OF * MIB // 2
    xs = [bench.normal(1, numel, dtype=torch.bfloat16) for _ in range(sets(bench, 3 * numel))]
    for spec in CODECS[:1] if bench.dry else CODECS:
        if bench.late(f"rivals of {spec}"):
            continue
        with bench.part(f"rivals of {spec}"):
            _rivals(bench, spec, xs)
    for library in (_torchft, _hadamard, _dietgpu):
        with bench.part(f"{library.__name__[1:]}"):
            library(bench, xs)


def _rivals(bench: Bench, spec: str, xs: Sequence[Tensor]) -> None:
    coder, numel = codec(spec), xs[0].shape[1]
    assert isinstance(coder, BlockCodec)
    encode, decode = _compiled(coder, numel)
    mine = caller(Chain(torch.bfloat16, (Encode(coder),)), numel)
    ours = measured(bench, [partial(mine, x) for x in xs])
    _beside(bench, spec, "encode", "torch.compile", ours, _over(bench, encode, xs))
    if spec in EAGER:
        _beside(bench, spec, "encode", "eager", ours, _over(bench, EAGER[spec], xs))
    wires = [mine(x) for x in xs]
    steps = (Decode(coder, torch.bfloat16), Cast(torch.bfloat16))
    back = caller(Chain(torch.uint8, steps), numel)
    ours = measured(bench, [partial(back, wire) for wire in wires])
    _beside(bench, spec, "decode", "torch.compile", ours, _over(bench, decode, wires))


def _over(bench: Bench, call: Callable[[Tensor], Any], given: Sequence[Tensor]) -> Time | None:
    return measured(bench, [partial(call, each) for each in given])


def _beside(
    bench: Bench,
    spec: str,
    what: str,
    rival: str,
    ours: Time | None,
    theirs: Time | None,
    goal: float = AHEAD,
) -> None:
    more: dict[str, Any] = {"us": None}
    if ours and theirs:
        ahead = theirs.seconds / ours.seconds
        more = {
            "us": round(ours.us, 2),
            "rival_us": round(theirs.us, 2),
            "ahead": round(ahead, 3),
            "spread": round(max(ours.spread, theirs.spread), 4),
            "goal": goal,
            "met": ahead >= goal,
        }
    bench.say("timing", name=f"{spec} against {rival}", what=what, **more)


# --- a few lines of eager torch -------------------------------------------------------------------


def _eager_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(-1, 256).float()
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    return (blocks / scale).round().to(torch.int8), scale


def _eager_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(-1, 256).float()
    scale = blocks.abs().amax(dim=1, keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn), scale


@lru_cache
def _matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    made, pair = torch.ones((1, 1)), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    for _ in range(8):
        made = torch.kron(made, pair)
    return (made / 16).to(device, dtype)


def _eager_rotated(x: Tensor) -> tuple[Tensor, Tensor]:
    """A Hadamard rotation as a matmul in the dtype of x, then 8-bit floats."""
    return _eager_fp8(x.view(-1, 256) @ _matrix(x.dtype, x.device))


EAGER: dict[str, Callable[[Tensor], Any]] = {
    "int8": _eager_int8,
    "fp8": _eager_fp8,
    "taco": _eager_rotated,
}


# --- libraries ------------------------------------------------------------------------------------


def _installed(bench: Bench, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        bench.note(name, "not installed")
        return None


def _torchft(bench: Bench, xs: Sequence[Tensor]) -> None:
    """Rows of 256 values with a float32 scale each, to 8-bit floats: the same as fp8 here."""
    theirs = _installed(bench, "torchft.quantization")
    if theirs is not None and not bench.dry:
        mine = caller(Chain(torch.bfloat16, (Encode(codec("fp8")),)), xs[0].shape[1])
        rows = [x.view(-1, 256) for x in xs]
        their_time = _over(bench, lambda x: theirs.fused_quantize_into_fp8([x], 8), rows)
        _beside(bench, "fp8", "encode", "torchft", _over(bench, mine, xs), their_time)


def _hadamard(bench: Bench, xs: Sequence[Tensor]) -> None:
    """A rotation of each 256 values, then scales and 8-bit floats in eager torch."""
    theirs = _installed(bench, "fast_hadamard_transform")
    if theirs is not None and not bench.dry:
        mine = caller(Chain(torch.bfloat16, (Encode(codec("taco")),)), xs[0].shape[1])

        def rotate(x: Tensor) -> Any:
            return _eager_fp8(theirs.hadamard_transform(x.view(-1, 256), 1 / 16))

        their_time = _over(bench, rotate, xs)
        name = "fast-hadamard-transform and a cast"
        _beside(bench, "taco", "encode", name, _over(bench, mine, xs), their_time)


def _dietgpu(bench: Bench, xs: Sequence[Tensor]) -> None:
    """Lossless compression of floats, with its own temporary memory."""
    if _installed(bench, "dietgpu") is None or bench.dry:
        return
    kernels = module(bench, "exponent")
    if kernels is None:
        return
    coder: Any = codec("exponent")
    temporary = torch.empty(384 << 20, dtype=torch.uint8, device=bench.device)
    ours = _over(bench, partial(kernels.encode_rows, coder), xs)

    def theirs(x: Tensor) -> Any:
        return torch.ops.dietgpu.compress_data(True, [x.view(-1)], False, temporary, None, None)

    name = "DietGPU"
    _beside(bench, "exponent", "encode", name, ours, _over(bench, theirs, xs), DIETGPU)
