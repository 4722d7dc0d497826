"""Norms in C++: statistics of ``WIDTH`` values, and the rows that scale and shift them."""

from __future__ import annotations

from commpass.lowering.chain import Normalize, Scale, Shift
from commpass.lowering.cpu.common import NAMES, number

LARGEST_UNIT = 32768
"""The most values that whole blocks and whole norms may need. As float32 they fit a level-2
cache."""

NORMS = """
constexpr int LANES = 64;

// The sum of f(x) over N values. It is of 64 sums in turns, whatever the width of a vector.
template <int N, class Function> inline float sum_of(const float* v, const Function& f) {
  static_assert(LANES % W == 0);
  Vec sums[LANES / W];
  for (Vec& each : sums) each = Vec(0.0f);
  alignas(64) float lanes[LANES], rest[LANES];
  int i = 0;
  for (; i + LANES <= N; i += LANES)
    c10::ForcedUnroll<LANES / W>{}([&](auto j) {
      sums[j] = sums[j] + f(Vec::loadu(v + i + j * W));
    });
  c10::ForcedUnroll<LANES / W>{}([&](auto j) { sums[j].store(lanes + j * W); });
  if constexpr (N % LANES != 0) {
    for (int j = 0; j < LANES; ++j) rest[j] = j < N % LANES ? v[i + j] : 0.0f;
    for (int j = 0; j < LANES; j += W) f(Vec::loadu(rest + j)).store(rest + j);
    for (int j = 0; j < N % LANES; ++j) lanes[j] += rest[j];
  }
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

// The means and factors of each WIDTH of `count` values, also to where they are saved, if they are.
template <int WIDTH, bool CENTERED>
inline void measure(const float* v, int64_t count, float eps, float* means, float* factors,
                    float* saved_means, float* saved_factors) {
  for (int64_t i = 0; i < count / WIDTH; ++i, v += WIDTH) {
    const float mean = CENTERED ? sum_of<WIDTH>(v, [](Vec x) { return x; }) / WIDTH : 0.0f;
    const float squares = sum_of<WIDTH>(v, [&](Vec x) {
      if constexpr (CENTERED) x = x - Vec(mean);
      return x * x;
    });
    means[i] = mean;
    factors[i] = 1.0f / std::sqrt(squares / WIDTH + eps);
    if (saved_means) saved_means[i] = means[i];
    if (saved_factors) saved_factors[i] = factors[i];
  }
}

// f(v, where, values, norm) for the parts of `count` values that belong to one norm. The first is
// value number `at` of a whole number of norms, and `where` its number in the norm.
template <int WIDTH, class Function>
inline void by_norm(float* v, int64_t at, int64_t count, const Function& f) {
  for (int64_t i = 0; i < count;) {
    const int64_t where = (at + i) % WIDTH, values = std::min<int64_t>(WIDTH - where, count - i);
    f(v + i, where, values, (at + i) / WIDTH);
    i += values;
  }
}

// v[i] = f(v[i], row[i]).
template <class Function>
inline void map(float* v, const float* row, int64_t values, const Function& f) {
  int64_t i = 0;
  for (; i + W <= values; i += W) f(Vec::loadu(v + i), Vec::loadu(row + i)).store(v + i);
  if (i < values) {
    const int64_t rest = values - i;
    f(Vec::loadu(v + i, rest), Vec::loadu(row + i, rest)).store(v + i, rest);
  }
}

template <int WIDTH, bool CENTERED>
inline void normalize(float* v, int64_t at, int64_t count, const float* means,
                      const float* factors) {
  by_norm<WIDTH>(v, at, count, [&](float* part, int64_t, int64_t values, int64_t norm) {
    const Vec mean(means[norm]), factor(factors[norm]);
    map(part, part, values, [&](Vec x, Vec) {
      if constexpr (CENTERED) x = x - mean;
      return x * factor;
    });
  });
}

template <int WIDTH>
inline void scale_by(float* v, int64_t at, int64_t count, const float* row) {
  by_norm<WIDTH>(v, at, count, [&](float* part, int64_t where, int64_t values, int64_t) {
    map(part, row + where, values, [](Vec x, Vec y) { return x * y; });
  });
}

template <int WIDTH>
inline void shift_by(float* v, int64_t at, int64_t count, const float* row) {
  by_norm<WIDTH>(v, at, count, [&](float* part, int64_t where, int64_t values, int64_t) {
    map(part, row + where, values, [](Vec x, Vec y) { return x + y; });
  });
}

constexpr int padded(int width) { return (width + LANES - 1) / LANES * LANES; }

// A weight or bias as float32, plus a number.
template <class T, int WIDTH> inline void take_row(const Byte* from, float offset, float* row) {
  take<T, padded(WIDTH)>(from, row, WIDTH);
  if (offset != 0.0f) for (int i = 0; i < WIDTH; ++i) row[i] += offset;
}
"""


def measure(step: Normalize, place: int) -> str:
    """Return the call that computes the statistics of a step for a whole unit. Those that are saved
    are the further results from ``place`` on."""
    pointers = {
        name: f"reinterpret_cast<float*>({at} + row * {at}_stride + begin / {step.width} * 4)"
        for name, at in ((name, f"made{place + i}") for i, name in enumerate(step.saved))
    }
    saved = ", ".join(pointers.get(name, "nullptr") for name in ("mean", "rsqrt"))
    return (
        f"measure<{step.width}, {_is_centered(step)}>(whole, values, {number(step.eps)}, means,"
        f" factors, {saved});"
    )


def normalize(step: Normalize) -> str:
    """Return the call that normalizes a tile."""
    return f"normalize<{step.width}, {_is_centered(step)}>(v, at, count, means, factors);"


def _is_centered(step: Normalize) -> str:
    return str(step.centered).lower()


def take_row(step: Scale | Shift, place: int) -> str:
    """Return the line that reads a weight or bias, the further input ``place``, once."""
    dtype, offset = (step.weight, step.offset) if isinstance(step, Scale) else (step.bias, 0.0)
    return (
        f"alignas(64) float row{place}[padded({step.width})];"
        f" take_row<{NAMES[dtype]}, {step.width}>(more{place}, {number(offset)}, row{place});"
    )


def by_row(step: Scale | Shift, place: int) -> str:
    """Return the call that multiplies by a weight, or adds a bias."""
    verb = "scale_by" if isinstance(step, Scale) else "shift_by"
    return f"{verb}<{step.width}>(v, at, count, row{place});"
