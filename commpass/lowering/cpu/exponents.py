"""The exponent codec in C++: the same wire as the aten form, byte for byte.

Planes and codes are vectors of column words (see ``expressions``). Only the bit strings of columns,
each with its own length, use scalar registers.
"""

from __future__ import annotations

import torch

from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.exponent.floats import FORMS, LANES, LINE
from commpass.lowering.cpu.bit_strings import WORDS
from commpass.lowering.cpu.exponent_decode import decode_text
from commpass.lowering.cpu.exponent_encode import encode_text


def unsupported_reason(codec: ExponentCodec, dtype: torch.dtype) -> str:
    """Return why there is no C++ for an exponent codec, or "" if there is."""
    return "" if dtype in FORMS else f"there is no C++ for exponents of {dtype}"


def text(codec: ExponentCodec, dtype: torch.dtype, role: str) -> str:
    """Return the C++ of ``encode`` or ``decode`` for rows of a dtype: ``code_rows``."""
    form, ladder = FORMS[dtype], codec.ladder
    fields = (*ladder.fields[:-1], form.exponent_bits)
    constants = f"""
constexpr int ITEM = {dtype.itemsize}, PARTS = {form.packed_length}, REST = {form.rest_words};
constexpr int EXPONENT = {form.exponent_bits}, FIRST = {ladder.planes};
constexpr int STATIC = REST + FIRST, RAW = EXPONENT - FIRST, CAPACITY = LANES * RAW;
constexpr int STEPS = {len(fields)};
constexpr int FIELD[STEPS] = {{{", ".join(map(str, fields))}}};

// Where things are in a row.
struct Row {{
  int64_t columns, chunks, marks, plain, dynamic, end;
  explicit Row(int64_t n) {{
    columns = n / {LINE} * {LINE // LANES};
    chunks = (columns + LANES - 1) / LANES;
    marks = STATIC * columns * 4;
    plain = marks + chunks * 4;
    dynamic = (plain + n % {LINE} * ITEM + 15) / 16 * 16;
    end = dynamic + columns * RAW * 4;
  }}
  int lanes(int64_t chunk) const {{ return std::min<int64_t>(columns - chunk * LANES, LANES); }}
}};
"""
    main = encode_text if role == "encode" else decode_text
    return WORDS + constants + main(ladder, form, fields)
