// Encode and decode of codec ecq: the same bytes as coder.py, in one pass over a chunk that is in
// the cache. cpp.py puts the constants of coder.py and tables.py before this text.
//
// All states of a chunk take a step together, in loops that the compiler turns into vectors. Only
// the words that states give away or read are moved one by one, without branches: whether a state
// has a word is close to random.

// Inductor switches vectors off, also for loops marked "omp simd".
#pragma GCC optimize("tree-loop-vectorize")
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

namespace {

using Byte = unsigned char;

constexpr int CLASSES = 2 * HALF, TOTAL = 1 << TOTAL_BITS;
constexpr int DITHERED = LARGEST_RATIO - LEAST_RATIO + 1;  // the first table of small numbers
constexpr int FINE = PER_RMS * PER_OCTAVE;
constexpr uint32_t LEAST = 1u << 16;

// What coding with a table needs. All tables are made before the first use of one.
struct Table {
  uint32_t classes[CLASSES];  // sum of the frequencies before, and frequency
  uint32_t slots[TOTAL];      // class, frequency - 1, and place within the class
};

struct Tables {
  Table all[TABLES];
  Tables() {
    for (int t = 0; t < TABLES; ++t) {
      uint32_t start = 0;
      for (int c = 0; c < CLASSES; ++c) {
        const uint32_t frequency = FREQUENCIES[t][c];
        all[t].classes[c] = start << 16 | frequency;
        for (uint32_t i = 0; i < frequency; ++i)
          all[t].slots[start + i] = c << 24 | (frequency - 1) << 12 | i;
        start += frequency;
      }
    }
  }
};

const Table& table(int number) {
  static const Tables* const every = new Tables();
  return every->all[number];
}

inline float power(int64_t number) {
  return std::ldexp(ROOTS[number & (FINE - 1)], static_cast<int>(number >> 6));
}

// The dither of a block with a table; zeros without.
struct Dithers {
  alignas(64) float all[2][BLOCK] = {};
  Dithers() {
    for (int i = 0; i < BLOCK; ++i) all[1][i] = ((DITHER * i & 255) + 0.5f) / 256 - 0.5f;
  }
};

inline const float* dither(int number) {
  static const Dithers both;
  return both.all[number >= ALWAYS_DITHERED - LEAST_RATIO];
}

inline int lanes_of(int64_t blocks) {
  int lanes = 1;
  while (lanes < MOST_LANES && 2 * lanes <= blocks) lanes *= 2;
  return lanes;
}

struct Chunk {
  int64_t blocks, nbytes;  // blocks, and the bytes of each
  int even, lanes;
  int64_t step = 0;
  bool dithered = false;
  uint8_t rms[CHUNK / BLOCK] = {};  // of blocks, in eighths of an octave below 1

  Chunk(int64_t blocks, int64_t nbytes, int even)
      : blocks(blocks), nbytes(nbytes), even(even), lanes(lanes_of(blocks)) {}
  int64_t states_at() const { return 2 + (blocks + 1) / 2 * 2; }
  int64_t header() const { return states_at() + 4 * lanes; }
  int64_t words() const { return (blocks * nbytes - header()) / 2; }
  int64_t fine(int64_t block, int64_t step) const {
    if (rms[block] == ZERO) return -4 * COARSEST;
    return -(2 - even) * (PER_RMS / 2) * rms[block] - step;
  }
  int table(int64_t block) const {
    const int64_t fitting = (fine(block, step) + PER_RMS / 2) >> 3;
    const int64_t ratio = std::clamp<int64_t>(fitting, LEAST_RATIO, LARGEST_RATIO);
    if (dithered && ratio >= LEAST_DITHERED && ratio < ALWAYS_DITHERED)
      return DITHERED + ratio - LEAST_DITHERED;
    return ratio - LEAST_RATIO;
  }
  int64_t step_power(int64_t block) const { return step - even * (PER_RMS / 2) * rms[block]; }

  void measure(const float* v) {
    for (int64_t block = 0; block < blocks; ++block, v += BLOCK) {
      double sum = 0;
      float peak = 0;
      #pragma omp simd reduction(+ : sum) reduction(max : peak)
      for (int i = 0; i < BLOCK; ++i) {
        sum += static_cast<double>(v[i]) * v[i];
        peak = std::max(peak, std::abs(v[i]));
      }
      const double largest = std::max(std::sqrt(sum / BLOCK), peak / PEAK);
      const double number = largest > 0 ? std::nearbyint(-PER_OCTAVE * std::log2(largest)) : ZERO;
      rms[block] = std::clamp<double>(number, 0, ZERO);
    }
  }

  // The smallest step whose code should fit.
  void choose() {
    const int64_t free_bits = lanes * (32 - 16 - OVERHEAD) - (SPARE + 3 * lanes);
    const int64_t budget = (8 * (blocks * nbytes - header()) + free_bits) * (PER_RMS << COST_BITS);
    int64_t finest = -COARSEST, coarsest = COARSEST;
    for (int64_t block = 0; block < blocks; ++block)
      finest = std::max<int64_t>(finest, fine(block, LARGEST_RATIO * PER_RMS));
    while (finest < coarsest) {
      const int64_t middle = (finest + coarsest) >> 1;
      int64_t bits = 0;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t each = std::clamp<int64_t>(fine(block, middle), LEAST_RATIO * PER_RMS,
                                                 LARGEST_RATIO * PER_RMS - 1);
        const int64_t place = (each >> 3) - LEAST_RATIO, part = each & 7;
        bits += COSTS[place] * (PER_RMS - part) + COSTS[place + 1] * part;
      }
      if (bits * BLOCK <= budget) coarsest = middle;
      else finest = middle + 1;
    }
    step = coarsest;
  }
};

// Writes a word of each state that is not below `limit << shift`. Words are written from the
// last one to the first: `end` is behind the last one.
template <int LANES> inline void flush(uint32_t* x, const uint32_t* limit, int shift,
                                       uint16_t*& end) {
  for (int i = LANES - 1; i >= 0; --i) {
    const uint32_t is_full = x[i] >> shift >= limit[i];
    end[-1] = x[i];
    end -= is_full;
    x[i] = is_full ? x[i] >> 16 : x[i];
  }
}

template <int LANES> inline uint16_t* encode(const Chunk& chunk, const float* v, uint32_t* state,
                                             uint16_t* end) {
  alignas(64) uint32_t x[LANES], frequency[LANES], start[LANES], one[LANES];
  alignas(64) int32_t q[LANES];
  for (int i = 0; i < LANES; ++i) x[i] = LEAST, one[i] = 1;
  for (int64_t block = chunk.blocks - 1; block >= 0; --block) {
    const int number = chunk.table(block);
    const Table& of = table(number);
    const int low = LOW[number];
    const uint32_t mask = (1u << low) - 1;
    const float by = chunk.rms[block] == ZERO ? 0 : power(-chunk.step_power(block));
    const float *const own = v + block * BLOCK, *const d = dither(number);
    for (int at = BLOCK - LANES; at >= 0; at -= LANES) {
      #pragma omp simd
      for (int i = 0; i < LANES; ++i)
        q[i] = static_cast<int32_t>(std::nearbyintf(own[at + i] * by + d[at + i]));
      if (low) {
        flush<LANES>(x, one, 32 - low, end);
        #pragma omp simd
        for (int i = 0; i < LANES; ++i) x[i] = x[i] << low | (q[i] & mask);
      }
      for (int i = 0; i < LANES; ++i) {
        const uint32_t entry = of.classes[(q[i] >> low) + HALF];
        frequency[i] = entry & 0xFFFF;
        start[i] = entry >> 16;
      }
      flush<LANES>(x, frequency, 32 - TOTAL_BITS, end);
      // x / frequency is below 2^20, so that its float32 is off by one at most.
      #pragma omp simd
      for (int i = 0; i < LANES; ++i) {
        const float half = static_cast<int32_t>(x[i] >> 1);
        int32_t times = static_cast<int32_t>(half * (2.0f / static_cast<int32_t>(frequency[i])));
        int32_t rest = static_cast<int32_t>(x[i] - times * frequency[i]);
        const int32_t less = rest < 0, more = rest >= static_cast<int32_t>(frequency[i]);
        times += more - less;
        rest += (less - more) * static_cast<int32_t>(frequency[i]);
        x[i] = (static_cast<uint32_t>(times) << TOTAL_BITS) + rest + start[i];
      }
    }
  }
  for (int i = 0; i < LANES; ++i) state[i] = x[i];
  return end;
}

template <int LANES, bool CHECKED>
inline void step(const Table& of, int low, uint32_t* x, const uint16_t*& in, const uint16_t* end,
                 int32_t* q) {
  alignas(64) uint32_t slot[LANES];
  const auto refill = [&] {
    for (int i = 0; i < LANES; ++i) {
      const uint32_t is_empty = x[i] < LEAST;
      const uint32_t word = CHECKED && in >= end ? 0 : *in;
      x[i] = is_empty ? x[i] << 16 | word : x[i];
      in += is_empty;
    }
  };
  for (int i = 0; i < LANES; ++i) slot[i] = of.slots[x[i] & (TOTAL - 1)];
  #pragma omp simd
  for (int i = 0; i < LANES; ++i) {
    x[i] = ((slot[i] >> 12 & 4095) + 1) * (x[i] >> TOTAL_BITS) + (slot[i] & 4095);
    q[i] = static_cast<int32_t>(slot[i] >> 24) - HALF;
  }
  refill();
  if (!low) return;
  const uint32_t mask = (1u << low) - 1;
  #pragma omp simd
  for (int i = 0; i < LANES; ++i) {
    q[i] = static_cast<int32_t>(static_cast<uint32_t>(q[i]) << low | (x[i] & mask));
    x[i] >>= low;
  }
  refill();
}

template <int LANES>
inline void decode(const Chunk& chunk, const uint32_t* state, const uint16_t* in, float* v) {
  alignas(64) uint32_t x[LANES];
  alignas(64) int32_t q[LANES];
  const uint16_t* const end = in + chunk.words();
  for (int i = 0; i < LANES; ++i) x[i] = state[i];
  for (int64_t block = 0; block < chunk.blocks; ++block) {
    const int number = chunk.table(block);
    const Table& of = table(number);
    const float by = LEVELS[number] * power(chunk.step_power(block));
    float* const own = v + block * BLOCK;
    const float* const d = dither(number);
    const bool safe = end - in > 2 * BLOCK;  // a number reads two words at most
    for (int at = 0; at < BLOCK; at += LANES) {
      if (safe) step<LANES, false>(of, LOW[number], x, in, end, q);
      else step<LANES, true>(of, LOW[number], x, in, end, q);
      #pragma omp simd
      for (int i = 0; i < LANES; ++i) own[at + i] = (q[i] - d[at + i]) * by;
    }
  }
}

#define FOR_LANES(lanes, call)      \
  switch (lanes) {                  \
    case 1: call(1); break;         \
    case 2: call(2); break;         \
    case 4: call(4); break;         \
    case 8: call(8); break;         \
    default: call(16);              \
  }

// --- rotation ------------------------------------------------------------------------------------

// The signs of ``transforms.Hadamard``: the parity of the pairs of bits of a position that are set.
struct Signs {
  alignas(64) float all[BLOCK];
  Signs() {
    for (int i = 0; i < BLOCK; ++i) all[i] = __builtin_popcount(i & i >> 1 & 0x55) % 2 ? -1 : 1;
  }
};

constexpr int SIDE = 16;  // a block is a square

// H @ block over the first of its two dimensions, times `by`.
inline void butterflies(float* v, float by) {
  for (int apart = 1; apart < SIDE; apart *= 2)
    for (int row = 0; row < SIDE; ++row)
      if (!(row & apart)) {
        float *a = v + row * SIDE, *b = a + apart * SIDE;
        const float factor = apart == 1 ? by : 1.0f;
        #pragma omp simd
        for (int i = 0; i < SIDE; ++i) {
          const float x = a[i] * factor, y = b[i] * factor;
          a[i] = x + y;
          b[i] = x - y;
        }
      }
}

inline void transpose(const float* from, float* to) {
  for (int i = 0; i < SIDE; ++i)
    for (int k = 0; k < SIDE; ++k) to[k * SIDE + i] = from[i * SIDE + k];
}

// H @ block: both dimensions in turn, each with a factor.
inline void hadamard(float* v, float by) {
  alignas(64) float turned[BLOCK];
  butterflies(v, by);
  transpose(v, turned);
  butterflies(turned, by);
  transpose(turned, v);
}

inline void multiply(float* v, const float* by) {
  #pragma omp simd
  for (int i = 0; i < BLOCK; ++i) v[i] *= by[i];
}

inline void multiply(float* v, int64_t count, float by) {
  #pragma omp simd
  for (int64_t i = 0; i < count; ++i) v[i] *= by;
}

const Signs& signs() {
  static const Signs only;
  return only;
}

// --- chunks of rows ------------------------------------------------------------------------------

// `v` has whole blocks of values; they are overwritten. Returns the byte of the scale.
Byte encode_chunk(float* v, int64_t blocks, int64_t nbytes, int even, bool rotated, Byte* out) {
  if (rotated) {
    for (int64_t block = 0; block < blocks; ++block) {
      multiply(v + block * BLOCK, signs().all);
      hadamard(v + block * BLOCK, 1.0f / SIDE);
    }
  }
  uint32_t peak = 0;  // of |v|, whose order is that of their bits; nonfinite ones are the largest
  #pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < blocks * BLOCK; ++i) {
    uint32_t bits;
    std::memcpy(&bits, v + i, 4);
    peak = std::max(peak, bits & 0x7FFFFFFF);
  }
  const bool finite = peak < 0x7F800000;
  const uint32_t power = std::clamp<uint32_t>((peak + 0x7FFFFF) >> 23, 1, 254);
  if (finite) {
    const uint32_t bits = power << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    multiply(v, blocks * BLOCK, 1.0f / scale);
  } else {
    std::fill(v, v + blocks * BLOCK, 0.0f);
  }
  Chunk chunk(blocks, nbytes, even);
  chunk.measure(v);
  chunk.choose();
  static thread_local std::vector<uint16_t> stream(2 * CHUNK + 1);
  uint16_t* const end = stream.data() + stream.size();
  const int64_t words = chunk.words();
  uint32_t state[16];
  const int64_t finest = chunk.step;
  for (int attempt = 0;; ++attempt) {
    chunk.dithered = attempt >= ATTEMPTS;
    chunk.step = finest + (1 << (attempt - ATTEMPTS * chunk.dithered)) - 1;
    uint16_t* first = end;
    #define ENCODE(n) first = encode<n>(chunk, v, state, end)
    FOR_LANES(chunk.lanes, ENCODE)
    if (end - first > words) continue;
    const int16_t step = 2 * chunk.step + chunk.dithered;
    std::memcpy(out, &step, 2);
    std::memset(out + 2, 0, blocks * nbytes - 2);
    std::memcpy(out + 2, chunk.rms, blocks);
    std::memcpy(out + chunk.states_at(), state, 4 * chunk.lanes);
    std::memcpy(out + chunk.header(), first, 2 * (end - first));
    return finite ? power : 255;
  }
}

void decode_chunk(const Byte* in, Byte power, int64_t blocks, int64_t nbytes, int even,
                  bool rotated, float limit, float* v) {
  Chunk chunk(blocks, nbytes, even);
  int16_t step;
  std::memcpy(&step, in, 2);
  chunk.step = step >> 1;
  chunk.dithered = step & 1;
  std::memcpy(chunk.rms, in + 2, blocks);
  alignas(64) uint32_t state[16];
  std::memcpy(state, in + chunk.states_at(), 4 * chunk.lanes);
  const auto* const words = reinterpret_cast<const uint16_t*>(in + chunk.header());
  #define DECODE(n) decode<n>(chunk, state, words, v)
  FOR_LANES(chunk.lanes, DECODE)
  const uint32_t bits = power == 255 ? 0x7FC00000 : static_cast<uint32_t>(power) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  if (rotated) {
    multiply(v, blocks * BLOCK, scale / BLOCK);
    for (int64_t block = 0; block < blocks; ++block) {
      hadamard(v + block * BLOCK, 1.0f);
      multiply(v + block * BLOCK, signs().all);
    }
    scale = BLOCK;
  }
  #pragma omp simd
  for (int64_t i = 0; i < blocks * BLOCK; ++i) {
    const float x = v[i] * scale;
    v[i] = x > limit ? limit : x < -limit ? -limit : x;
  }
}

}  // namespace

// `side` has the scales; they are written if `in` is encoded.
extern "C" void kernel(int64_t threads, int64_t decoding, int64_t rows, int64_t n, int64_t nbytes,
                       int64_t even, int64_t rotated, float limit, const Byte* in,
                       int64_t in_stride, Byte* side, int64_t side_stride, Byte* out,
                       int64_t out_stride) {
  const int64_t chunks = (n + CHUNK - 1) / CHUNK, code_of_chunk = CHUNK / BLOCK * nbytes;
  #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t each = 0; each < rows * chunks; ++each) {
    const int64_t row = each / chunks, chunk = each % chunks, first = chunk * CHUNK;
    const int64_t values = std::min(n - first, CHUNK), blocks = (values + BLOCK - 1) / BLOCK;
    static thread_local std::vector<float> v(CHUNK);
    const Byte* const source = in + row * in_stride;
    Byte *const target = out + row * out_stride, *const scale = side + row * side_stride + chunk;
    if (decoding) {
      decode_chunk(source + chunk * code_of_chunk, *scale, blocks, nbytes, even, rotated, limit,
                   v.data());
      std::memcpy(target + 4 * first, v.data(), 4 * values);
    } else {
      std::memcpy(v.data(), source + 4 * first, 4 * values);
      std::fill(v.data() + values, v.data() + blocks * BLOCK, 0.0f);
      Byte* const code = target + chunk * code_of_chunk;
      *scale = encode_chunk(v.data(), blocks, nbytes, even, rotated, code);
    }
  }
}
