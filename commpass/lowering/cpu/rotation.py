"""Transforms in C++: a Walsh-Hadamard rotation as a butterfly in registers.

A rotation of width w has one stage for each of the distances w/2, w/4 ... 1. A stage maps values a
and b at that distance to a + b and a - b. If both lie in one vector, tiles of as many vectors as a
vector has values are transposed first. ``down`` goes from the largest distance to 1, ``up`` from 1
to the largest. Each value has the same sums in the same order on every machine.
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

// All distances from LOW to HIGH, which are those of whole vectors. With SCALED, values are
// multiplied by 2 * HIGH factors: before, or after those of the other direction. Then they are cut
// to +-limit, which may be infinite.
template <int N, int LOW, int HIGH, bool DOWN, bool SCALED>
inline void whole_vectors(float* v, const float* factors, float limit = INFINITY) {
  const Vec most(limit), least(-limit);
  constexpr int R = 2 * HIGH / LOW;
  for (int from = 0; from < N; from += 2 * HIGH) {
    for (int j = 0; j < LOW; j += W) {
      float* const at = v + from + j;
      Vec x[R];
      c10::ForcedUnroll<R>{}([&](auto i) {
        x[i] = Vec::loadu(at + i * LOW);
        if constexpr (DOWN && SCALED) x[i] = x[i] * Vec::loadu(factors + j + i * LOW);
      });
      butterfly<R, DOWN>(x);
      c10::ForcedUnroll<R>{}([&](auto i) {
        if constexpr (!DOWN && SCALED) {
          x[i] = at::vec::clamp(x[i] * Vec::loadu(factors + j + i * LOW), least, most);
        }
        x[i].store(at + i * LOW);
      });
    }
  }
}

// Distances HIGH, HIGH/2 ... W in turns.
template <int N, int HIGH, bool SCALED = true>
inline void far_down(float* v, const float* factors) {
  if constexpr (HIGH >= W) {
    constexpr int LOW = 2 * HIGH / MOST > W ? 2 * HIGH / MOST : W;
    whole_vectors<N, LOW, HIGH, true, SCALED>(v, factors);
    far_down<N, LOW / 2, false>(v, factors);
  }
}

template <int N, int LOW, int HIGH>
inline void far_up(float* v, const float* factors, float limit) {
  if constexpr (LOW <= HIGH) {
    constexpr int LAST = LOW * MOST / 2 < HIGH ? LOW * MOST / 2 : HIGH;
    whole_vectors<N, LOW, LAST, false, LAST == HIGH>(v, factors, limit);
    far_up<N, 2 * LAST, HIGH>(v, factors, limit);
  }
}

// Distances below the width of a vector, in a tile of W vectors that is turned: its rows are
// columns.
template <int WIDTH, bool DOWN> inline void near_turned(const float* turned, float* to) {
  constexpr int R = WIDTH < W ? WIDTH : W;
  c10::ForcedUnroll<W / R>{}([&](auto group) {
    Vec x[R];
    c10::ForcedUnroll<R>{}([&](auto i) { x[i] = Vec::loadu(turned + (group * R + i) * W); });
    butterfly<R, DOWN>(x);
    c10::ForcedUnroll<R>{}([&](auto i) { x[i].store(to + (group * R + i) * W); });
  });
}

// Where values may be left turned, a turn is saved.
template <int N, int WIDTH, bool DOWN, bool TURN_BACK> inline void near(float* v) {
  alignas(64) float tile[W * W];
  for (int from = 0; from < N; from += W * W) {
    float* at = v + from;
    at::vec::transpose_mxn<float, W, W>(at, W, tile, W);
    near_turned<WIDTH, DOWN>(tile, TURN_BACK ? tile : at);
    if constexpr (TURN_BACK) at::vec::transpose_mxn<float, W, W>(tile, W, at, W);
  }
}

// The same upwards for a tile that comes turned, in registers.
template <int WIDTH> C10_ALWAYS_INLINE void near_up(Vec (&x)[W], float* to) {
  constexpr int R = WIDTH < W ? WIDTH : W;
  alignas(64) float tile[W * W];
  c10::ForcedUnroll<W / R>{}([&](auto group) {
    Vec y[R];
    c10::ForcedUnroll<R>{}([&](auto i) { y[i] = x[group * R + i]; });
    butterfly<R, false>(y);
    c10::ForcedUnroll<R>{}([&](auto i) { y[i].store(tile + (group * R + i) * W); });
  });
  at::vec::transpose_mxn<float, W, W>(tile, W, to, W);
}

// Values times `factors`, of which there are WIDTH; N values are whole tiles.
template <int N, int WIDTH> inline void multiply(float* v, const float* factors) {
  for (int from = 0; from < N; from += WIDTH) {
    int i = 0;
    for (; i + W <= WIDTH; i += W)
      (Vec::loadu(v + from + i) * Vec::loadu(factors + i)).store(v + from + i);
    for (; i < WIDTH; ++i) v[from + i] *= factors[i];
  }
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

// The rotation of values times `factors`, and `factors` times a rotation. TURNED: whether tiles are
// left turned in the end, or came so and were given to `near_up`.
template <int N, int WIDTH, bool TURNED> inline void rotate_down(float* v, const float* factors) {
  if constexpr (WIDTH < 2 * W) multiply<N, WIDTH>(v, factors);
  far_down<N, WIDTH / 2>(v, factors);
  near<N, WIDTH, true, !TURNED>(v);
}

template <int N, int WIDTH, bool TURNED>
inline void rotate_up(float* v, const float* factors, float limit) {
  if constexpr (!TURNED) near<N, WIDTH, false, true>(v);
  far_up<N, W, WIDTH / 2>(v, factors, limit);
  if constexpr (WIDTH < 2 * W) {
    multiply<N, WIDTH>(v, factors);
    const Vec most(limit), least(-limit);
    for (int i = 0; i < N; i += W) at::vec::clamp(Vec::loadu(v + i), least, most).store(v + i);
  }
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

    Its ``forward`` is that of ``codecs.block.transforms``, in place on UNIT values. ``inverse``
    maps values divided by ``SUMS`` to undivided ones, cut to +-limit. With ``TURNED``, tiles of W
    vectors of W values stay transposed between the two, which saves a transpose each way.
    """
    raise NotImplementedError(part)


@transform.register
def _none(part: NoTransform, name: str) -> str:
    return f"""
struct {name} {{
  static constexpr int SUMS = 1;
  static constexpr bool PIVOT = false;
  template <bool TURNED = false> static inline void forward(float* v) {{}}
  template <bool TURNED = false> static inline void inverse(float* v, float limit = INFINITY) {{}}
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
  template <bool TURNED = false> static inline void forward(float* v) {{
    rotate_down<UNIT, {width}, TURNED>(v, BEFORE);
  }}
  template <bool TURNED = false> static inline void inverse(float* v, float limit = INFINITY) {{
    rotate_up<UNIT, {width}, TURNED>(v, AFTER, limit);
  }}
  static C10_ALWAYS_INLINE void inverse_near(Vec (&x)[W], float* to) {{ near_up<{width}>(x, to); }}
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
