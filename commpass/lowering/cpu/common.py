"""The common prelude of all C++ kernels: vectors, rows of values, threads.

Vectors are ATen's (``at::vec``), as wide as the machine's. A kernel never depends on a width, and
neither do its results. Inductor disables the compiler's automatic vectorization, also of loops
marked ``omp simd``: long loops over bytes are in functions marked ``VECTORIZED``. The values of
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
#include <bit>
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

// W bytes as whole numbers, and whole numbers from 0 to 255 as bytes.
inline Ints from_bytes(const Byte* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  alignas(64) int32_t lanes[W];
  for (int i = 0; i < W; ++i) lanes[i] = from[i];
  return Ints::loadu(lanes);
#endif
}

inline void to_bytes(Ints numbers, Byte* to) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(numbers));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i all = numbers;
  const __m128i low = _mm256_castsi256_si128(all), high = _mm256_extracti128_si256(all, 1);
  const __m128i pairs = _mm_packus_epi32(low, high);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
#else
  alignas(64) int32_t lanes[W];
  numbers.store(lanes);
  for (int i = 0; i < W; ++i) to[i] = static_cast<Byte>(lanes[i]);
#endif
}

// The same for the results of number(0) ... number(3), one behind the other.
template <class Number> inline void to_bytes_of_four(const Number& number, Byte* to) {
#if defined(CPU_CAPABILITY_AVX2) && !defined(CPU_CAPABILITY_AVX512)
  const __m256i low = _mm256_packus_epi32(number(0), number(1));
  const __m256i high = _mm256_packus_epi32(number(2), number(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), all);
#else
  c10::ForcedUnroll<4>{}([&](auto i) { to_bytes(number(i), to + i * W); });
#endif
}

// Whole numbers of number(0) ... number(3), cut to -MIDDLE ... MIDDLE - 1, with MIDDLE added, as
// bytes one behind the other. The least 32-bit number, which NaNs become, as 0.
template <int MIDDLE, class Number> inline void to_bytes_around(const Number& number, Byte* to) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i low = _mm512_packs_epi32(number(0), number(1));
  const __m512i high = _mm512_packs_epi32(number(2), number(3));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i all = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
  if constexpr (MIDDLE < 128) {
    all = _mm512_max_epi8(all, _mm512_set1_epi8(-MIDDLE));
    all = _mm512_min_epi8(all, _mm512_set1_epi8(MIDDLE - 1));
  }
  _mm512_storeu_si512(to, _mm512_add_epi8(all, _mm512_set1_epi8(static_cast<char>(MIDDLE))));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i low = _mm256_packs_epi32(number(0), number(1));
  const __m256i high = _mm256_packs_epi32(number(2), number(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  if constexpr (MIDDLE < 128) {
    all = _mm256_max_epi8(all, _mm256_set1_epi8(-MIDDLE));
    all = _mm256_min_epi8(all, _mm256_set1_epi8(MIDDLE - 1));
  }
  const __m256i middle = _mm256_set1_epi8(static_cast<char>(MIDDLE));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi8(all, middle));
#else
  const Ints least(-MIDDLE), most(MIDDLE - 1);
  for (int i = 0; i < 4; ++i)
    to_bytes(at::vec::clamp(Ints(number(i)), least, most) + Ints(MIDDLE), to + i * W);
#endif
}

// The nearest whole numbers, ties to even; the least 32-bit number for NaN.
inline Ints nearest(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtps_epi32(x);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtps_epi32(x);
#else
  return at::vec::convert_to_int_of_same_size(x.round());
#endif
}

// All bits where a number is finite.
inline Vec finite(Vec x) {
  const Ints infinite(0x7F800000);
  return at::vec::cast<float>((at::vec::cast<int32_t>(x) & infinite) < infinite);
}

#if defined(CPU_CAPABILITY_AVX512)
// N numbers of bfloat16 as float32: each becomes the upper half of a word.
template <int N> inline void take_upper_halves(const Byte* from, float* v) {
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i first = _mm512_slli_epi32(count, 16);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(W << 16));
  constexpr int AT_ONCE = N % (16 * W) ? 1 : 8;
  for (int begin = 0; begin < N; begin += AT_ONCE * 2 * W) {
    c10::ForcedUnroll<AT_ONCE>{}([&](auto pair) {
      const int i = begin + pair * 2 * W;
      const __m512i both = _mm512_loadu_si512(from + 2 * i);
      constexpr __mmask32 UPPER = 0xAAAAAAAA;
      _mm512_storeu_si512(v + i, _mm512_maskz_permutexvar_epi16(UPPER, first, both));
      _mm512_storeu_si512(v + i + W, _mm512_maskz_permutexvar_epi16(UPPER, second, both));
    });
  }
}
#endif

// N values of any float dtype, wherever they lie, as float32, and back (to the nearest, ties to
// even).
template <class T, int N> inline void take(const Byte* from, float* v) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, at::BFloat16>) return take_upper_halves<N>(from, v);
#endif
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

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// The processor's own conversion, which takes subnormal numbers for zeros and keeps the bits of
// NaNs. Returns whether there is one of these, which are converted otherwise.
template <int N> inline bool give_natively(const float* v, Byte* to) {
  constexpr int NAN_OR_SUBNORMAL = 0x01 | 0x20 | 0x80;
  __mmask16 others = 0;
  constexpr int AT_ONCE = N % (16 * W) ? 1 : 8;
  for (int from = 0; from < N; from += AT_ONCE * 2 * W) {
    c10::ForcedUnroll<AT_ONCE>{}([&](auto pair) {
      const int i = from + pair * 2 * W;
      const __m512 first = _mm512_loadu_ps(v + i), second = _mm512_loadu_ps(v + i + W);
      others |= _mm512_fpclass_ps_mask(first, NAN_OR_SUBNORMAL);
      others |= _mm512_fpclass_ps_mask(second, NAN_OR_SUBNORMAL);
      _mm512_storeu_si512(to + 2 * i, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    });
  }
  return others != 0;
}
#endif

template <class T, int N> inline void give(const float* v, Byte* to) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, at::BFloat16>)
    if (!give_natively<N>(v, to)) return;
#endif
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
