"""The C++ of a decode of codec exponent: ``decode_text`` defines ``code_rows``.

The start of a chunk's strings follows from the marks of the chunks before it.
"""

from __future__ import annotations

from typing import Any

from commpass.codecs.exponent.bits import any_of, count, expand, moves, transpose
from commpass.codecs.exponent.codec import BIAS, MODE_BITS, START_BITS
from commpass.codecs.exponent.floats import LINE, FloatForm, join
from commpass.codecs.exponent.floats import unpack as unpack_pairs
from commpass.codecs.exponent.ladder import Ladder
from commpass.codecs.exponent.words import LENGTH_AT
from commpass.lowering.cpu.expressions import Lines, addresses, modes


def decode_text(ladder: Ladder, form: FloatForm, fields: tuple[int, ...]) -> str:
    begin = Lines()
    planes = begin.loads([f"wire + (REST + {i}) * line + g * 4" for i in range(ladder.planes)])
    here = ~any_of(planes)
    begin.stores(["(Byte*)(here + g)", "(Byte*)(fields + g)"], [here, count(here)])

    steps = []
    for number, bits in enumerate(fields):
        lines, base = Lines(), sum(fields[:number])
        mask = lines.expression("get<Word>((Byte*)(here + g))")
        closed = lines.loads(addresses("field", bits))
        plan = moves(mask)
        opened = [expand(plane, plan, mask) for plane in closed]
        lines.stores(addresses("step", bits, base), opened)
        left = mask & ~any_of(opened)
        lines.stores(["(Byte*)(here + g)", "(Byte*)(fields + g)"], [left, count(left)])
        cuts = "\n        ".join(
            f"field[{i}][l] = int32_t(uint32_t((strings[l] >> std::min({i} * c, 63)) & mask));"
            for i in range(bits)
        )
        after = Lines()
        taken = any_of(after.loads(addresses("step", bits, base)))
        left = after.expression("get<Word>((Byte*)(here + g))") & ~taken
        after.stores(["(Byte*)(here + g)", "(Byte*)(fields + g)"], [left, count(left)])
        steps.append(f"""
  many(fields, some, most);
  #if PACKS_BITS
  if (cursor.open<{bits}>(here, fields, some, most, step + {base}))
    for (int g = 0; g < LANES; g += W) {{
    {after}
    }}
  #else
  const bool short{number} = most * {bits} <= 64;
  if (some && short{number}) cursor.read(fields, {bits}, strings);
  if (some <= RARE && short{number}) {{
    std::memset(step[{base}], 0, sizeof(Lane) * {bits});
    if (some) expand_few<{bits}>(here, fields, strings, step + {base});
  }} else {{
    if (short{number}) {{
      for (int l = 0; l < LANES; ++l) {{
        const int c = fields[l];
        const uint64_t mask = ~(~uint64_t(0) << c);
        {cuts}
      }}
    }} else {{
      for (int l = 0; l < LANES; ++l)
        for (int i = 0; i < {bits}; ++i) field[i][l] = int32_t(cursor.next(fields[l]));
    }}
    for (int g = 0; g < LANES; g += W) {{
    {lines}
    }}
  }}
  #endif""")

    last = Lines()
    known = [last.loads([f"wire + (REST + {i}) * line + g * 4" for i in range(ladder.planes)])]
    for number, bits in enumerate(fields):
        known.append(last.loads(addresses("step", bits, sum(fields[:number]))))
    exponents = ladder.decode(
        known, last.expression("Word{} + start"), modes(last, ladder.modes), form.exponent_bits
    )
    last.stores(addresses("plane", form.exponent_bits), exponents)

    final = Lines()
    exponents = final.loads(addresses("plane", form.exponent_bits))
    exponents += [final.expression("Word{}")] * (8 - form.exponent_bits)
    rest = final.loads([f"wire + {i} * line + g * 4" for i in range(form.rest_words)])
    values: list[Any] = join(form, unpack_pairs(transpose(exponents), 8), rest)
    final.stores([f"out + {i} * 128 + g * 4" for i in range(form.packed_length)], values)
    return f"""
// Planes of exponents from those of the first step, and from the strings of a chunk. The memory
// with the strings ends at `end`.
void exponents_of(const Byte* wire, int64_t line, int lanes, int32_t start, int32_t mode,
                  const Byte* from, int length, const Byte* end, Lane* plane) {{
  alignas(64) uint64_t last_words[CAPACITY / 2 + 2];
  [[maybe_unused]] alignas(64) uint64_t strings[LANES];
  const int full = (length + 3) / 4;
  if (end - from < (full + 2) * 8) {{
    last_words[length / 4] = 0;
    std::memcpy(last_words, from, length * 2);
    last_words[full] = last_words[full + 1] = 0;
    from = (const Byte*)last_words;
  }}
  Cursor cursor{{from, full}};
  alignas(64) Lane here, fields, step[{sum(fields)}];
  [[maybe_unused]] alignas(64) Lane field[{max(fields)}];
  int some, most;
  for (int g = 0; g < LANES; g += W) {{
    {begin}
  }}
  for (int l = lanes; l < LANES; ++l) here[l] = fields[l] = 0;
  {"".join(steps)}
  for (int g = 0; g < LANES; g += W) {{
    {last}
  }}
}}

// The inverse of encode_chunk.
void decode_chunk(const Byte* wire, int64_t line, int lanes, uint32_t mark, const Byte* from,
                  int length, const Byte* end, Byte* out) {{
  alignas(64) Lane plane[EXPONENT];
  if (length == lanes * RAW * 2) {{
    for (int i = 0; i < FIRST; ++i) std::memcpy(plane[i], wire + (REST + i) * line, lanes * 4);
    for (int l = 0; l < lanes; ++l)
      for (int i = 0; i < RAW; ++i) plane[FIRST + i][l] = get<int32_t>(from + (l * RAW + i) * 4);
    for (int i = 0; i < EXPONENT; ++i)
      for (int l = lanes; l < LANES; ++l) plane[i][l] = 0;
  }} else {{
    const int32_t start = int32_t(mark & {(1 << START_BITS) - 1}) - {BIAS};
    const int32_t mode = (mark >> {START_BITS}) & {(1 << MODE_BITS) - 1};
    exponents_of(wire, line, lanes, start, mode, from, length, end, plane);
  }}
  for (int g = 0; g < LANES; g += W) {{
    {final}
  }}
}}

void decode_chunks(const Byte* wire, int64_t n, Byte* out, int64_t begin, int64_t end) {{
  const Row at(n);
  const auto mark_of = [&](int64_t chunk) {{ return get<uint32_t>(wire + at.marks + chunk * 4); }};
  const auto length_of = [&](int64_t chunk) {{
    return std::min<int>(mark_of(chunk) >> {LENGTH_AT}, at.lanes(chunk) * RAW * 2);
  }};
  const Byte* from = wire + at.dynamic;
  for (int64_t chunk = 0; chunk < begin; ++chunk) from += length_of(chunk) * 2;
  for (int64_t chunk = begin; chunk < end; ++chunk) {{
    const int length = length_of(chunk), lanes = at.lanes(chunk);
    const Byte* here = wire + chunk * 128;
    Byte* to = out + chunk * PARTS * 128;
    // Whether the processor foresees these writes depends on where the code is in memory.
    for (int i = 0; i < PARTS * 128; i += 64) __builtin_prefetch(to + 2 * PARTS * 128 + i, 1);
    if (lanes == LANES) {{
      decode_chunk(here, at.columns * 4, lanes, mark_of(chunk), from, length, wire + at.end, to);
    }} else {{
      alignas(64) Lane given[STATIC] = {{}}, made[PARTS];
      for (int i = 0; i < STATIC; ++i)
        std::memcpy(given[i], here + i * at.columns * 4, lanes * 4);
      decode_chunk((const Byte*)given, 128, lanes, mark_of(chunk), from, length, wire + at.end,
                   (Byte*)made);
      for (int i = 0; i < PARTS; ++i) std::memcpy(to + i * lanes * 4, made[i], lanes * 4);
    }}
    from += length * 2;
  }}
  if (end == at.chunks)
    std::memcpy(out + n / {LINE} * {LINE} * ITEM, wire + at.plain, n % {LINE} * ITEM);
}}

void code_rows(int64_t threads, int64_t rows, int64_t n, const Byte* in, int64_t in_stride,
               Byte* out, int64_t out_stride) {{
  // Rows are shared out only where there are fewer of them than threads.
  const int64_t chunks = Row(n).chunks, wanted = std::max<int64_t>(1, threads / rows);
  const int64_t each = (chunks + wanted - 1) / wanted;
  const int64_t parts = each ? (chunks + each - 1) / each : 1;
  parallel(threads, rows * parts, [&](int64_t begin, int64_t end) {{
    for (int64_t part = begin; part < end; ++part) {{
      const int64_t row = part / parts, first = part % parts * each;
      decode_chunks(in + row * in_stride, n, out + row * out_stride, first,
                    std::min(first + each, chunks));
    }}
  }});
}}
"""
