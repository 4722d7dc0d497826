"""Scales in C++: the one number of a block, and how it travels."""

from __future__ import annotations

from commpass.codecs.block.scales import Absmax, Midrange, Scale
from commpass.codecs.dispatch import by_type

SCALES = """
constexpr float TINY = 0x1p-126f;

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
  alignas(64) int32_t lanes[W];
  at::vec::maximum(most, more).store(lanes);
  int32_t peak = 0;
  #pragma omp simd reduction(max : peak)
  for (int lane = 0; lane < W; ++lane) peak = lanes[lane] > peak ? lanes[lane] : peak;
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

// The peak of a block lands on the largest number of its grid.
template <class Stored, class Grid> struct Absmax {
  static constexpr int BYTES = Stored::BYTES;
  template <int N> static inline float measure(const float* v) {
    const float peak = peak_of<N>(v), scale = peak / Grid::LARGEST;
    float made = scale < TINY ? TINY : scale;
    if (!Grid::HAS_ZERO && peak < Grid::LARGEST * TINY) made = 0.0f;
    return Stored::up(made + (peak - peak));  // Inf - Inf is NaN
  }
  static inline float reciprocal(float scale) {
    return 1.0f / (!Grid::HAS_ZERO && scale == 0.0f ? TINY : scale);
  }
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

STORED = {"fp32": "AsFp32", "bf16": "AsBf16", "pow2": "AsPower"}


def offset(part: Midrange | None) -> str:
    """The C++ type of what is taken off a block before it is scaled."""
    return f"Midrange<{STORED[part.stored]}>" if part is not None else "NoOffset"


@by_type
def scale(part: Scale, grid: str) -> str:
    """The C++ type of a scale, for a grid of that name."""
    raise NotImplementedError(part)


@by_type
def why_not(part: Scale) -> str:
    """Why there is no C++ for a scale; "" where there is."""
    return f"there is no C++ for {type(part).__name__} scales"


@scale.register
def _absmax(part: Absmax, grid: str) -> str:
    return f"Absmax<{STORED[part.stored]}, {grid}>"


@why_not.register
def _any(part: Absmax) -> str:
    return ""
