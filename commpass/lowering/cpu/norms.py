"""Norms in C++: statistics of ``WIDTH`` values, and the rows that scale and shift them."""

from __future__ import annotations

from commpass.lowering.chain import Normalize, Scale, Shift
from commpass.lowering.cpu.common import NAMES, number

LARGEST_UNIT = 32768
"""The most values of a unit with a norm, which must hold whole blocks and whole norms. As float32
they fit a level-2 cache."""

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

// v[i] = f(v[i], row[i]) for N values.
template <int N, class Function> inline void map(float* v, const float* row, const Function& f) {
  int i = 0;
  for (; i + W <= N; i += W) f(Vec::loadu(v + i), Vec::loadu(row + i)).store(v + i);
  if constexpr (N % W != 0)
    f(Vec::loadu(v + i, N - i), Vec::loadu(row + i, N - i)).store(v + i, N - i);
}

// Normalizes each WIDTH of `count` values, and writes their means and factors if there is a place.
template <int WIDTH, bool CENTERED>
inline void normalize(float* v, int64_t count, float eps, float* means, float* factors) {
  for (int64_t i = 0; i < count / WIDTH; ++i, v += WIDTH) {
    float mean = 0.0f;
    if constexpr (CENTERED) {
      mean = sum_of<WIDTH>(v, [](Vec x) { return x; }) / WIDTH;
      map<WIDTH>(v, v, [&](Vec x, Vec) { return x - Vec(mean); });
    }
    const float squares = sum_of<WIDTH>(v, [](Vec x) { return x * x; }) / WIDTH;
    const float factor = 1.0f / std::sqrt(squares + eps);
    map<WIDTH>(v, v, [&](Vec x, Vec) { return x * Vec(factor); });
    if (means) means[i] = mean;
    if (factors) factors[i] = factor;
  }
}

template <int WIDTH> inline void scale_by(float* v, int64_t count, const float* row) {
  for (int64_t i = 0; i + WIDTH <= count; i += WIDTH)
    map<WIDTH>(v + i, row, [](Vec x, Vec y) { return x * y; });
}

template <int WIDTH> inline void shift_by(float* v, int64_t count, const float* row) {
  for (int64_t i = 0; i + WIDTH <= count; i += WIDTH)
    map<WIDTH>(v + i, row, [](Vec x, Vec y) { return x + y; });
}

constexpr int padded(int width) { return (width + LANES - 1) / LANES * LANES; }

// A weight or bias as float32, plus a number.
template <class T, int WIDTH> inline void take_row(const Byte* from, float offset, float* row) {
  take<T, padded(WIDTH)>(from, row, WIDTH);
  if (offset != 0.0f) for (int i = 0; i < WIDTH; ++i) row[i] += offset;
}
"""


def normalize(step: Normalize, place: int) -> str:
    """Return the call for a step whose statistics are the further results from ``place`` on."""
    pointers = {
        name: f"reinterpret_cast<float*>({at} + row * {at}_stride + first / {step.width} * 4)"
        for name, at in ((name, f"made{place + i}") for i, name in enumerate(step.saved))
    }
    mean, rsqrt = pointers.get("mean", "nullptr"), pointers.get("rsqrt", "nullptr")
    centered = str(step.centered).lower()
    return f"normalize<{step.width}, {centered}>(v, count, {number(step.eps)}, {mean}, {rsqrt});"


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
    return f"{verb}<{step.width}>(v, count, row{place});"
