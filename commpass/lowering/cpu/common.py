"""The common prelude of all C++ kernels: vectors, rows of values, threads.

Vectors are ATen's (``at::vec``), as wide as the machine's. A kernel never depends on a width, and
neither do its results. Loops over bytes are marked ``omp simd``, because Inductor disables the
compiler's automatic vectorization. Long ones are in functions marked ``VECTORIZED``. The values of
a *unit* (a few blocks) stay in the level-1 cache as float32 while all steps of a chain process
them.
"""

from __future__ import annotations

import struct

import torch

PRELUDE = """\
#include "torch/csrc/inductor/cpp_prefix.h"
#include <c10/util/Unroll.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

namespace {

// Inductor switches vectors for loops off, also for those marked "omp simd". (Clang makes them.)
#if defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((optimize("tree-loop-vectorize"), noinline))
#else
#define VECTORIZED
#endif

using Vec = at::vec::Vectorized<float>;
using Ints = at::vec::Vectorized<int32_t>;
using Byte = unsigned char;
constexpr int W = Vec::size();

inline int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

template <class To, class From> inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Numbers at any address.
template <class T> inline T get(const Byte* at) { T x; std::memcpy(&x, at, sizeof(T)); return x; }
template <class T> inline void put(Byte* at, T x) { std::memcpy(at, &x, sizeof(T)); }

// All bits where a number is finite.
inline Vec finite(Vec x) {
  const Ints infinite(0x7F800000);
  return at::vec::cast<float>((at::vec::cast<int32_t>(x) & infinite) < infinite);
}

// N values of any float dtype, wherever they lie, as float32, and back (to the nearest, ties to
// even).
template <class T, int N> inline void take(const Byte* from, float* v) {
  if constexpr (std::is_same_v<T, float>) {
    for (int i = 0; i < N; i += W) Vec::loadu(from + 4 * i).store(v + i);
  } else {
    for (int i = 0; i < N; i += 2 * W) {
      const at::vec::VectorizedN<T, 1> x(at::vec::Vectorized<T>::loadu(from + 2 * i));
      const auto wide = at::vec::convert<float, 2, T, 1>(x);
      wide[0].store(v + i);
      wide[1].store(v + i + W);
    }
  }
}

template <class T, int N> inline void give(const float* v, Byte* to) {
  if constexpr (std::is_same_v<T, float>) {
    for (int i = 0; i < N; i += W) Vec::loadu(v + i).store(to + 4 * i);
  } else {
    for (int i = 0; i < N; i += 2 * W) {
      at::vec::VectorizedN<float, 2> wide;
      wide[0] = Vec::loadu(v + i);
      wide[1] = Vec::loadu(v + i + W);
      at::vec::convert<T, 1, float, 2>(wide).store(to + 2 * i);
    }
  }
}

// The same where only the first `count` of N values are there: others are zeros, and not written.
template <class T, int N> inline void take(const Byte* from, float* v, int64_t count) {
  if (count >= N) return take<T, N>(from, v);
  alignas(64) Byte edge[N * sizeof(T)] = {};
  std::memcpy(edge, from, count * sizeof(T));
  take<T, N>(edge, v);
}

template <class T, int N> inline void give(const float* v, Byte* to, int64_t count) {
  if (count >= N) return give<T, N>(v, to);
  alignas(64) Byte edge[N * sizeof(T)];
  give<T, N>(v, edge);
  std::memcpy(to, edge, count * sizeof(T));
}

template <class T, int N> inline void round_to(float* v) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    const Ints lowest(0x10000);
    for (int i = 0; i < N; i += W) {
      const Vec x = Vec::loadu(v + i);
      const Ints bits = at::vec::cast<int32_t>(x), minus_odd = (bits & lowest) == lowest;
      const Vec even = at::vec::cast<float>((bits + Ints(0x7FFF) - minus_odd) & Ints(-65536));
      Vec::blendv(even, x, x != x).store(v + i);
    }
  } else if constexpr (!std::is_same_v<T, float>) {
    alignas(64) Byte narrow[N * sizeof(T)];
    give<T, N>(v, narrow);
    take<T, N>(narrow, v);
  }
}

template <int N> inline void add(float* v, const float* other) {
  for (int i = 0; i < N; i += W) (Vec::loadu(v + i) + Vec::loadu(other + i)).store(v + i);
}

template <int N> inline void divide(float* v, float by) {
  const Vec all(by);
  for (int i = 0; i < N; i += W) (Vec::loadu(v + i) / all).store(v + i);
}

template <int N> inline void multiply(float* v, float by) {
  const Vec all(by);
  for (int i = 0; i < N; i += W) (Vec::loadu(v + i) * all).store(v + i);
}

// Zeros behind the first `count` of N values.
template <int N> inline void cut(float* v, int64_t count) {
  for (int64_t i = count; i < N; ++i) v[i] = 0.0f;
}

// Runs `work(begin, end)` on parts of 0 ... count. No number depends on how many there are.
template <class Work> inline void parallel(int64_t threads, int64_t count, const Work& work) {
  if (threads <= 1) return work(0, count);
  #pragma omp parallel num_threads(threads)
  {
    const int64_t of = omp_get_num_threads(), me = omp_get_thread_num();
    work(count * me / of, count * (me + 1) / of);
  }
}
"""

NAMES = {torch.float32: "float", torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}
"""The C++ names of the dtypes that kernels read and write."""


def number(value: float) -> str:
    """Return a number as C++ text, rounded to float32 as torch rounds a Python scalar."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return f"{rounded.hex()}f"
