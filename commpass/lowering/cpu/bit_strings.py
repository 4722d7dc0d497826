"""The C++ of bit strings: the fields of a column put end to end, and words of 32 columns.

The vector width is W words. ``PACKS_BITS`` selects between two forms of the same operation: an
instruction for each column (BMI2), or moves of whole vectors (``codecs.exponent.bits.moves``),
which ``exponents`` generates.
"""

from __future__ import annotations

WORDS = """
typedef int32_t Word __attribute__((vector_size(4 * W)));  // W columns
typedef int32_t Lane[32];  // a word of each column of a chunk
constexpr int LANES = 32;

// Bits put end to end; the last word is open until `close`.
struct Bits {
  uint64_t* words;
  uint64_t open = 0;
  int64_t size = 0;

  inline void add(uint64_t string, int length) {
    const int shift = size & 63;
    const uint64_t whole = open | string << shift, carry = (string >> 1) >> (63 - shift);
    const int64_t next = size + length;
    words[size >> 6] = whole;
    open = (next >> 6) > (size >> 6) ? carry : whole;
    size = next;
  }

  inline void close() { words[size >> 6] = open; }

  // As many strings as lanes, of `bits` bits a field; no column has more than `most` fields.
  // Strings that fit in a word are put together first: that can be done while those before are
  // still being added.
  inline void append(const uint64_t* strings, const int32_t* fields, int bits, int most) {
    if (most * bits * 4 < 64) return append_groups<4>(strings, fields, bits);
    if (most * bits * 2 < 64) return append_groups<2>(strings, fields, bits);
    append_groups<1>(strings, fields, bits);
  }

  template <int GROUP>
  inline void append_groups(const uint64_t* strings, const int32_t* fields, int bits) {
    Bits to = *this;  // in registers
    for (int l = 0; l < LANES; l += GROUP) {
      uint64_t string = strings[l];
      int length = fields[l] * bits;
      for (int i = 1; i < GROUP; ++i) {
        string |= strings[l + i] << length;
        length += fields[l + i] * bits;
      }
      to.add(string, length);
    }
    *this = to;
  }
};

// A word of each column of a chunk, in registers. `many` sums numbers of fields and finds the most.
#if defined(__AVX512VPOPCNTDQ__)
struct Columns {
  __m512i low, high;

  explicit Columns(const Lane& words)
      : low(_mm512_loadu_si512(words)), high(_mm512_loadu_si512(words + LANES / 2)) {}

  inline int ones() const {
    const __m512i first = _mm512_popcnt_epi64(low), second = _mm512_popcnt_epi64(high);
    return _mm512_reduce_add_epi64(_mm512_add_epi64(first, second));
  }

  // The bits that are ones in `other`, or zeros.
  inline Columns where(const Columns& other, bool one) const {
    Columns made = *this;
    const __m512i turned = _mm512_set1_epi32(one ? 0 : -1);
    made.low = _mm512_and_si512(low, _mm512_xor_si512(other.low, turned));
    made.high = _mm512_and_si512(high, _mm512_xor_si512(other.high, turned));
    return made;
  }
};

inline void many(const Lane& fields, int& some, int& most) {
  const Columns numbers(fields);
  some = _mm512_reduce_add_epi32(_mm512_add_epi32(numbers.low, numbers.high));
  most = _mm512_reduce_max_epi32(_mm512_max_epi32(numbers.low, numbers.high));
}
#else
struct Columns {
  alignas(64) uint64_t words[LANES / 2];

  explicit Columns(const Lane& from) { std::memcpy(words, from, sizeof(words)); }

  inline int ones() const {
    int some = 0;
    for (auto word : words) some += __builtin_popcountll(word);
    return some;
  }

  inline Columns where(const Columns& other, bool one) const {
    Columns made = *this;
    const uint64_t turned = one ? 0 : ~uint64_t(0);
    for (int i = 0; i < LANES / 2; ++i) made.words[i] &= other.words[i] ^ turned;
    return made;
  }
};

inline void many(const Lane& fields, int& some, int& most) {
  some = most = 0;
  for (int l = 0; l < LANES; ++l) {
    some += fields[l];
    most = fields[l] > most ? fields[l] : most;
  }
}
#endif

// Counts the ones of N planes. In vectors four counts share a word: none of them exceeds 2^15.
// `many` also gives the most fields of a column, of each of STEPS steps. A column has at most 32.
#if defined(__AVX512VPOPCNTDQ__) && defined(CPU_CAPABILITY_AVX512)
#define COUNTS_IN_VECTORS 1
template <int N> struct Counts {
  static constexpr int WORDS = (N + 3) / 4;
  __m512i sums[WORDS] = {};
  uint64_t words[WORDS];

  template <int I> inline void add(__m512i columns) {
    const __m512i ones = _mm512_popcnt_epi64(columns);
    sums[I / 4] = _mm512_add_epi64(sums[I / 4], _mm512_slli_epi64(ones, I % 4 * 16));
  }

  template <int I> inline void add(const Word& columns, int) { add<I>((__m512i)columns); }

  inline void close() {
    c10::ForcedUnroll<WORDS>{}([&](auto i) { words[i] = _mm512_reduce_add_epi64(sums[i]); });
  }

  inline int32_t operator[](int i) const { return words[i / 4] >> (i % 4 * 16) & 0xffff; }
};

template <int STEPS>
inline void many(const Lane* masks, const Lane* fields, int* some, int* most) {
  static_assert(STEPS <= 4);
  Counts<STEPS> counts;
  __m512i most_of = _mm512_setzero_si512();  // a byte for each step
  for (int g = 0; g < LANES; g += LANES / 2) {
    __m512i here = _mm512_setzero_si512();
    c10::ForcedUnroll<STEPS>{}([&](auto i) {
      counts.template add<i>(_mm512_loadu_si512(masks[i] + g));
      const __m512i own = _mm512_loadu_si512(fields[i] + g);
      here = _mm512_or_si512(here, _mm512_slli_epi32(own, 8 * i));
    });
    most_of = _mm512_max_epu8(most_of, here);
  }
  counts.close();
  const __m256i half = _mm256_max_epu8(_mm512_castsi512_si256(most_of),
                                       _mm512_extracti64x4_epi64(most_of, 1));
  __m128i last = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  last = _mm_max_epu8(last, _mm_shuffle_epi32(last, 0x4e));
  last = _mm_max_epu8(last, _mm_shuffle_epi32(last, 0xb1));
  const uint32_t each = _mm_cvtsi128_si32(last);
  for (int i = 0; i < STEPS; ++i) some[i] = counts[i], most[i] = each >> (8 * i) & 0xff;
}
#else
#define COUNTS_IN_VECTORS 0
template <int N> struct Counts {
  alignas(64) Lane planes[N];
  int32_t ones[N];

  template <int I> inline void add(const Word& columns, int g) {
    std::memcpy(planes[I] + g, &columns, sizeof(Word));
  }

  inline void close() {
    for (int i = 0; i < N; ++i) ones[i] = Columns(planes[i]).ones();
  }

  inline int32_t operator[](int i) const { return ones[i]; }
};

template <int STEPS>
inline void many(const Lane*, const Lane* fields, int* some, int* most) {
  for (int i = 0; i < STEPS; ++i) many(fields[i], some[i], most[i]);
}
#endif

// Whether the processor packs the bits under a mask in a cycle; AMD's first ones took hundreds.
#if defined(__BMI2__) && !defined(__znver1__) && !defined(__znver2__)
#define PACKS_BITS 1
#else
#define PACKS_BITS 0
#endif

// So few fields of a chunk are quicker taken one by one.
constexpr int RARE = 12;

// One bit for each column that has fields.
inline uint32_t columns_with(const Lane& fields) {
  uint32_t found = 0;
  for (int l = 0; l < LANES; ++l) found |= uint32_t(fields[l] != 0) << l;
  return found;
}

// The same. It waits if fields of single columns were stored just before.
inline uint32_t columns_with_settled(const Lane& fields) {
  #if defined(__AVX512F__)
  const auto part = [&](int at) {
    const __m512i some = _mm512_loadu_si512(fields + at);
    return uint32_t(_mm512_test_epi32_mask(some, some));
  };
  return part(0) | part(LANES / 2) << (LANES / 2);
  #else
  return columns_with(fields);
  #endif
}

// Runs `work` on each of the columns.
template <class Work> inline void for_each(uint32_t columns, const Work& work) {
  for (; columns; columns &= columns - 1) work(__builtin_ctz(columns));
}

// Adds the string of each column: the fields under its mask, plane after plane.
#if PACKS_BITS
template <int BITS>
inline uint64_t string_of(const Lane& mask, const Lane* planes, const Lane& fields, int l) {
  uint64_t string = 0;
  c10::ForcedUnroll<BITS>{}([&](auto i) {
    string |= uint64_t(_pext_u32(planes[i][l], mask[l])) << (i * fields[l]);
  });
  return string;
}

template <int BITS>
inline void all_strings(Bits& bits, const Lane& mask, const Lane* planes, const Lane& fields,
                        int most) {
  alignas(64) uint64_t strings[LANES];
  #if defined(__AVX512F__)
  if constexpr (BITS == 2 || BITS == 3) {
    const auto wide = [](const int32_t* from) {
      return _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i*)from));
    };
    const auto twice = [](__m512i low, __m512i high) {
      return _mm512_or_si512(low, _mm512_slli_epi64(high, 32));
    };
    alignas(64) uint64_t pairs[LANES], masks[LANES];  // of two planes
    for (int l = 0; l < LANES; l += 8) {
      const __m512i here = wide(mask + l);
      _mm512_storeu_si512(masks + l, twice(here, here));
      _mm512_storeu_si512(pairs + l, twice(wide(planes[0] + l), wide(planes[1] + l)));
    }
    for (int l = 0; l < LANES; ++l) {
      strings[l] = _pext_u64(pairs[l], masks[l]);
      if constexpr (BITS == 3)
        strings[l] |= uint64_t(_pext_u32(planes[2][l], mask[l])) << (2 * fields[l]);
    }
    return bits.append(strings, fields, BITS, most);
  }
  #endif
  for (int l = 0; l < LANES; ++l) strings[l] = string_of<BITS>(mask, planes, fields, l);
  bits.append(strings, fields, BITS, most);
}

template <int BITS>
inline void add_strings(Bits& bits, const Lane& mask, const Lane* planes, const Lane& fields,
                        int some, int most) {
  if (most * BITS > 64) {
    for (int l = 0; l < LANES; ++l)
      for (int i = 0; i < BITS; ++i) bits.add(_pext_u32(planes[i][l], mask[l]), fields[l]);
  } else if (some <= RARE) {
    for_each(columns_with_settled(fields), [&](int l) {
      bits.add(string_of<BITS>(mask, planes, fields, l), fields[l] * BITS);
    });
  } else {
    all_strings<BITS>(bits, mask, planes, fields, most);
  }
}
#else
template <int BITS>
inline void few_strings(const int32_t* mask, Lane* planes, const int32_t* fields,
                        uint64_t* strings) {
  for (int l = 0; l < LANES; ++l) {
    const int c = fields[l];
    uint64_t string = 0;
    uint32_t left = mask[l];
    for (int k = 0; k < c; ++k, left &= left - 1) {
      const int at = __builtin_ctz(left);
      c10::ForcedUnroll<BITS>{}([&](auto i) {
        string |= uint64_t((uint32_t(planes[i][l]) >> at) & 1) << (i * c + k);
      });
    }
    strings[l] = string;
  }
}
#endif

// Reads strings one behind the other; no index leads outside, whatever the wire holds.
// It reads up to 8 bytes after the word `last`.
struct Cursor {
  const Byte* stream;
  int64_t last, at = 0;

  inline uint64_t word() const {
    const Byte* word = stream + std::min(at >> 6, last) * 8;
    const int shift = at & 63;
    return get<uint64_t>(word) >> shift | (get<uint64_t>(word + 8) << 1) << (63 - shift);
  }

  // Strings of so many fields of `bits` bits each.
  inline void read(const int32_t* fields, int bits, uint64_t* strings) {
    for (int l = 0; l < LANES; ++l) {
      strings[l] = word();
      at += fields[l] * bits;
    }
  }

  inline uint32_t next(int bits) {
    const uint64_t string = word() & ~(~uint64_t(0) << bits);
    at += bits;
    return uint32_t(string);
  }

  #if PACKS_BITS
  // Puts the fields of each column under its mask. Returns whether masks and numbers of fields are
  // still those of this step.
  template <int BITS>
  inline bool open(Lane& here, Lane& fields, int some, int most, Lane* planes) {
    const auto column = [&](int l) {
      const uint64_t string = word();
      at += fields[l] * BITS;
      c10::ForcedUnroll<BITS>{}([&](auto i) {
        planes[i][l] = _pdep_u32(uint32_t(string >> (i * fields[l])), here[l]);
      });
    };
    if (most * BITS > 64) {
      for (int l = 0; l < LANES; ++l)
        for (int i = 0; i < BITS; ++i) planes[i][l] = _pdep_u32(next(fields[l]), here[l]);
      return true;
    }
    if (some > RARE) {
      for (int l = 0; l < LANES; ++l) column(l);
      return true;
    }
    std::memset(planes, 0, sizeof(Lane) * BITS);
    for_each(columns_with(fields), [&](int l) {
      column(l);
      uint32_t taken = 0;
      c10::ForcedUnroll<BITS>{}([&](auto i) { taken |= planes[i][l]; });
      here[l] &= ~taken;
      fields[l] = __builtin_popcount(here[l]);
    });
    return false;
  }
  #endif
};

#if !PACKS_BITS
template <int BITS> inline void expand_few(int32_t* here, int32_t* fields, const uint64_t* strings,
                                           Lane* planes) {
  for (int l = 0; l < LANES; ++l) {
    uint32_t left = here[l];
    here[l] = 0;
    const int c = fields[l];
    for (int k = 0; k < c; ++k, left &= left - 1) {
      const uint32_t bit = left & -left;
      uint32_t named = 0;
      c10::ForcedUnroll<BITS>{}([&](auto i) {
        const uint32_t set = (strings[l] >> (i * c + k)) & 1 ? bit : 0;
        planes[i][l] |= set;
        named |= set;
      });
      here[l] |= bit & ~named;
    }
    fields[l] = __builtin_popcount(here[l]);
  }
}
#endif
"""
