"""Grids in C++: numbers in grid units to codes, and back.

Codes are 32-bit integers until they are stored; codes of 8-bit floats are in ``floats``.
"""

from __future__ import annotations

import torch

from commpass.codecs.block import grids
from commpass.codecs.block.grids import (
    CompandedGrid,
    Fp8Grid,
    Grid,
    IntGrid,
    LevelGrid,
    MiniFloatGrid,
)
from commpass.codecs.dispatch import by_type
from commpass.lowering.cpu.common import number

CODES = """
inline Ints whole(Vec x) { return at::vec::convert_to_int_of_same_size(x); }

// The greatest whole numbers that are not larger; the least 32-bit number for NaN.
inline Ints whole_below(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  return whole(x.floor());
#endif
}

inline Vec get_codes(const Byte* from) {
  return at::vec::convert_to_fp_of_same_size<float>(from_bytes(from));
}

// Of 16 numbers those with the given codes, which are below 16.
inline Vec one_of_16(const float* numbers, const Byte* codes) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_permutexvar_ps(from_bytes(codes), _mm512_loadu_ps(numbers));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i at = from_bytes(codes);
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers), at);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8), at);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
  alignas(64) float lanes[W];
  for (int i = 0; i < W; ++i) lanes[i] = numbers[codes[i]];
  return Vec::loadu(lanes);
#endif
}

#if defined(CPU_CAPABILITY_AVX512)
// Of COUNT numbers those at the given places; higher bits of a place are ignored.
template <int COUNT> inline Vec one_of(const float* numbers, Ints at) {
  if constexpr (COUNT == 16) {
    return _mm512_permutexvar_ps(at, _mm512_loadu_ps(numbers));
  } else if constexpr (COUNT == 32) {
    return _mm512_permutex2var_ps(_mm512_loadu_ps(numbers), at, _mm512_loadu_ps(numbers + 16));
  } else {
    const Vec low = one_of<COUNT / 2>(numbers, at);
    const Vec high = one_of<COUNT / 2>(numbers + COUNT / 2, at);
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(at, Ints(COUNT / 2)), low, high);
  }
}

// Of 2 * HALF levels, which are the same below zero as above it, those with the given codes.
// `above` holds those above zero.
template <int HALF> inline Vec one_of_levels(const float* above, Ints codes) {
  const Ints flip = ((codes & Ints(HALF)) == Ints(0));
  const Ints sign = flip & Ints(-0x7FFFFFFF - 1);
  return at::vec::cast<float>(at::vec::cast<int32_t>(one_of<HALF>(above, codes ^ flip)) ^ sign);
}

#if defined(__AVX512VBMI__)
// Byte b of the bits of number i at [128 * b + i].
constexpr std::array<Byte, 512> bytes_of(const float* numbers) {
  std::array<Byte, 512> made{};
  for (int i = 0; i < 512; ++i)
    made[i] = static_cast<Byte>(__builtin_bit_cast(uint32_t, numbers[i % 128]) >> 8 * (i / 128));
  return made;
}

// Calls `take(i, numbers)` for each of four vectors of codes of 256 levels. `above` holds the bytes
// of those above zero: see one_of_levels. Bytes are looked up, 64 at once.
template <class Take>
inline void levels_of_four(const Byte* codes, const Byte* above, const Take& take) {
  const __m512i parts = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i ones = _mm512_set1_epi8(-1), signs = _mm512_set1_epi8(-128);
  const __m512i all = _mm512_permutexvar_epi32(parts, _mm512_loadu_si512(codes));
  const __mmask64 below = ~_mm512_movepi8_mask(all);
  const __m512i at = _mm512_mask_sub_epi8(all, below, ones, all);  // ~all
  __m512i byte[4];
  c10::ForcedUnroll<4>{}([&](auto b) {
    const Byte* table = above + 128 * b;
    byte[b] = _mm512_permutex2var_epi8(
        _mm512_loadu_si512(table), at, _mm512_loadu_si512(table + 64));
  });
  byte[3] = _mm512_mask_add_epi8(byte[3], below, byte[3], signs);  // the other sign
  const __m512i low[] = {_mm512_unpacklo_epi8(byte[0], byte[1]),
                         _mm512_unpackhi_epi8(byte[0], byte[1])};
  const __m512i high[] = {_mm512_unpacklo_epi8(byte[2], byte[3]),
                          _mm512_unpackhi_epi8(byte[2], byte[3])};
  c10::ForcedUnroll<2>{}([&](auto half) {
    const __m512i even = _mm512_unpacklo_epi16(low[half], high[half]);
    const __m512i odd = _mm512_unpackhi_epi16(low[half], high[half]);
    take(2 * half, Vec(_mm512_castsi512_ps(even)));
    take(2 * half + 1, Vec(_mm512_castsi512_ps(odd)));
  });
}
#endif
#endif

// Numbers, but NaN where the code, as a whole number, is 0.
inline Vec marked(Vec codes, Vec numbers) {
  const Vec nan(std::numeric_limits<float>::quiet_NaN());
  return Vec::blendv(numbers, nan, codes == Vec(0.0f));
}

// The part of codes of `WIDTH` bits from bit LOW on to bytes; part i of a byte comes from part i of
// the block.
template <int BLOCK, int WIDTH, int LOW>
VECTORIZED void pack_part(const Byte* codes, Byte* to) {
  constexpr int EACH = 8 / WIDTH, SIZE = BLOCK / EACH, MASK = (1 << WIDTH) - 1;
  #pragma omp simd
  for (int i = 0; i < SIZE; ++i) {
    unsigned whole = 0;
    for (int part = 0; part < EACH; ++part)
      whole |= ((codes[part * SIZE + i] >> LOW) & MASK) << (WIDTH * part);
    to[i] = static_cast<Byte>(whole);
  }
}

template <int BLOCK, int WIDTH, int LOW>
VECTORIZED void unpack_part(const Byte* from, Byte* codes) {
  constexpr int EACH = 8 / WIDTH, SIZE = BLOCK / EACH, MASK = (1 << WIDTH) - 1;
  for (int part = 0; part < EACH; ++part) {
    Byte* const to = codes + part * SIZE;
    #pragma omp simd
    for (int i = 0; i < SIZE; ++i) {
      const unsigned bits = ((from[i] >> (WIDTH * part)) & MASK) << LOW;
      to[i] = static_cast<Byte>(LOW ? to[i] | bits : bits);
    }
  }
}

// Codes of 4 bits: each byte holds two neighbours, the first one in the low bits.
template <int BLOCK> VECTORIZED void pack_pairs(const Byte* codes, Byte* to) {
  #pragma omp simd
  for (int i = 0; i < BLOCK / 2; ++i)
    to[i] = static_cast<Byte>(codes[2 * i] | codes[2 * i + 1] << 4);
}

template <int BLOCK> VECTORIZED void unpack_pairs(const Byte* from, Byte* codes) {
  #pragma omp simd
  for (int i = 0; i < BLOCK / 2; ++i) {
    codes[2 * i] = from[i] & 15;
    codes[2 * i + 1] = from[i] >> 4;
  }
}

// Codes of BITS bits travel in parts of 4, 2 and 1 bits, the low ones first.
template <int BLOCK, int BITS, int WIDTH = 4, int LOW = 0>
inline void pack(const Byte* codes, Byte* to) {
  if constexpr (WIDTH > 0) {
    if constexpr (BITS & WIDTH) {
      pack_part<BLOCK, WIDTH, LOW>(codes, to);
      pack<BLOCK, BITS, WIDTH / 2, LOW + WIDTH>(codes, to + BLOCK * WIDTH / 8);
    } else {
      pack<BLOCK, BITS, WIDTH / 2, LOW>(codes, to);
    }
  }
}

template <int BLOCK, int BITS, int WIDTH = 4, int LOW = 0>
inline void unpack(const Byte* from, Byte* codes) {
  if constexpr (WIDTH > 0) {
    if constexpr (BITS & WIDTH) {
      unpack_part<BLOCK, WIDTH, LOW>(from, codes);
      unpack<BLOCK, BITS, WIDTH / 2, LOW + WIDTH>(from + BLOCK * WIDTH / 8, codes);
    } else {
      unpack<BLOCK, BITS, WIDTH / 2, LOW>(from, codes);
    }
  }
}
"""


ONE_AT_A_TIME = "  static constexpr bool FOUR_AT_ONCE = false;\n"
FOUR_AT_ONCE = f"""\
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VBMI__)
  static constexpr bool FOUR_AT_ONCE = true;
  template <class Take> static inline void decode_four(const Byte* codes, const Take& take) {{
    alignas(64) static constexpr auto ABOVE = bytes_of(LEVELS + 128);
    levels_of_four(codes, ABOVE.data(), take);
  }}
#else
{ONE_AT_A_TIME}#endif
"""


@by_type
def grid(part: Grid, name: str) -> str:
    """Return a C++ struct for a grid.

    Its ``encode`` maps a vector of numbers in grid units to codes; ``decode`` reads one code for
    each value of a vector. Both equal those of ``codecs.block.grids`` bit for bit. With ``SIGNED``,
    codes are those of ``signed_code`` around the middle of the codes. Where no number is off the
    grid, or with ``CUTS``, those that are larger are cut to a code.
    """
    raise NotImplementedError(part)


@by_type
def unsupported_reason(part: Grid) -> str:
    """Return why there is no C++ for a grid, or "" if there is."""
    return f"there is no C++ for {type(part).__name__}"


@unsupported_reason.register
def _any(part: IntGrid | LevelGrid | Fp8Grid | MiniFloatGrid | CompandedGrid) -> str:
    return ""


def _struct(
    part: Grid,
    name: str,
    encode: str,
    decode: str,
    signed_code: str = "",
    cuts: bool = False,
    more: str = "",
    four: str = ONE_AT_A_TIME,
) -> str:
    signed = f"  static inline Ints signed_code(Vec x) {{ {signed_code} }}\n" if signed_code else ""
    return f"""
struct {name} {{
  static constexpr bool SIGNED = {_boolean(signed_code)}, CUTS = {_boolean(cuts)};
  static constexpr int BITS = {part.bits};
  static constexpr bool HAS_ZERO = {_boolean(part.has_zero)};
  static constexpr float LARGEST = {number(part.largest)}, SIGMA = {number(part.sigma)};
  static constexpr float POWER = {number(grids.largest_power(part))};
{more}{four}{signed}  static inline Ints encode(Vec x) {{ {encode} }}
  static inline Vec decode(const Byte* codes) {{ {decode} }}
}};
"""


def _boolean(value: object) -> str:
    return "true" if value else "false"


@grid.register
def _int(part: IntGrid, name: str) -> str:
    middle = number(2.0 ** (part.bits - 1))
    encode = f"whole(at::vec::clamp(x.round(), Vec(-LARGEST), Vec(LARGEST)) + Vec({middle}))"
    decode = f"get_codes(codes) - Vec({middle})"
    if part.marks:
        encode = f"{encode} & at::vec::cast<int32_t>(finite(x))"
        decode = f"marked(get_codes(codes), {decode})"
    numbers = "" if part.marks else "return nearest(x);"
    return _struct(part, name, f"return {encode};", f"return {decode};", numbers)


@grid.register
def _level(part: LevelGrid, name: str) -> str:
    last = number(2.0**part.bits - 1)
    return _struct(
        part,
        name,
        f"return whole(at::vec::clamp((x + Vec(LARGEST)).round(), Vec(0.0f), Vec({last})));",
        "return get_codes(codes) - Vec(LARGEST);",
    )


@grid.register
def _fp8(part: Fp8Grid, name: str) -> str:
    form, marks = part.form.upper(), _boolean(part.marks)
    return _struct(
        part,
        name,
        f"return to_fp8<{form}, {marks}>(x);",
        f"return from_fp8<{form}>(codes);",
    )


@grid.register
def _minifloat(part: MiniFloatGrid, name: str) -> str:
    form = f"{part.form.upper()}, {part.bits}"
    encode, decode = f"to_minifloat<{form}>(x)", f"from_minifloat<{form}>(codes)"
    return _struct(part, name, f"return {encode};", f"return {decode};")


@grid.register
def _companded(part: CompandedGrid, name: str) -> str:
    """Decode with a table of the levels of the aten form."""
    (gain, k), cells = grids.companding_of(part), 2 ** (part.bits - 1)
    large = part.bits > 4
    codes = torch.arange(2 * cells, dtype=torch.uint8)
    levels = grids.decode(part, codes, torch.float32).tolist()
    levels += [0.0] * (16 - len(levels))
    table = ", ".join(map(number, levels))
    lookup = f"""
#if defined(CPU_CAPABILITY_AVX512)
    return one_of_levels<{cells}>(LEVELS + {cells}, from_bytes(codes));
#else
    alignas(64) float lanes[W];
    c10::ForcedUnroll<W>{{}}([&](auto i) {{ lanes[i] = LEVELS[codes[i]]; }});
    return Vec::loadu(lanes);
#endif
  """
    more = f"""\
  alignas(64) static constexpr float LEVELS[{len(levels)}] = {{{table}}};
  static inline Vec companded(Vec x) {{
    const Vec y = x * Vec({number(gain)});
    return y * (Vec(1.0f) + y * y * Vec({number(k)})).rsqrt();
  }}
"""
    least, most = number(-cells), number(cells - 1)
    return _struct(
        part,
        name,
        f"""
    const Vec below = at::vec::clamp(companded(x).floor(), Vec({least}), Vec({most}));
    return whole(below + Vec({number(cells)}));
  """,
        lookup if large else "return one_of_16(LEVELS, codes);",
        "return whole_below(companded(x));",
        cuts=True,
        more=more,
        four=FOUR_AT_ONCE if part.bits == 8 else ONE_AT_A_TIME,
    )
