"""Generate the C++ of a chain: one loop over the units of all rows, with one line per step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

import torch

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.scales import row_numbers
from commpass.codecs.block.transforms import Hadamard
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.operators import UNROLLED_RANKS
from commpass.lowering.chain import (
    BY_WIDTH,
    Add,
    Cast,
    Chain,
    Decode,
    Divide,
    Encode,
    Enter,
    Leave,
    Normalize,
    Scale,
    Shift,
    Store,
    Sum,
    dtype_after,
    further_inputs,
)
from commpass.lowering.cpu import blocks, exponents, norms
from commpass.lowering.cpu.common import NAMES, PRELUDE, number
from commpass.lowering.cpu.floats import FLOATS
from commpass.lowering.cpu.grids import CODES
from commpass.lowering.cpu.rotation import ROTATION, transform
from commpass.lowering.cpu.scales import SCALES, uses_sums
from commpass.utils.ambient import making_lasting_tensors

TILE = 256
"""A unit holds a multiple of this many values: tiles of 16 vectors of 16."""
LARGEST_UNIT = 8192
STEPS = (Encode, Decode, Sum, Divide, Enter, Leave, Cast, Add, Store, *BY_WIDTH)
"""The steps that have C++."""


def unsupported_reason(chain: Chain) -> str:
    """Return why there is no C++ for a chain, or "" if there is."""
    if chain.steps and not _has_vectors():
        return "the C++ needs vector instructions, and Inductor finds none on this machine"
    return _unsupported_reason(chain)


@lru_cache(maxsize=1024)
def _unsupported_reason(chain: Chain) -> str:
    return next(_unsupported_reasons(chain), "")


def _has_vectors() -> bool:
    from torch._inductor import cpu_vec_isa

    return bool(cpu_vec_isa.pick_vec_isa())


def _unsupported_reasons(chain: Chain) -> Iterator[str]:
    if not chain.steps:
        yield "a chain without steps"
    if _lossless(chain) is not None:
        yield from _lossless_reasons(chain)
        return
    for place, step in enumerate(chain.steps):
        if not isinstance(step, STEPS):
            yield f"there is no C++ for {type(step).__name__}"
        if isinstance(step, (Encode, Decode)):
            if not isinstance(step.codec, BlockCodec):
                yield "no block codec, and kernels are made of the parts of one"
            elif reason := blocks.unsupported_reason(step.codec):
                yield reason
        if isinstance(step, Decode) and place:
            yield "only the first step can read a wire"
        if isinstance(step, Encode) and place < len(chain.steps) - 1:
            yield "only the last step can write a wire"
        if isinstance(step, Sum):
            if place > 1 or (place == 1 and chain.decodes is None):
                yield "a sum is supported only as the first step, or after decode"
            if step.ranks > UNROLLED_RANKS:
                yield f"a sum of {step.ranks} rows: C++ sums up to {UNROLLED_RANKS} in rank order"
        if isinstance(step, (Sum, Enter, Leave)) and _dtypes(chain)[place] != torch.float32:
            yield f"{type(step).__name__} of {_dtypes(chain)[place]}: C++ supports only float32"
        if isinstance(step, (Enter, Leave)) and getattr(step.domain.transform, "pivot", False):
            yield "there is no C++ for a pivot swap"
    for dtype in [*_dtypes(chain), *(s.dtype for s in chain.steps if isinstance(s, Decode))]:
        if dtype not in NAMES and dtype != torch.uint8:
            yield f"there is no C++ for {dtype}"
    for operand in further_inputs(chain):
        if operand.dtype not in NAMES:
            yield f"there is no C++ for {operand.dtype}"
    if len({step.width for step in chain.steps if isinstance(step, BY_WIDTH)}) > 1:
        yield "norms of different widths"
    if _unit(chain) > LARGEST_UNIT:
        yield f"no unit of up to {LARGEST_UNIT} values holds whole blocks of all steps"
    encoder = chain.encodes.codec if chain.encodes is not None and chain.width else None
    if isinstance(encoder, BlockCodec) and row_numbers(encoder.scale):
        yield "a norm before an encode that needs the peak of the whole row"
    if _norm_unit(chain) > norms.LARGEST_UNIT:
        yield f"no {norms.LARGEST_UNIT} values hold whole blocks and whole norms"


def _lossless(chain: Chain) -> Encode | Decode | None:
    """Return the step that encodes or decodes exponents, the only step of its kernel; None
    without."""
    return next(
        (
            step
            for step in chain.steps
            if isinstance(step, (Encode, Decode)) and isinstance(step.codec, ExponentCodec)
        ),
        None,
    )


def _lossless_reasons(chain: Chain) -> Iterator[str]:
    step = _lossless(chain)
    assert step is not None
    assert isinstance(step.codec, ExponentCodec)
    dtype = step.dtype if isinstance(step, Decode) else chain.input_dtype
    others = [each for each in chain.steps if each is not step and each != Cast(dtype)]
    if others or (isinstance(step, Encode) and len(chain.steps) > 1):
        yield "the C++ of the exponent codec supports no other step"
    elif reason := exponents.unsupported_reason(step.codec, dtype):
        yield reason


def _dtypes(chain: Chain) -> list[torch.dtype]:
    """Return the input dtype of each step, then the dtype of the last step's result."""
    dtypes = [chain.input_dtype]
    for step in chain.steps:
        encodes = isinstance(step, Encode)
        dtypes.append(torch.uint8 if encodes else dtype_after(step, dtypes[-1]))
    return dtypes


def _unit(chain: Chain) -> int:
    """Return the values that all steps process at once: whole blocks of every codec and
    transform."""
    widths = [TILE]
    for step in chain.steps:
        if isinstance(step, (Encode, Decode)):
            widths.append(step.codec.block)
        if isinstance(step, (Enter, Leave)):
            widths.append(step.domain.width)
    return math.lcm(*widths)


def _norm_unit(chain: Chain) -> int:
    """Return the values that are kept until they are normalized: whole units and whole norms."""
    return math.lcm(_unit(chain), chain.width or 1)


@cache
def source(chain: Chain) -> str:
    """Return the C++ of a supported chain: ``kernel(threads, rows, n, in, its stride, further
    inputs and theirs, out, its stride, further results and theirs)``, with strides in bytes.

    Tables of codecs in it are computed with real tensors, even during tracing.
    """
    with making_lasting_tensors():
        return _source(chain)


def _source(chain: Chain) -> str:
    if _lossless(chain) is not None:
        return _lossless_source(chain)
    sizes = f"constexpr int UNIT = {_unit(chain)}, WHOLE = {_norm_unit(chain)};\n"
    parts = [PRELUDE, sizes, SCALES, ROTATION, CODES, FLOATS]
    parts.append(blocks.BLOCKS)
    if chain.width:
        parts.append(norms.NORMS)
    peak = ""
    lines, setup, phases, after = list[str](), list[str](), list[str](), list[str]()
    dtypes, more, made = _dtypes(chain), 0, 0
    for place, step in enumerate(chain.steps):
        dtype, name, last = dtypes[place], f"Step{place}", place == len(chain.steps) - 1
        if isinstance(step, (Encode, Decode)):
            assert isinstance(step.codec, BlockCodec)
            parts.append(blocks.text(step.codec, name))
        if isinstance(step, (Enter, Leave)):
            parts.append(transform(step.domain.transform, name))
        if place == 0:
            lines += _first(chain)
        if isinstance(step, Divide):
            lines += [f"divide<UNIT>(v, {number(step.by)});", *_round_lines(dtype)]
        elif isinstance(step, Enter):
            lines.append(f"{name}::forward<UNIT>(v, v);")
        elif isinstance(step, Leave):
            lines += [
                f"multiply<UNIT>(v, {number(1 / step.domain.width)});",
                f"{name}::inverse<UNIT>(v);",
            ]
        elif isinstance(step, Cast) and not last:
            lines += _round_lines(step.dtype)
        elif isinstance(step, Add):
            at = f"more{more} + row * more{more}_stride + first * {step.dtype.itemsize}"
            lines.append(f"take<{NAMES[step.dtype]}, UNIT>({at}, w, count);")
            stored = not last and isinstance(chain.steps[place + 1], Store)
            lines += ["add<UNIT>(v, w);", *([] if stored else _round_lines(dtype))]
            more += 1
        elif isinstance(step, Store):
            to = f"made{made} + row * made{made}_stride + first * {dtype.itemsize}"
            lines.append(_give(dtype, to))
            if dtype != torch.float32:  # the next step reads what is stored, which is rounded
                lines.append(f"take<{NAMES[dtype]}, UNIT>({to}, v, count);")
            made += 1
        elif isinstance(step, Normalize):
            phases += [_over_units(lines), norms.measure(step, made)]
            lines = [norms.normalize(step)]
            made += len(step.saved)
        elif isinstance(step, (Scale, Shift)):
            setup.append(norms.take_row(step, more))
            lines.append(norms.by_row(step, more))
            lines += [] if last else _round_lines(dtypes[place + 1])
            more += 1
        elif isinstance(step, Encode):
            assert isinstance(step.codec, BlockCodec)
            lines.append("cut<UNIT>(v, count);")
            scale = ""
            if row_numbers(step.codec.scale):
                peak = _peaks(lines)
                scale = f", {name}Scale::row_scale(peaks[row])"
            lines.append(f"encoder.encode(v, out + row * out_stride, n, first{scale});")
            setup.append(f"{name}::Encoder encoder;")
            after.append("encoder.finish();")
    if chain.encodes is None:
        size = dtypes[-1].itemsize
        lines.append(_give(dtypes[-1], f"out + row * out_stride + first * {size}"))
    phases.append(_over_units(lines))
    body = _rows(phases, setup, after, chain.width)
    inputs = "".join(f", const Byte* more{i}, int64_t more{i}_stride" for i in range(more))
    outputs = "".join(f", Byte* made{i}, int64_t made{i}_stride" for i in range(made))
    parts.append(f"""
}}  // namespace

extern "C" void kernel(int64_t threads, int64_t rows, int64_t n, const Byte* in,
                       int64_t in_stride{inputs}, Byte* out, int64_t out_stride{outputs}) {{
  const int64_t wholes = (n + WHOLE - 1) / WHOLE;
{peak}  {body}
}}
""")
    return "\n".join(parts)


def _rows(
    phases: Sequence[str], setup: Sequence[str] = (), after: Sequence[str] = (), width: int = 0
) -> str:
    """Return a loop over the values of all rows that are kept at a time, which runs some phases.
    ``setup`` comes before it, and ``after`` at its end. ``width`` is that of norms, 0 without."""
    statistics = [f"float means[WHOLE / {width}], factors[WHOLE / {width}];"] if width else []
    before = "".join(f"{line}\n    " for line in setup)
    last = "".join(f"\n    {line}" for line in after)
    body = "\n      ".join([*statistics, *phases])
    return f"""parallel(threads, rows * wholes, [&](int64_t from, int64_t until) {{
    {before}for (int64_t each = from; each < until; ++each) {{
      const int64_t row = each / wholes, begin = each % wholes * WHOLE;
      const int64_t values = std::min<int64_t>(n - begin, WHOLE);
      alignas(64) float whole[WHOLE], w[UNIT];
      {body}
    }}{last}
  }});"""


def _peaks(lines: list[str]) -> str:
    """Return a first loop that computes the values by some lines, and sets ``peaks``, the bits of
    the largest finite size of each row. A maximum is the same in any order."""
    most = [
        "const int32_t peak = finite_peak_of<UNIT>(v);",
        "int32_t before = peaks[row];",
        "while (before < peak && !peaks[row].compare_exchange_weak(before, peak)) {}",
    ]
    loop = _rows([_over_units([*lines, *most])])
    return f"  std::vector<std::atomic<int32_t>> peaks(rows);\n  {loop}\n"


def _lossless_source(chain: Chain) -> str:
    step = _lossless(chain)
    assert step is not None
    assert isinstance(step.codec, ExponentCodec)
    if isinstance(step, Encode):
        code = exponents.text(step.codec, chain.input_dtype, "encode")
    else:
        code = exponents.text(step.codec, step.dtype, "decode")
    return f"""{PRELUDE}{code}
}}  // namespace

extern "C" void kernel(int64_t threads, int64_t rows, int64_t n, const Byte* in, int64_t in_stride,
                       Byte* out, int64_t out_stride) {{
  code_rows(threads, rows, n, in, in_stride, out, out_stride);
}}
"""


def _over_units(lines: Sequence[str]) -> str:
    """Return a loop of lines over the units of the values that are kept."""
    body = "\n        ".join(lines)
    return f"""for (int64_t at = 0; at < values; at += UNIT) {{
        float* v = whole + at;
        const int64_t first = begin + at, count = std::min<int64_t>(values - at, UNIT);
        {body}
      }}"""


def _give(dtype: torch.dtype, to: str) -> str:
    return f"give<{NAMES[dtype]}, UNIT>(v, {to}, count);"


def _round_lines(dtype: torch.dtype) -> list[str]:
    return [] if dtype == torch.float32 else [f"round_to<{NAMES[dtype]}, UNIT>(v);"]


def _first(chain: Chain) -> list[str]:
    """Return the lines that fill ``v`` with the first row, or with the sum of several rows."""
    decode, ranks = chain.decodes, chain.ranks

    def fill(name: str, rank: str) -> str:
        at = f"in + (row * {ranks} + {rank}) * in_stride"
        if decode is not None:
            limit = number(torch.finfo(decode.dtype).max)
            return f"Step0::decode({at}, n, first, {limit}, {name});"
        size = chain.input_dtype.itemsize
        return f"take<{NAMES[chain.input_dtype]}, UNIT>({at} + first * {size}, {name}, count);"

    if ranks == 1:
        return [fill("v", "0")]
    rest = f"{fill('w', 'rank')} add<UNIT>(v, w);"
    return [fill("v", "0"), f"for (int rank = 1; rank < {ranks}; ++rank) {{ {rest} }}"]


def is_exact(chain: Chain) -> bool:
    """Whether the C++ has the same bits as the aten form.

    A rotation, a norm and a mean of squares are summed in another order. Values then differ in
    their last bits, and a code occasionally by one.
    """
    return not _has_rotation(chain) and not any(
        isinstance(step, Encode)
        and isinstance(step.codec, BlockCodec)
        and uses_sums(step.codec.scale)
        for step in chain.steps
    )


def _has_rotation(chain: Chain) -> bool:
    return any(
        isinstance(step, (Enter, Leave))
        or (
            isinstance(step, (Encode, Decode))
            and isinstance(step.codec, BlockCodec)
            and isinstance(step.codec.transform, Hadamard)
        )
        for step in chain.steps
    )
