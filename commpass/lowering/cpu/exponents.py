"""The exponent codec in C++: the same wire as the aten form's, byte for byte.

Planes and codes are vectors of column words (see ``words``); only the bit strings of columns, which
have a length each, go through plain registers. A row is encoded in parts, one a thread, which have
streams of their own that are put end to end; it is decoded from its beginning, since where a string
begins follows from all that are before it: threads take whole rows.
"""

from __future__ import annotations

from typing import Any

import torch

from commpass.codecs.exponent.bits import any_of, compress, count, expand, moves, transpose
from commpass.codecs.exponent.codec import BIAS, COMMON, MANY, WILD, ExponentCodec
from commpass.codecs.exponent.floats import FORMS, FloatForm, join, pack, split, unpack
from commpass.lowering.cpu.words import Lines

WORDS = """
typedef int32_t Word __attribute__((vector_size(4 * W)));  // W columns
constexpr int LANES = 32, CHUNK = 1024;

inline bool any(Word word) {
  uint64_t parts[sizeof(Word) / 8], whole = 0;
  std::memcpy(parts, &word, sizeof(Word));
  c10::ForcedUnroll<sizeof(Word) / 8>{}([&](auto i) { whole |= parts[i]; });
  return whole != 0;
}

// Of a row of `bytes` bytes the words from byte `at` on; zeros behind its end.
inline Word row_word(const Byte* row, int64_t bytes, int64_t at) {
  if (at + int64_t(sizeof(Word)) <= bytes) return get<Word>(row + at);
  Word word{};
  if (at < bytes) std::memcpy(&word, row + at, bytes - at);
  return word;
}

inline void put_row_word(Byte* row, int64_t bytes, int64_t at, Word word) {
  if (at + int64_t(sizeof(Word)) <= bytes) put<Word>(row + at, word);
  else if (at < bytes) std::memcpy(row + at, &word, bytes - at);
}

// Where the 64-bit word of a number lies in the dynamic part: 32 lower halves, then 32 upper ones.
inline int64_t half_at(int64_t word) { return ((word >> 5) * 64 + (word & 31)) * 4; }

// Bits put end to end; the last word may be open.
struct Bits {
  std::unique_ptr<uint64_t[]> words;
  uint64_t open = 0;
  int64_t size = 0;

  inline void add(uint64_t string, int length) {
    const int shift = size & 63;
    const uint64_t whole = open | string << shift, carry = (string >> 1) >> (63 - shift);
    const int64_t next = size + length;
    words[size >> 6] = whole;
    open = (next >> 6) > (size >> 6) ? carry : whole;
    size = next;
  }

  // As many strings as lanes. Four that fit in a word are put together first: that can be done
  // while those before are still being added.
  inline void append(const uint64_t* strings, const int32_t* lengths) {
    Bits to;  // in registers
    std::swap(to, *this);
    for (int l = 0; l < LANES; l += 4) {
      const int low = lengths[l] + lengths[l + 1], high = lengths[l + 2] + lengths[l + 3];
      if (low + high > 63) {
        for (int i = l; i < l + 4; ++i) to.add(strings[i], lengths[i]);
      } else {
        const uint64_t first = strings[l] | strings[l + 1] << lengths[l];
        const uint64_t second = strings[l + 2] | strings[l + 3] << lengths[l + 2];
        to.add(first | second << low, low + high);
      }
    }
    std::swap(to, *this);
  }
};

// Streams into the dynamic part, from one of its words on.
struct Joined {
  Byte* dynamic;
  int64_t word;
  uint64_t open = 0;
  int shift = 0;

  inline void store(uint64_t whole) {
    put<uint32_t>(dynamic + half_at(word), static_cast<uint32_t>(whole));
    put<uint32_t>(dynamic + half_at(word) + 128, static_cast<uint32_t>(whole >> 32));
    ++word;
  }

  inline void append(const Bits& bits) {
    const int64_t whole = bits.size >> 6;
    for (int64_t i = 0; i < whole; ++i) {
      const uint64_t next = bits.words[i];
      store(open | next << shift);
      open = (next >> 1) >> (63 - shift);
    }
    const int rest = bits.size & 63;
    if (!rest) return;
    const uint64_t next = bits.open;
    open |= next << shift;
    if (shift + rest >= 64) {
      store(open);
      open = (next >> 1) >> (63 - shift);
    }
    shift = (shift + rest) & 63;
  }
};
"""


def why_not(codec: ExponentCodec, dtype: torch.dtype) -> str:
    """Why there is no C++ for an exponent codec; "" where there is."""
    return "" if dtype in FORMS else f"there is no C++ for exponents of {dtype}"


def text(codec: ExponentCodec, dtype: torch.dtype, role: str) -> str:
    """The C++ of ``encode`` or ``decode`` of rows of a dtype."""
    form = FORMS[dtype]
    fields = (*codec.ladder.fields[:-1], form.exponent_bits)
    static = form.rest_words + codec.ladder.steps[0].bits
    constants = f"""
constexpr int ITEM = {dtype.itemsize}, REST = {form.rest_words}, STATIC = {static};
constexpr int STEPS = {len(fields)};
constexpr int FIELD[STEPS] = {{{", ".join(map(str, fields))}}};

// Where a row's header and its dynamic part begin, and how long it is.
struct Row {{
  int64_t chunks, header, dynamic, end;
  explicit Row(int64_t n) {{
    chunks = (n + CHUNK - 1) / CHUNK;
    header = STATIC * chunks * 128;
    dynamic = header + 128 + aligned((chunks + 1) / 2 * 4);
    end = dynamic + chunks * CHUNK;
  }}
}};
"""
    main = _encode(codec, form, fields) if role == "encode" else _decode(codec, form, fields)
    return WORDS + constants + main


def _places(name: str, number: int) -> list[str]:
    return [f"{name}[{i}] + g" for i in range(number)]


def _bytes(name: str, number: int) -> list[str]:
    """Places in tables of words, as bytes."""
    return [f"(Byte*)({place})" for place in _places(name, number)]


# --- encode ---------------------------------------------------------------------------------------


def _encode(codec: ExponentCodec, form: FloatForm, fields: tuple[int, ...]) -> str:
    ladder = codec.ladder
    first = Lines()
    words = [
        first.word(f"row_word(row, bytes, ({i} * chunks + chunk) * 128 + g * 4)")
        for i in range(form.words)
    ]
    pairs: list[Any]
    pairs, rest = split(form, words)
    first.stores(_bytes("pairs", 16), pairs)
    kept = [f"out + ({i} * chunks + chunk) * 128 + g * 4" for i in range(form.rest_words)]
    first.stores(kept, rest)
    for pair in pairs:
        first.lines.append(f"total += {pair.name};")
        there = ((pair + 0x00FF00FF) >> 8) & 0x00010001
        first.lines.append(f"present += {there.name};")

    second = Lines()
    loaded = second.loads(_bytes("pairs", 16))
    start, many = second.word("Word{} + start"), second.word("Word{} + many")
    planes = transpose(pack(loaded, 8))[: form.exponent_bits]
    steps: list[Any]
    masks: list[Any]
    steps, masks = ladder.encode(planes, start, many)
    at = [
        f"out + ((REST + {i}) * chunks + chunk) * 128 + g * 4" for i in range(ladder.steps[0].bits)
    ]
    second.stores(at, steps[0])
    base = 0
    strings = []
    for number, (step, mask) in enumerate(zip(steps[1:], masks[1:], strict=True)):
        bits = len(step)
        places = [f"(Byte*)(field[{base + i}] + g)" for i in range(bits)]
        second.stores(places, step)
        second.stores([f"(Byte*)(mask[{number}] + g)"], [mask])
        lines = Lines()
        here = lines.word(f"get<Word>((Byte*)(mask[{number}] + g))")
        plan = moves(here)
        lines.stores(places, [compress(plane, plan) for plane in lines.loads(places)])
        lines.stores(["(Byte*)(fields + g)"], [count(here)])
        terms = "\n        ".join(
            f"string |= uint64_t(uint32_t(field[{base + i}][l])) << std::min({i} * c, 63);"
            for i in range(1, bits)
        )
        strings.append(f"""
  if (const int some = ones(mask[{number}]); some > RARE) {{
    for (int g = 0; g < LANES; g += W) {{
    {lines}
    }}
    #pragma omp simd reduction(max : longest)
    for (int l = 0; l < LANES; ++l) {{
      const int c = fields[l];
      uint64_t string = uint32_t(field[{base}][l]);
      {terms}
      strings[{number}][l] = string;
      lengths[{number}][l] = c * {bits};
      longest = c * {bits} > longest ? c * {bits} : longest;
    }}
    there[{number}] = true;
  }} else if (some) {{
    few_strings<{bits}>(mask[{number}], field + {base}, strings[{number}], lengths[{number}]);
    for (int l = 0; l < LANES; ++l) longest = std::max(longest, lengths[{number}][l]);
    there[{number}] = true;
  }}""")
        base += bits

    inner = ladder.steps[0]
    return f"""
// So few fields of a chunk are quicker taken one by one.
constexpr int RARE = 12;

inline int ones(const int32_t* mask) {{
  int some = 0;
  for (int l = 0; l < LANES; l += 2)
    some += __builtin_popcountll(get<uint64_t>((const Byte*)(mask + l)));
  return some;
}}

template <int BITS>
inline void few_strings(const int32_t* mask, int32_t (*planes)[LANES], uint64_t* strings,
                        int32_t* lengths) {{
  for (int l = 0; l < LANES; ++l) {{
    const int c = __builtin_popcount(mask[l]);
    uint64_t string = 0;
    uint32_t left = mask[l];
    for (int k = 0; k < c; ++k, left &= left - 1) {{
      const int at = __builtin_ctz(left);
      c10::ForcedUnroll<BITS>{{}}([&](auto i) {{
        string |= uint64_t((uint32_t(planes[i][l]) >> at) & 1) << std::min(i * c + k, 63);
      }});
    }}
    strings[l] = string;
    lengths[l] = c * BITS;
  }}
}}

struct Part {{
  Bits bits[STEPS];
  std::vector<int64_t> wild;
}};

inline void pairs_of(const Byte* row, int64_t bytes, Byte* out, int64_t chunks, int64_t chunk,
                     int32_t (&pairs)[16][LANES], int32_t& sum, int32_t& there) {{
  Word total{{}}, present{{}};
  for (int g = 0; g < LANES; g += W) {{
    {first}
  }}
  const Word sums = (total & 0xFFFF) + (total >> 16), theres = (present & 0xFFFF) + (present >> 16);
  sum = there = 0;
  for (int i = 0; i < W; ++i) {{ sum += sums[i]; there += theres[i]; }}
}}

// One chunk: static words and mark into `out`, strings into `part`.
void encode_chunk(const Byte* row, int64_t bytes, Byte* out, const Row& at, int64_t chunk,
                  Part& part) {{
  const int64_t chunks = at.chunks;
  alignas(64) int32_t pairs[16][LANES], field[{sum(fields)}][LANES], fields[LANES];
  alignas(64) int32_t mask[STEPS][LANES], lengths[STEPS][LANES];
  alignas(64) uint64_t strings[STEPS][LANES];
  int32_t sum, present;
  pairs_of(row, bytes, out, chunks, chunk, pairs, sum, present);
  present = std::max(present, 1);
  const int32_t above = sum * 256 + present * ({ladder.shift}), below = present * 256;
  int32_t start = above / below - (above % below < 0);
  start = std::clamp(start + ({ladder.outer.low - inner.low}), -{BIAS}, {255 - BIAS});
  const int32_t many = present < CHUNK - {COMMON} ? -1 : 0;
  for (int g = 0; g < LANES; g += W) {{
    {second}
  }}
  int32_t longest = 0;
  bool there[STEPS] = {{}};
  {"".join(strings)}
  const bool wild = longest > 64;
  put<uint16_t>(out + at.header + 128 + chunk * 2,
                uint16_t((start + {BIAS}) | (many & {MANY}) | (wild ? {WILD} : 0)));
  if (wild) return part.wild.push_back(chunk);
  for (int s = 0; s < STEPS; ++s)
    if (there[s]) part.bits[s].append(strings[s], lengths[s]);
}}

void encode_row(int64_t threads, const Byte* row, int64_t n, Byte* out) {{
  const Row at(n);
  const int64_t parts = std::max<int64_t>(1, std::min(threads, at.chunks / 64));
  std::vector<Part> part(parts);
  parallel(parts, parts, [&](int64_t begin, int64_t end) {{
    for (int64_t p = begin; p < end; ++p) {{
      const int64_t from = at.chunks * p / parts, until = at.chunks * (p + 1) / parts;
      for (auto& bits : part[p].bits) bits.words.reset(new uint64_t[(until - from) * LANES + 1]);
      for (int64_t chunk = from; chunk < until; ++chunk)
        encode_chunk(row, n * ITEM, out, at, chunk, part[p]);
    }}
  }});
  Byte* dynamic = out + at.dynamic;
  int64_t wild = 0;
  for (auto& each : part)
    for (int64_t chunk : each.wild) {{
      alignas(64) int32_t pairs[16][LANES];
      int32_t sum, present;
      pairs_of(row, n * ITEM, out, at.chunks, chunk, pairs, sum, present);
      Byte* to = dynamic + wild++ * CHUNK;
      for (int u = 0; u < 8; ++u)
        for (int l = 0; l < LANES; ++l)
          put<int32_t>(to + (u * LANES + l) * 4, pairs[2 * u][l] | pairs[2 * u + 1][l] << 8);
    }}
  Joined joined{{dynamic, wild * 128}};
  int64_t bits = 0;
  for (int s = 0; s < STEPS; ++s)
    for (auto& each : part) {{
      joined.append(each.bits[s]);
      bits += each.bits[s].size;
    }}
  // What is open, and zeros up to the end of its lines; and behind them to the end of the row.
  if (joined.shift) joined.store(joined.open);
  while (joined.word % 32) joined.store(0);
  std::memset(dynamic + joined.word * 8, 0, at.chunks * CHUNK - joined.word * 8);
  std::memset(out + at.header, 0, 128);
  put<int32_t>(out + at.header, int32_t(wild * 8 + (bits + 2047) / 2048 * 2));
  const int64_t marks = at.header + 128 + at.chunks * 2;
  std::memset(out + marks, 0, at.dynamic - marks);
}}
"""


# --- decode ---------------------------------------------------------------------------------------


def _decode(codec: ExponentCodec, form: FloatForm, fields: tuple[int, ...]) -> str:
    ladder = codec.ladder
    begin = Lines()
    planes = begin.loads(
        [
            f"wire + ((REST + {i}) * chunks + chunk) * 128 + g * 4"
            for i in range(ladder.steps[0].bits)
        ]
    )
    here = ~any_of(planes)
    begin.stores(["(Byte*)(here + g)", "(Byte*)(fields + g)"], [here, count(here)])

    steps, base = [], 0
    for number, bits in enumerate(fields):
        lines = Lines()
        mask = lines.word("get<Word>((Byte*)(here + g))")
        closed = lines.loads(_bytes("field", bits))
        plan = moves(mask)
        opened = [expand(plane, plan, mask) for plane in closed]
        lines.stores([f"(Byte*)(step[{base + i}] + g)" for i in range(bits)], opened)
        left = mask & ~any_of(opened)
        lines.stores(["(Byte*)(here + g)", "(Byte*)(fields + g)"], [left, count(left)])
        cuts = "\n      ".join(
            f"field[{i}][l] = int32_t(uint32_t((strings[l] >> std::min({i} * c, 63)) & mask));"
            for i in range(bits)
        )
        steps.append(f"""
  some = cursor[{number}].read(fields, {bits}, strings);
  if (some <= RARE) {{
    std::memset(step[{base}], 0, sizeof(step[0]) * {bits});
    if (some) expand_few<{bits}>(here, fields, strings, step + {base});
  }} else {{
    #pragma omp simd
    for (int l = 0; l < LANES; ++l) {{
      const int c = fields[l];
      const uint64_t mask = ~(~uint64_t(0) << c);
      {cuts}
    }}
    for (int g = 0; g < LANES; g += W) {{
    {lines}
    }}
  }}""")
        base += bits

    last = Lines()
    start, many = last.word("Word{} + start"), last.word("Word{} + many")
    known = [
        last.loads(
            [
                f"wire + ((REST + {i}) * chunks + chunk) * 128 + g * 4"
                for i in range(ladder.steps[0].bits)
            ]
        )
    ]
    base = 0
    for bits in fields:
        known.append(last.loads([f"(Byte*)(step[{base + i}] + g)" for i in range(bits)]))
        base += bits
    exponents = ladder.decode(known, start, many, form.exponent_bits)
    exponents += [last.word("Word{}")] * (8 - form.exponent_bits)
    last.stores(_bytes("packed", 8), transpose(exponents))

    final = Lines()
    packed = final.loads(_bytes("packed", 8))
    rest = final.loads(
        [f"wire + ({i} * chunks + chunk) * 128 + g * 4" for i in range(form.rest_words)]
    )
    values: list[Any] = join(form, unpack(packed, 8), rest)
    for i, word in enumerate(values):
        place = f"({i} * chunks + chunk) * 128 + g * 4"
        final.lines.append(f"put_row_word(out, bytes, {place}, {word.name});")
    cursors = ", ".join(["{stream, last, at}"] * len(fields))
    more = "".join(
        f"\n  cursor[{i}].at = cursor[{i - 1}].at + whole[{i - 1}];" for i in range(1, len(fields))
    )
    return f"""
// Reads strings one behind the other; no index leads outside, whatever the wire holds.
struct Cursor {{
  const uint64_t* stream;
  int64_t last, at;

  // Strings of so many fields of `bits` bits each. Returns how many fields there are.
  inline int read(const int32_t* fields, int bits, uint64_t* strings) {{
    int32_t some = 0;
    #pragma omp simd reduction(+ : some)
    for (int l = 0; l < LANES; ++l) some += fields[l];
    if (!some) return 0;
    for (int l = 0; l < LANES; ++l) {{
      const int64_t word = std::min(at >> 6, last);
      const int shift = at & 63;
      strings[l] = stream[word] >> shift | (stream[word + 1] << 1) << (63 - shift);
      at += fields[l] * bits;
    }}
    return some;
  }}
}};

// So few fields of a chunk are quicker set one by one.
constexpr int RARE = 12;

template <int BITS> inline void expand_few(int32_t* here, int32_t* fields, const uint64_t* strings,
                                           int32_t (*planes)[LANES]) {{
  for (int l = 0; l < LANES; ++l) {{
    uint32_t left = here[l];
    here[l] = 0;
    const int c = fields[l];
    for (int k = 0; k < c; ++k, left &= left - 1) {{
      const uint32_t bit = left & -left;
      uint32_t named = 0;
      c10::ForcedUnroll<BITS>{{}}([&](auto i) {{
        const uint32_t set = (strings[l] >> std::min(i * c + k, 63)) & 1 ? bit : 0;
        planes[i][l] |= set;
        named |= set;
      }});
      here[l] |= bit & ~named;
    }}
    fields[l] = __builtin_popcount(here[l]);
  }}
}}

inline int32_t mark_of(const Byte* wire, const Row& at, int64_t chunk) {{
  return get<uint16_t>(wire + at.header + 128 + chunk * 2);
}}

void first_fields(const Byte* wire, int64_t chunks, int64_t chunk, int32_t* here,
                  int32_t* fields) {{
  for (int g = 0; g < LANES; g += W) {{
    {begin}
  }}
}}

// The exponents of a chunk, as bytes.
void exponents_of(const Byte* wire, int64_t chunks, int64_t chunk, int32_t start, int32_t many,
                  Cursor* cursor, int32_t (&packed)[8][LANES]) {{
  alignas(64) int32_t here[LANES], fields[LANES], step[{sum(fields)}][LANES];
  alignas(64) int32_t field[{max(fields)}][LANES];
  alignas(64) uint64_t strings[LANES];
  int some;
  first_fields(wire, chunks, chunk, here, fields);
  {"".join(steps)}
  for (int g = 0; g < LANES; g += W) {{
    {last}
  }}
}}

// How many bits the strings of each step but the last have: where the next ones begin.
void whole_steps(const Byte* wire, const Row& at, Cursor cursor, int64_t* whole) {{
  int64_t first = 0, second = 0;
  for (int64_t chunk = 0; chunk < at.chunks; ++chunk) {{
    if (mark_of(wire, at, chunk) & {WILD}) continue;
    alignas(64) int32_t here[LANES], fields[LANES];
    alignas(64) uint64_t strings[LANES];
    first_fields(wire, at.chunks, chunk, here, fields);
    if (STEPS < 2) continue;
    int32_t some = 0, unnamed = 0;
    for (int l = 0; l < LANES; ++l) some += fields[l];
    first += int64_t(some) * FIELD[0];
    if (STEPS < 3 || !cursor.read(fields, FIELD[0], strings)) continue;
    #pragma omp simd reduction(+ : unnamed)
    for (int l = 0; l < LANES; ++l) {{
      uint64_t named = 0;
      for (int i = 0; i < FIELD[0]; ++i) named |= strings[l] >> std::min(i * fields[l], 63);
      named &= ~(~uint64_t(0) << fields[l]);
      unnamed += fields[l] - __builtin_popcountll(named);
    }}
    second += int64_t(unnamed) * FIELD[STEPS < 2 ? 0 : 1];
  }}
  whole[0] = first;
  whole[1] = second;
}}

void decode_row(const Byte* wire, int64_t n, Byte* out) {{
  const Row row(n);
  const int64_t chunks = row.chunks, bytes = n * ITEM, last = chunks * CHUNK / 8 - 1;
  const Byte* dynamic = wire + row.dynamic;
  int64_t wild = 0, whole[STEPS + 1] = {{}};
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    wild += mark_of(wire, row, chunk) & {WILD} ? 1 : 0;
  // 64-bit words side by side; one more, since a string is read from two of them.
  const int64_t said = int64_t(get<int32_t>(wire + row.header)) * 16;
  const int64_t used = (std::clamp<int64_t>(said, 0, last + 1) + 31) / 32 * 32;
  std::unique_ptr<uint64_t[]> words(new uint64_t[used + 2]);
  for (int64_t line = 0; line < used; line += 32)
    #pragma omp simd
    for (int i = 0; i < 32; ++i)
      words[line + i] = get<uint32_t>(dynamic + (line * 2 + i) * 4) |
          uint64_t(get<uint32_t>(dynamic + (line * 2 + 32 + i) * 4)) << 32;
  words[used] = words[used + 1] = 0;
  const uint64_t* stream = words.get();
  {{
    const int64_t last = used, at = wild * CHUNK * 8;
    Cursor cursor[STEPS] = {{{cursors}}};
    whole_steps(wire, row, cursor[0], whole);{more}
    int64_t place = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {{
      alignas(64) int32_t packed[8][LANES];
      const int32_t mark = mark_of(wire, row, chunk);
      if (mark & {WILD}) std::memcpy(packed, dynamic + place++ * CHUNK, CHUNK);
      else exponents_of(wire, chunks, chunk, (mark & 255) - {BIAS}, mark & {MANY} ? -1 : 0, cursor,
                        packed);
      for (int g = 0; g < LANES; g += W) {{
    {final}
      }}
    }}
  }}
}}
"""
