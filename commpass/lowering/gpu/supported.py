"""Which chains a kernel can be generated for."""

from __future__ import annotations

import torch

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.domain import VALUES
from commpass.codecs.block.layouts import Flat, Layout
from commpass.codecs.block.scales import row_numbers
from commpass.codecs.block.transforms import NoTransform
from commpass.codecs.rows import is_power_of_two
from commpass.lowering.chain import BY_WIDTH, Add, Cast, Chain, Decode, Encode, Enter, Leave, Step

LARGEST_BLOCK = 4096
LARGEST_NORM = 32768
"""The most values of a norm: a program holds all of them, ``TILE`` per warp."""
MOST = 2**31 - 2**16
"""The most values, or bytes of a wire, of a row: kernels count them in 32 bits, including those of
a tile that extends beyond the row."""
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
"""Triton's names of pointers to values."""


def unsupported_reason(chain: Chain, numel: int) -> str:
    """Return why no kernel can be generated for rows of ``numel`` values, or "" if one can."""
    codecs = codecs_of(chain)
    if not codecs:
        return "nothing is encoded or decoded"
    for codec in codecs:
        if why := _unsupported_codec(codec, numel):
            return f"{codec.spec}: {why}"
    sizes = {block_codec(codec).layout.size(numel) for codec in codecs}
    layouts_ = {block_codec(codec).layout for codec in codecs}
    if len(sizes) > 1 or len(layouts_) > 1:
        return "codecs of different blocks: no tile holds whole blocks of both"
    counted = {"values": numel}
    counted["bytes of a wire"] = max(codec.wire_bytes(numel, torch.float32) for codec in codecs)
    if what := next((name for name, many in counted.items() if many >= MOST), ""):
        return f"{counted[what]:,} {what} in a row: kernels count to 2^31"
    dtypes = {
        chain.input_dtype,
        *(s.dtype for s in chain.steps if isinstance(s, (Cast, Add, Decode))),
    }
    if unknown := dtypes - {*TYPES, torch.uint8}:
        return f"{str(unknown.pop()).removeprefix('torch.')} values: kernels compute in float32"
    if why := _unsupported_norm(chain, numel, next(iter(sizes)), next(iter(layouts_))):
        return why
    if needs_row_peaks(chain) and any(_has_effect(step) for step in chain.steps[:-1]):
        return f"{codecs[-1].spec}: the peak of a row must be known before its values are read"
    for step in chain.steps:
        width = step.domain.width if isinstance(step, (Enter, Leave)) else 1
        if next(iter(sizes)) % width:
            return f"a domain of width {width} in blocks of {next(iter(sizes))}"
    return ""


def slower_reason(chain: Chain) -> str:
    """Return why the kernel of a chain takes longer than two with the encode in its own, or "".

    On an H200, a rotation after a norm took 118 us in one kernel and 116 in two, for rows of 4,096
    values, and 147 and 124 for 8,192 (benchmarks/results/gpu_nvidia_h200.json).
    """
    if (
        chain.width
        and chain.encodes
        and not isinstance(block_codec(chain.encodes.codec).transform, NoTransform)
    ):
        return f"{chain.encodes.codec.spec} encodes faster in a kernel of its own than with a norm"
    return ""


def _unsupported_norm(chain: Chain, numel: int, size: int, layout: Layout) -> str:
    if not chain.width:
        return ""
    if len({step.width for step in chain.steps if isinstance(step, BY_WIDTH)}) > 1:
        return "norms of different widths"
    if chain.width % size or numel % chain.width or not isinstance(layout, Flat):
        return f"norms of {chain.width} values begin inside blocks of {size}"
    if chain.width > LARGEST_NORM:
        return f"norms of {chain.width} values: more than a tile of {LARGEST_NORM}"
    return ""


def needs_row_peaks(chain: Chain) -> bool:
    """Whether the kernel of a chain takes the peak of each row, float32 ``[rows]``, as its last
    input: to encode with a scale for each row."""
    return chain.encodes is not None and bool(row_numbers(block_codec(chain.encodes.codec).scale))


def _has_effect(step: Step) -> bool:
    """Whether a step may change values. A cast to float32 widens them."""
    if isinstance(step, Cast):
        return step.dtype != torch.float32
    return not (isinstance(step, (Enter, Leave)) and step.domain == VALUES)


def codecs_of(chain: Chain) -> list[Codec]:
    """Return the codecs that a chain decodes and encodes."""
    return [step.codec for step in chain.steps if isinstance(step, (Decode, Encode))]


def _unsupported_codec(codec: Codec, numel: int) -> str:
    if not isinstance(codec, BlockCodec):
        return "no block codec, and kernels are made of the parts of one"
    size = codec.layout.size(numel)
    if not is_power_of_two(size):
        return f"blocks of {size} values: kernels take powers of two"
    if size > LARGEST_BLOCK:
        return f"blocks of {size} values: more than a tile of {LARGEST_BLOCK}"
    if size * codec.grid.bits % 8 or size < 8:
        return f"blocks of {size} values"
    return ""


def block_codec(codec: Codec) -> BlockCodec:
    assert isinstance(codec, BlockCodec)
    return codec
