"""Transforms in C++: a Walsh-Hadamard rotation as a butterfly in registers.

A rotation of width w has one stage for each of the distances w/2, w/4 ... 1. A stage maps values a
and b at that distance to a + b and a - b: whole vectors, or the lanes of one, which are added to
their exchange. ``down`` goes from the largest distance to 1, ``up`` from 1 to the largest. Each
value has the same sums in the same order on every machine.
"""

from __future__ import annotations

from commpass.codecs.block.transforms import Hadamard, NoTransform, Transform, low_bits
from commpass.codecs.dispatch import by_type
from commpass.lowering.cpu.common import number

ROTATION = """
// Stages at distances R/2 ... 1 (or 1 ... R/2) between whole vectors.
template <int R> C10_ALWAYS_INLINE void butterfly_down(Vec (&x)[R]) {
  if constexpr (R > 1) {
    Vec low[R / 2], high[R / 2];
    c10::ForcedUnroll<R / 2>{}([&](auto i) {
      low[i] = x[i] + x[i + R / 2];
      high[i] = x[i] - x[i + R / 2];
    });
    butterfly_down<R / 2>(low);
    butterfly_down<R / 2>(high);
    c10::ForcedUnroll<R / 2>{}([&](auto i) { x[i] = low[i]; x[i + R / 2] = high[i]; });
  }
}

template <int R> C10_ALWAYS_INLINE void butterfly_up(Vec (&x)[R]) {
  if constexpr (R > 1) {
    Vec low[R / 2], high[R / 2];
    c10::ForcedUnroll<R / 2>{}([&](auto i) { low[i] = x[i]; high[i] = x[i + R / 2]; });
    butterfly_up<R / 2>(low);
    butterfly_up<R / 2>(high);
    c10::ForcedUnroll<R / 2>{}([&](auto i) {
      x[i] = low[i] + high[i];
      x[i + R / 2] = low[i] - high[i];
    });
  }
}

template <int R, bool DOWN> C10_ALWAYS_INLINE void butterfly(Vec (&x)[R]) {
  if constexpr (DOWN) butterfly_down<R>(x); else butterfly_up<R>(x);
}

// As many vectors at once as there are registers for.
constexpr int MOST = W >= 16 ? 16 : 8;

// Value i ^ D at place i.
template <int D> C10_ALWAYS_INLINE Vec swapped(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (D == 8) return _mm512_shuffle_f32x4(x, x, 0x4E);
  if constexpr (D == 4) return _mm512_shuffle_f32x4(x, x, 0xB1);
  return _mm512_permute_ps(x, D == 2 ? 0x4E : 0xB1);
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (D == 4) return _mm256_permute2f128_ps(x, x, 1);
  return _mm256_permute_ps(x, D == 2 ? 0x4E : 0xB1);
#else
  alignas(64) float lanes[W], moved[W];
  x.store(lanes);
  c10::ForcedUnroll<W>{}([&](auto i) { moved[i] = lanes[i ^ D]; });
  return Vec::loadu(moved);
#endif
}

// 1 for the first value of a pair at distance D, and -1 for the second one.
template <int D> alignas(64) constexpr auto SIGNS = [] {
  std::array<float, W> made{};
  for (int i = 0; i < W; ++i) made[i] = i & D ? -1.0f : 1.0f;
  return made;
}();

// The stages at distances DISTANCE ... 1 (or 1 ... DISTANCE) within a vector. Products are exact.
template <int DISTANCE, bool DOWN> C10_ALWAYS_INLINE Vec within(Vec x) {
  if constexpr (DISTANCE == 0) return x;
  else if constexpr (DOWN) {
    const Vec sums = at::vec::fmadd(x, Vec::loadu(SIGNS<DISTANCE>.data()), swapped<DISTANCE>(x));
    return within<DISTANCE / 2, DOWN>(sums);
  } else {
    const Vec nearer = within<DISTANCE / 2, DOWN>(x);
    const Vec signs = Vec::loadu(SIGNS<DISTANCE>.data());
    return at::vec::fmadd(nearer, signs, swapped<DISTANCE>(nearer));
  }
}

// Stages of a rotation of WIDTH, for N values: those among R vectors whose distance is LOW values,
// and those within vectors if LOW is their width. The first pass down begins with a multiplication
// by factors; the last pass up ends with one, and cuts values to +-limit.
template <int N, int WIDTH, int R, int LOW, bool DOWN>
inline void pass(const float* from, float* to, const float* factors, float limit = INFINITY) {
  constexpr int SPAN = R * LOW, WITHIN = LOW > W ? 0 : std::min(WIDTH, W) / 2;
  constexpr bool OUTER = SPAN >= WIDTH;
  const Vec most(limit), least(-limit);
  for (int first = 0; first < N; first += SPAN) {
    for (int j = first; j < first + LOW; j += W) {
      Vec x[R];
      c10::ForcedUnroll<R>{}([&](auto i) {
        x[i] = Vec::loadu(from + j + i * LOW);
        if constexpr (DOWN && OUTER) x[i] = x[i] * Vec::loadu(factors + j - first + i * LOW);
        if constexpr (!DOWN) x[i] = within<WITHIN, DOWN>(x[i]);
      });
      butterfly<R, DOWN>(x);
      c10::ForcedUnroll<R>{}([&](auto i) {
        if constexpr (DOWN) x[i] = within<WITHIN, DOWN>(x[i]);
        if constexpr (!DOWN && OUTER) {
          x[i] = x[i] * Vec::loadu(factors + j - first + i * LOW);
          x[i] = at::vec::clamp(x[i], least, most);
        }
        x[i].store(to + j + i * LOW);
      });
    }
  }
}

// The rotation of N values times factors: SPAN values that belong together, then parts of them.
template <int N, int WIDTH, int SPAN = std::max(WIDTH, W)>
inline void rotate_down(const float* from, float* to, const float* factors) {
  constexpr int R = std::min(MOST, SPAN / W), LOW = SPAN / R;
  pass<N, WIDTH, R, LOW, true>(from, to, factors);
  if constexpr (LOW > W) rotate_down<N, WIDTH, LOW>(to, to, factors);
}

// Factors times the rotation of N values, cut to +-limit: from vectors at distance LOW on.
template <int N, int WIDTH, int LOW = W>
inline void rotate_up(float* v, const float* factors, float limit) {
  constexpr int R = std::min(MOST, std::max(WIDTH, W) / LOW);
  pass<N, WIDTH, R, LOW, false>(v, v, factors, limit);
  if constexpr (R * LOW < WIDTH) rotate_up<N, WIDTH, R * LOW>(v, factors, limit);
}

// The place of a value that is more than twice as large as all others of a block, else 0.
template <int BLOCK> inline int pivot_of(const float* v) {
  const float peak = peak_of<BLOCK>(v);
  Vec many(0.0f);
  for (int i = 0; i < BLOCK; i += W) {
    const Vec size = Vec::loadu(v + i).abs();
    many = many + (size + size).ge(Vec(peak));
  }
  alignas(64) float lanes[W];
  many.store(lanes);
  float found = 0.0f;
  for (int lane = 0; lane < W; ++lane) found += lanes[lane];
  if (found != 1.0f) return 0;
  int place = 0;
  while (std::abs(v[place]) != peak) ++place;
  return place;
}
"""


@by_type
def unsupported_reason(part: Transform) -> str:
    """Return why there is no C++ for a transform, or "" if there is."""
    return f"there is no C++ for {type(part).__name__}"


@unsupported_reason.register
def _any(part: NoTransform | Hadamard) -> str:
    return ""


@by_type
def transform(part: Transform, name: str) -> str:
    """Return a C++ struct for a transform.

    Its ``forward`` is that of ``codecs.block.transforms``, on N values. ``inverse`` maps values
    divided by ``SUMS`` to undivided ones, cut to +-limit, in place.
    """
    raise NotImplementedError(part)


@transform.register
def _none(part: NoTransform, name: str) -> str:
    return f"""
struct {name} {{
  static constexpr int SUMS = 1;
  static constexpr bool PIVOT = false;
}};
"""


@transform.register
def _hadamard(part: Hadamard, name: str) -> str:
    """Scale by 1/width before, and by the width after. Both are exact, and no intermediate sum is
    larger than a value."""
    width = part.width
    signs = [_sign(place, width) if part.signed else 1 for place in range(width)]
    before, after = (
        ", ".join(number(sign * by) for sign in signs) for by in (1 / width, float(width))
    )
    return f"""
struct {name} {{
  static constexpr int SUMS = {width};
  static constexpr bool PIVOT = {"true" if part.pivot else "false"};
  alignas(64) static constexpr float BEFORE[{width}] = {{{before}}};
  alignas(64) static constexpr float AFTER[{width}] = {{{after}}};
  template <int N> static inline void forward(const float* from, float* to) {{
    rotate_down<N, {width}>(from, to, BEFORE);
  }}
  template <int N> static inline void inverse(float* v, float limit = INFINITY) {{
    rotate_up<N, {width}>(v, AFTER, limit);
  }}
}};
"""


def _sign(place: int, width: int) -> int:
    """Return the sign of a place that ``Hadamard.signed`` means.

    It is the parity of the products of bits 0 and 1, 2 and 3, and so on. The low bits of a place
    and the others are paired apart.
    """
    low = low_bits(width)
    halves = place & ((1 << low) - 1), place >> low
    pairs = sum((half & (half >> 1) & 0x55555555).bit_count() for half in halves)
    return -1 if pairs & 1 else 1
