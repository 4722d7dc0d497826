"""The C++ of an encode of codec exponent: ``encode_text`` defines ``code_rows``.

Chunks are independent, except that each tries the window of the chunk before first. Each thread
encodes a run of chunks into their maximum room, and the results are then moved together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from commpass.codecs.exponent.bits import (
    any_of,
    compress,
    count,
    equals,
    moves,
    spread,
    subtract,
    transpose,
)
from commpass.codecs.exponent.codec import BIAS, START_BITS
from commpass.codecs.exponent.floats import LINE, FloatForm, pack, split
from commpass.codecs.exponent.ladder import BINS, Ladder
from commpass.codecs.exponent.words import LENGTH_AT
from commpass.lowering.cpu.expressions import Lines, addresses, modes


def encode_text(ladder: Ladder, form: FloatForm, fields: tuple[int, ...]) -> str:
    first = Lines()
    words = [
        first.expression(f"get<Word>(words + {i} * 128 + g * 4)") for i in range(form.packed_length)
    ]
    pairs: list[Any]
    pairs, rest = split(form, words)
    first.stores([f"out + {i} * line + g * 4" for i in range(form.rest_words)], rest)
    planes = transpose(pack(pairs, 8))[: form.exponent_bits]
    first.stores(addresses("plane", form.exponent_bits), planes)
    first.stores(["(Byte*)(present + g)"], [any_of(planes)])

    counting = Lines()
    planes = counting.loads(addresses("plane", form.exponent_bits))
    base, there = (
        counting.expression("Word{} + base"),
        counting.expression("get<Word>((Byte*)(present + g))"),
    )
    offset = subtract(planes, spread(base, 9))
    near = there & ~any_of(offset[4:])
    terms = [term & near for term in equals(offset[:4], range(BINS))]
    terms.append(there & offset[-1])
    counting.lines += [f"counts.add<{i}>({term.name}, g);" for i, term in enumerate(terms)]

    second = Lines()
    planes = second.loads(addresses("plane", form.exponent_bits))
    steps: list[Any]
    masks: list[Any]
    steps, masks = ladder.encode(
        planes, second.expression("Word{} + start"), modes(second, ladder.modes)
    )
    second.stores([f"out + (REST + {i}) * line + g * 4" for i in range(ladder.planes)], steps[0])
    base_of = [sum(fields[:number]) for number in range(len(fields))]
    strings = []
    for number, (step, mask) in enumerate(zip(steps[1:], masks[1:], strict=True)):
        bits, at = len(step), base_of[number]
        places = addresses("field", bits, at)
        second.stores(places, step)
        second.stores(
            [f"(Byte*)(mask[{number}] + g)", f"(Byte*)(fields[{number}] + g)"], [mask, count(mask)]
        )
        lines = Lines()
        plan = moves(lines.expression(f"get<Word>((Byte*)(mask[{number}] + g))"))
        lines.stores(places, [compress(plane, plan) for plane in lines.loads(places)])
        joins = "\n        ".join(
            f"string |= uint64_t(uint32_t(field[{at + i}][l])) << std::min({i} * c, 63);"
            for i in range(1, bits)
        )
        strings.append(f"""
  #if PACKS_BITS
  add_strings<{bits}>(bits, mask[{number}], field + {at}, fields[{number}], some[{number}],
                      most[{number}]);
  #else
  if (!some[{number}]) {{
  }} else if (some[{number}] <= RARE && most[{number}] * {bits} <= 64) {{
    few_strings<{bits}>(mask[{number}], field + {at}, fields[{number}], strings);
    bits.append(strings, fields[{number}], {bits}, most[{number}]);
  }} else {{
    for (int g = 0; g < LANES; g += W) {{
    {lines}
    }}
    if (most[{number}] * {bits} <= 64) {{
      for (int l = 0; l < LANES; ++l) {{
        const int c = fields[{number}][l];
        uint64_t string = uint32_t(field[{at}][l]);
        {joins}
        strings[l] = string;
      }}
      bits.append(strings, fields[{number}], {bits}, most[{number}]);
    }} else {{
      for (int l = 0; l < LANES; ++l)
        for (int i = {at}; i < {at + bits}; ++i)
          bits.add(uint32_t(field[i][l]), fields[{number}][l]);
    }}
  }}
  #endif""")

    choice = Lines()
    bins = [choice.expression(f"ones[{place}]", "int32_t") for place in range(BINS)]
    zeros = choice.expression("values - number", "int32_t")
    gains = ladder.gains(bins, zeros, form.exponent_bits)
    choice.lines.append(f"int32_t best = {gains[0].name};")
    for place, gain in enumerate(gains[1:], start=1):
        choice.lines.append(f"if ({gain.name} > best) best = {gain.name}, place = {place};")
    lanes = _gains_of_lanes(ladder, form.exponent_bits)
    return f"""
// The lower median of the exponents that are there. (Two bits at a time are not faster.)
inline int median_of(const Lane* plane, Columns left, int number) {{
  int rank = std::max(number - 1, 0) >> 1, median = 0;
  for (int bit = EXPONENT - 1; bit >= 0; --bit) {{
    const Columns here(plane[bit]);
    const int lower = left.where(here, false).ones();
    const bool upper = rank >= lower;
    left = left.where(here, upper);
    if (upper) rank -= lower;
    median |= int(upper) << bit;
  }}
  return median;
}}

// Counts the exponents that are there: those from `base` on, each, and last those below it.
inline Counts<{BINS + 1}> count_bins(const Lane* plane, const Lane& present, int32_t base) {{
  Counts<{BINS + 1}> counts;
  for (int g = 0; g < LANES; g += W) {{
    {counting}
  }}
  counts.close();
  return counts;
}}

// `base` is that of the chunk before, which mostly is the right one: then the counts show it.
inline void choose(const Lane* plane, const Lane& present, int values, int32_t& base, int& start,
                   int& mode) {{
  const int number = Columns(present).ones();
  auto ones = count_bins(plane, present, base);
  int left = (std::max(number - 1, 0) >> 1) - ones[{BINS}], place_of_median = 0;
  if (left >= 0)
    while (place_of_median < {BINS} && left >= ones[place_of_median])
      left -= ones[place_of_median++];
  if (left < 0 || place_of_median != {ladder.below}) {{
    const bool known = left >= 0 && place_of_median < {BINS};
    const int median = known ? base + place_of_median
                             : median_of(plane, Columns(present), number);
    base = median - {ladder.below};
    ones = count_bins(plane, present, base);
  }}
  int32_t place = 0;
  #if {int(bool(lanes))} && COUNTS_IN_VECTORS
  {lanes}
  #else
  {choice}
  #endif
  mode = place / {ladder.starts};
  start = base + place % {ladder.starts};
}}

// The exponents of a chunk, and the window that was chosen for them.
struct Chosen {{
  alignas(64) Lane plane[EXPONENT];
  int start, mode;
}};

// Begins a chunk of `lanes` columns. Its words are 128 bytes from part to part. Those of the static
// part go to `out`, `line` bytes from plane to plane. `base` is that of `choose`.
inline void begin_chunk(const Byte* words, int lanes, Byte* out, int64_t line, int32_t& base,
                        Chosen& made) {{
  alignas(64) Lane present;
  auto& plane = made.plane;
  for (int g = 0; g < LANES; g += W) {{
    {first}
  }}
  choose(plane, present, lanes * LANES, base, made.start, made.mode);
}}

// Ends a chunk that was begun: its strings go to `to`. Returns its mark.
inline uint32_t end_chunk(const Chosen& chosen, int lanes, Byte* out, int64_t line, Byte* to) {{
  alignas(64) Lane field[{sum(fields)}], mask[STEPS], fields[STEPS];
  const auto& plane = chosen.plane;
  const int start = chosen.start, mode = chosen.mode;
  for (int g = 0; g < LANES; g += W) {{
    {second}
  }}
  for (int l = lanes; l < LANES; ++l) {{
    for (int s = 0; s < STEPS; ++s) mask[s][l] = fields[s][l] = 0;
    for (auto& each : field) each[l] = 0;
  }}
  int some[STEPS], most[STEPS], size = 0;
  many<STEPS>(mask, fields, some, most);
  for (int s = 0; s < STEPS; ++s) size += some[s] * FIELD[s];
  const int length = std::min((size + 15) / 16, lanes * RAW * 2);
  const uint32_t mark = uint32_t(start + {BIAS}) | mode << {START_BITS} | length << {LENGTH_AT};
  if (length == lanes * RAW * 2) {{
    for (int i = 0; i < FIRST; ++i) std::memcpy(out + (REST + i) * line, plane[i], lanes * 4);
    for (int l = 0; l < lanes; ++l)
      for (int i = 0; i < RAW; ++i) put<int32_t>(to + (l * RAW + i) * 4, plane[FIRST + i][l]);
    return mark;
  }}
  alignas(64) uint64_t put_here[CAPACITY / 2 + 2];
  [[maybe_unused]] alignas(64) uint64_t strings[LANES];
  Bits bits{{put_here}};
  {"".join(strings)}
  bits.close();
  std::memcpy(to, put_here, length * 2);
  return mark;
}}

// Chunks `from` to `until` of a row. Returns the bytes of their strings, which go to `to`.
int64_t encode_chunks(const Byte* row, const Row& at, Byte* out, int64_t from, int64_t until,
                      Byte* to) {{
  const Byte* first = to;
  const int64_t line = at.columns * 4;
  alignas(64) Lane last[STATIC];  // of a chunk of fewer columns
  Chosen chosen[2];
  int32_t base = 0;
  const auto begin = [&](int64_t chunk) {{
    const Byte* words = row + chunk * PARTS * 128;
    const Byte* later = words + 2 * PARTS * 128;  // the processor does not foresee these reads
    for (int i = 0; i < PARTS * 128; i += 64) __builtin_prefetch(later + i);
    const int lanes = at.lanes(chunk);
    if (lanes == LANES)
      return begin_chunk(words, lanes, out + chunk * 128, line, base, chosen[chunk % 2]);
    alignas(64) Lane given[PARTS] = {{}};
    for (int i = 0; i < PARTS; ++i) std::memcpy(given[i], words + i * lanes * 4, lanes * 4);
    begin_chunk((const Byte*)given, lanes, (Byte*)last, 128, base, chosen[chunk % 2]);
  }};
  if (from < until) begin(from);
  for (int64_t chunk = from; chunk < until; ++chunk) {{
    // The processor can compute the next one's window while it joins the strings of this one.
    if (chunk + 1 < until) begin(chunk + 1);
    Byte* here = out + chunk * 128;
    const int lanes = at.lanes(chunk);
    const bool full = lanes == LANES;
    const uint32_t mark = end_chunk(chosen[chunk % 2], lanes, full ? here : (Byte*)last,
                                    full ? line : 128, to);
    for (int i = 0; !full && i < STATIC; ++i) std::memcpy(here + i * line, last[i], lanes * 4);
    put<uint32_t>(out + at.marks + chunk * 4, mark);
    to += (mark >> {LENGTH_AT}) * 2;
  }}
  return to - first;
}}

void encode_row(int64_t threads, const Byte* row, int64_t n, Byte* out) {{
  const Row at(n);
  const int64_t parts = std::max<int64_t>(1, std::min(threads, at.chunks / 64));
  std::vector<int64_t> made(parts);
  parallel(parts, parts, [&](int64_t begin, int64_t end) {{
    for (int64_t p = begin; p < end; ++p) {{
      const int64_t from = at.chunks * p / parts, until = at.chunks * (p + 1) / parts;
      Byte* to = out + at.dynamic + from * CAPACITY * 4;
      made[p] = encode_chunks(row, at, out, from, until, to);
    }}
  }});
  Byte* to = out + at.dynamic + made[0];
  for (int64_t p = 1; p < parts; ++p) {{
    std::memmove(to, out + at.dynamic + at.chunks * p / parts * CAPACITY * 4, made[p]);
    to += made[p];
  }}
  std::memset(to, 0, (out + at.dynamic - to) & 15);  // of the last unit that is sent
  std::memset(out + at.plain, 0, at.dynamic - at.plain);
  std::memcpy(out + at.plain, row + n / {LINE} * {LINE} * ITEM, n % {LINE} * ITEM);
}}

void code_rows(int64_t threads, int64_t rows, int64_t n, const Byte* in, int64_t in_stride,
               Byte* out, int64_t out_stride) {{
  for (int64_t row = 0; row < rows; ++row)
    encode_row(threads, in + row * in_stride, n, out + row * out_stride);
}}
"""


def _gains_of_lanes(ladder: Ladder, escape: int) -> str:
    """Return the C++ of ``Ladder.gains`` with a lane of 16 bits for each place, which finds the
    first of the largest; "" if there are more places than lanes."""
    lanes = 16
    places = range((ladder.modes + 1) * ladder.starts)
    if len(places) > lanes:
        return ""

    def constant(numbers: Iterable[int], rest: int = 0) -> str:
        own = list(numbers)
        own += [rest] * (lanes - len(own))
        return f"_mm256_setr_epi16({', '.join(map(str, own))})"

    def upto(ends: Sequence[int]) -> str:
        some = sum(1 << lane for lane, end in enumerate(ends) if end)
        which = constant(max(end - 1, 0) for end in ends)
        return f"_mm256_maskz_permutexvar_epi16({some}, {which}, upto)"

    modes, starts = [p // ladder.starts for p in places], [p % ladder.starts for p in places]
    fields = (*ladder.fields[:-1], escape)
    unnamed = escape * ladder.names_zero
    named = [sum(fields[mode - 1 :]) if mode else unnamed for mode in modes]
    lost = [names - unnamed if mode else 0 for names, mode in zip(named, modes, strict=True)]
    codes = [
        start + ladder.offsets[mode - 1][-1] if mode else 0
        for start, mode in zip(starts, modes, strict=True)
    ]
    low = ladder.steps[-1].low
    steps = "\n".join(
        f"""  gains = _mm256_add_epi16(gains, _mm256_mullo_epi16(_mm256_set1_epi16({bits}),
      _mm256_sub_epi16({upto([start + step.high - low for start in starts])},
                       {upto([start + step.low - low for start in starts])})));"""
        for step, bits in zip(ladder.steps, fields, strict=True)
    )
    return f"""constexpr uint64_t EACH = 0x0001000100010001;  // times it: the sum up to each part
  uint64_t sums[{lanes // 4}], sum = 0;
  for (int i = 0; i < {lanes // 4}; ++i) {{
    sums[i] = (ones.words[i] + sum) * EACH;
    sum = sums[i] >> 48;
  }}
  const uint64_t* words = ones.words;
  const __m256i bins = _mm256_set_epi64x(words[3], words[2], words[1], words[0]);
  const __m256i upto = _mm256_set_epi64x(sums[3], sums[2], sums[1], sums[0]);
  __m256i gains = _mm256_mullo_epi16({constant(named)}, _mm256_set1_epi16(values - number));
  gains = _mm256_sub_epi16(gains, _mm256_mullo_epi16({constant(lost)},
      _mm256_permutexvar_epi16({constant(codes)}, bins)));
{steps}
  // The smallest of what is left of the largest number, and its first lane.
  const __m256i left_over = _mm256_or_si256(
      _mm256_sub_epi16(_mm256_set1_epi16(0x7fff), gains), {constant([0] * len(places), -1)});
  const uint32_t low = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm256_castsi256_si128(left_over)));
  const uint32_t high = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm256_extracti128_si256(left_over, 1)));
  place = (low & 0xffff) <= (high & 0xffff) ? low >> 16 : {lanes // 2} + (high >> 16);"""
