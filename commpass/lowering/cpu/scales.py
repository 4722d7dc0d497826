"""Scales in C++: the numbers of a block, and their storage."""

from __future__ import annotations

import struct

from commpass.codecs.block.scales import (
    Absmax,
    Dual,
    Midrange,
    Rms,
    Scale,
    SharedExponent,
    Static,
    TwoLevel,
)
from commpass.codecs.dispatch import by_type

SCALES = """
constexpr float TINY = 0x1p-126f;
// Of two levels: see codecs.block.scales.
constexpr float LARGEST_E4M3 = 448.0f, LEAST_E4M3 = 0x1p-6f, LEAST_ROW_SCALE = 0x1p-119f;

// The largest lane of whole numbers that are not negative.
inline int32_t largest_lane(Ints x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_max_epi32(x);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i all = x;
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
  return _mm_cvtsi128_si32(most);
#else
  alignas(64) int32_t lanes[W];
  x.store(lanes);
  return *std::max_element(lanes, lanes + W);
#endif
}

// The sum of 16 lanes: of halves first, then of quarters, and so on.
inline float sum_of_lanes(const Vec (&x)[16 / W]) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 all = x[0];
  const __m256 high = _mm512_extractf32x8_ps(all, 1);
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), high);
#else
  const __m256 eight = x[0] + x[1];
#endif
  const __m128 low = _mm256_castps256_ps128(eight);
  const __m128 four = _mm_add_ps(low, _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  alignas(64) float lanes[16];
  c10::ForcedUnroll<16 / W>{}([&](auto j) { x[j].store(lanes + j * W); });
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

// max|x| of N values; NaN where one is. As whole numbers the bits of floats without a sign have the
// order of the floats, and those of NaNs are above all others.
template <int N> inline float peak_of(const float* v) {
  const Ints all(0x7FFFFFFF);
  Ints most(0), more(0);
  int i = 0;
  for (; i + 2 * W <= N; i += 2 * W) {
    most = at::vec::maximum(most, Ints::loadu(v + i) & all);
    more = at::vec::maximum(more, Ints::loadu(v + i + W) & all);
  }
  for (; i + W <= N; i += W) most = at::vec::maximum(most, Ints::loadu(v + i) & all);
  int32_t peak = largest_lane(at::vec::maximum(most, more));
  for (; i < N; ++i) peak = std::max(peak, bits_of<int32_t>(v[i]) & 0x7FFFFFFF);
  return bits_of<float>(peak);
}

// A positive number rounded up to one whose lowest LOW bits are zero; NaN stays one.
template <int LOW> inline float up_to_bits(float x, float largest) {
  const uint32_t whole = ((bits_of<uint32_t>(x) + ((1u << LOW) - 1)) >> LOW) << LOW;
  const float up = bits_of<float>(whole);
  return (up > largest ? largest : up) + (x - x);
}

struct AsFp32 {
  static constexpr int BYTES = 4;
  static inline float up(float x) { return x; }
  static inline float nearest(float x) { return x; }
  static inline void store(Byte* to, float x) { put<float>(to, x); }
  static inline float load(const Byte* from) { return get<float>(from); }
};

struct AsBf16 {
  static constexpr int BYTES = 2;
  static inline float up(float x) { return up_to_bits<16>(x, 0x1.fep127f); }
  static inline float nearest(float x) {
    const uint32_t bits = bits_of<uint32_t>(x), odd = (bits >> 16) & 1;
    const float even = bits_of<float>(((bits + 0x7FFF + odd) >> 16) << 16);
    return std::clamp(even, -0x1.fep127f, 0x1.fep127f) + (x - x);
  }
  static inline void store(Byte* to, float x) {
    put<uint16_t>(to, static_cast<uint16_t>(bits_of<uint32_t>(x) >> 16));
  }
  static inline float load(const Byte* from) {
    return bits_of<float>(static_cast<uint32_t>(get<uint16_t>(from)) << 16);
  }
};

struct AsPower {
  static constexpr int BYTES = 1;
  static inline float up(float x) { return up_to_bits<23>(x, 0x1p127f); }
  static inline void store(Byte* to, float x) {
    *to = static_cast<Byte>((bits_of<uint32_t>(x) >> 23) & 255);
  }
  static inline float load(const Byte* from) {
    return *from == 255 ? std::numeric_limits<float>::quiet_NaN()
                        : bits_of<float>(static_cast<uint32_t>(*from) << 23);
  }
};

// Normal numbers of e4m3 without a sign, as the scales of blocks in units of that of their row.
struct AsE4M3 {
  static constexpr int BYTES = 1;
  static inline float nearest(float x) {
    const uint32_t bits = bits_of<uint32_t>(x), odd = (bits >> 20) & 1;
    return bits_of<float>(((bits + 0x7FFFF + odd) >> 20) << 20) + (x - x);
  }
  static inline void store(Byte* to, float x) {
    *to = static_cast<Byte>(std::min(((bits_of<uint32_t>(x) & 0x7FFFFFFF) >> 20) - 960, 0x7Fu));
  }
  static inline float load(const Byte* from) {
    return *from == 0x7F ? std::numeric_limits<float>::quiet_NaN()
                         : bits_of<float>(static_cast<uint32_t>(*from) << 20) * 0x1p120f;
  }
};

// max|x| of N values that are finite, as the bits of a float.
template <int N> inline int32_t finite_peak_of(const float* v) {
  const Ints all(0x7FFFFFFF), infinite(0x7F800000);
  Ints most(0);
  for (int i = 0; i < N; i += W) {
    const Ints size = Ints::loadu(v + i) & all;
    most = at::vec::maximum(most, size & (size < infinite));
  }
  return largest_lane(most);
}

// The root mean square of N values, of which `peak` is the largest. They are multiplied by a power
// of two first: no square then overflows, and none that matters vanishes. The sum is of 16 sums in
// turns, whatever the width of a vector.
template <int N> inline float rms_of(const float* v, float peak) {
  static_assert(N % 16 == 0 && 16 % W == 0);
  const uint32_t power = std::clamp<uint32_t>(bits_of<uint32_t>(peak) >> 23 & 255, 1, 253);
  const Vec down(bits_of<float>((254 - power) << 23));
  Vec sums[16 / W];
  for (Vec& each : sums) each = Vec(0.0f);
  for (int i = 0; i < N; i += 16) {
    c10::ForcedUnroll<16 / W>{}([&](auto j) {
      const Vec x = Vec::loadu(v + i + j * W) * down;
      sums[j] = sums[j] + x * x;
    });
  }
  return std::sqrt(sum_of_lanes(sums) / N) * bits_of<float>(power << 23);
}

// By what the values of a block are divided: COUNT numbers, one after the other, as they travel.
template <class Stored, class Grid, int COUNT> struct Numbers {
  static constexpr int NUMBERS = COUNT, BYTES = Stored::BYTES;
  static constexpr bool TWO_LEVELS = false;
  static constexpr bool IN_RANGE = false;  // whether no value is off the grid
  using Made = std::array<float, COUNT>;
  using Factors = std::array<Vec, COUNT>;

  // Numbers as they are stored, of a block with this peak; NaN where it is not finite.
  static inline Made as_stored(Made made, float peak) {
    if (!Grid::HAS_ZERO && peak < Grid::LARGEST * TINY) made[COUNT - 1] = 0.0f;
    for (float& each : made) each = Stored::up(each + (peak - peak));  // Inf - Inf is NaN
    return made;
  }
  static inline Made reciprocals(const Made& made) {
    Made by;
    for (int i = 0; i < COUNT; ++i)
      by[i] = 1.0f / (!Grid::HAS_ZERO && made[i] == 0.0f ? TINY : made[i]);
    return by;
  }
  static inline Vec divide(Vec x, const Factors& by) {
    for (int i = 0; i < COUNT; ++i) x = x * by[i];
    return x;
  }
  static inline Vec multiply(Vec x, const Factors& by) {
    for (int i = COUNT; i-- > 0;) x = x * by[i];
    return x;
  }
};

inline float at_least_tiny(float x) { return x < TINY ? TINY : x; }

// The peak of a block lands on the largest number of its grid, or below it. The largest power of
// two is half the largest float: on a grid up to 1, peaks above 1.5 times that power are off it.
template <class Stored, class Grid> struct Absmax : Numbers<Stored, Grid, 1> {
  static constexpr bool IN_RANGE = Stored::BYTES > 1 || Grid::LARGEST >= 2.0f;
  template <int N> static inline auto measure(const float* v) {
    const float peak = peak_of<N>(v);
    return Absmax::as_stored({at_least_tiny(peak / Grid::LARGEST)}, peak);
  }
};

// The root mean square lands on the grid's sigma.
template <class Stored, class Grid> struct Rms : Numbers<Stored, Grid, 1> {
  template <int N> static inline auto measure(const float* v) {
    const float peak = peak_of<N>(v), scale = at_least_tiny(rms_of<N>(v, peak) / Grid::SIGMA);
    return Rms::as_stored({std::min(scale, std::numeric_limits<float>::max())}, peak);
  }
};

// Divided by the root mean square, then by the peak of that.
template <class Stored, class Grid> struct Dual : Numbers<Stored, Grid, 2> {
  template <int N> static inline auto measure(const float* v) {
    const float peak = peak_of<N>(v), sigma = at_least_tiny(rms_of<N>(v, peak));
    return Dual::as_stored({sigma, at_least_tiny(peak / sigma / Grid::LARGEST)}, peak);
  }
};

// The power of two below the peak, over that below the largest number of the grid.
template <class Stored, class Grid> struct SharedExponent : Numbers<Stored, Grid, 1> {
  template <int N> static inline auto measure(const float* v) {
    const float peak = peak_of<N>(v);
    const float power = bits_of<float>(bits_of<uint32_t>(peak) & 0x7F800000u);
    return SharedExponent::as_stored({at_least_tiny(power * (1.0f / Grid::POWER))}, peak);
  }
};

// A float32 for each row, and for each block a number in units of it.
template <class Stored, class Grid> struct TwoLevel : Numbers<Stored, Grid, 1> {
  static constexpr bool TWO_LEVELS = true;
  static inline float row_scale(int32_t peak) {
    return std::max(bits_of<float>(peak) / (Grid::LARGEST * LARGEST_E4M3), LEAST_ROW_SCALE);
  }
  template <int N> static inline typename TwoLevel::Made measure(const float* v, float row) {
    const float peak = peak_of<N>(v), number = peak / Grid::LARGEST / row;
    return {Stored::nearest(std::clamp(number, LEAST_E4M3, LARGEST_E4M3) + (peak - peak))};
  }
  static inline typename TwoLevel::Made reciprocals(const typename TwoLevel::Made& made,
                                                    float row) {
    return {1.0f / row / made[0]};
  }
};

// A value, the float32 of these bits, which nobody sends.
template <class Grid, uint32_t BITS> struct Static {
  static constexpr int NUMBERS = 0, BYTES = 0;
  static constexpr bool TWO_LEVELS = false, IN_RANGE = false;
  using Made = std::array<float, 0>;
  using Factors = std::array<Vec, 0>;
  template <int N> static inline Made measure(const float* v) { return {}; }
  static inline Made reciprocals(const Made& made) { return {}; }
  // What the division alone makes infinite is cut: it is a large number.
  static inline Vec divide(Vec x, const Factors& by) {
    const Vec value(bits_of<float>(BITS)), far(2 * Grid::LARGEST), units = x / value;
    return Vec::blendv(units, at::vec::clamp(units, far.neg(), far), finite(x));
  }
  static inline Vec multiply(Vec x, const Factors& by) { return x * Vec(bits_of<float>(BITS)); }
};

// Symmetric grids have none.
struct NoOffset {
  static constexpr int BYTES = 0;
  template <int N> static inline float subtract(float* v) { return 0.0f; }
  static inline void store(Byte* to, float x) {}
  static inline float load(const Byte* from) { return 0.0f; }
};

// Midway between the least and the largest value of a block, which is taken off all of them.
template <class Stored> struct Midrange {
  static constexpr int BYTES = Stored::BYTES;
  template <int N> static inline float subtract(float* v) {
    Vec least = Vec::loadu(v), most = least;
    for (int i = W; i < N; i += W) {
      least = at::vec::minimum(least, Vec::loadu(v + i));  // NaN where one is
      most = at::vec::maximum(most, Vec::loadu(v + i));
    }
    alignas(64) float low[W], high[W];
    least.store(low);
    most.store(high);
    float a = low[0], b = high[0];
    for (int lane = 1; lane < W; ++lane) {
      a = low[lane] < a || low[lane] != low[lane] ? low[lane] : a;
      b = high[lane] > b || high[lane] != high[lane] ? high[lane] : b;
    }
    const float middle = Stored::nearest(a / 2 + b / 2);
    for (int i = 0; i < N; i += W) (Vec::loadu(v + i) - Vec(middle)).store(v + i);
    return middle;
  }
  static inline void store(Byte* to, float x) { Stored::store(to, x); }
  static inline float load(const Byte* from) { return Stored::load(from); }
};
"""

STORED = {"fp32": "AsFp32", "bf16": "AsBf16", "pow2": "AsPower", "e4m3": "AsE4M3"}


def offset(part: Midrange | None) -> str:
    """Return the C++ type of the offset that is subtracted from a block before it is scaled."""
    return f"Midrange<{STORED[part.stored]}>" if part is not None else "NoOffset"


@by_type
def scale(part: Scale, grid: str) -> str:
    """Return the C++ type of a scale, for a grid of that name."""
    raise NotImplementedError(part)


@by_type
def unsupported_reason(part: Scale) -> str:
    """Return why there is no C++ for a scale, or "" if there is."""
    return f"there is no C++ for {type(part).__name__} scales"


@scale.register
def _by_numbers(part: Absmax | Rms | Dual | SharedExponent | TwoLevel, grid: str) -> str:
    return f"{type(part).__name__}<{STORED[part.stored]}, {grid}>"


@scale.register
def _static(part: Static, grid: str) -> str:
    (bits,) = struct.unpack("I", struct.pack("f", part.value))
    return f"Static<{grid}, {bits}u>"


@unsupported_reason.register
def _any(part: Absmax | Rms | Dual | SharedExponent | TwoLevel | Static) -> str:
    return ""


def uses_sums(part: Scale) -> bool:
    """Whether a scale is computed from a sum, whose order differs from the aten form."""
    return isinstance(part, (Rms, Dual))
