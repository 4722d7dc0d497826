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

// Whether the processor packs the bits under a mask in a cycle; AMD's first ones took hundreds.
#if defined(__BMI2__) && !defined(__znver1__) && !defined(__znver2__)
#define PACKS_BITS 1
#else
#define PACKS_BITS 0
#endif

// So few fields of a chunk are quicker taken one by one.
constexpr int RARE = 12;

// Runs `work` on each column that has fields.
template <class Work> inline void with_fields(const Lane& fields, const Work& work) {
  uint32_t left = 0;
  for (int l = 0; l < LANES; ++l) left |= uint32_t(fields[l] != 0) << l;
  for (; left; left &= left - 1) work(__builtin_ctz(left));
}

// Adds the string of each column: the fields under its mask, plane after plane.
#if PACKS_BITS
template <int BITS>
inline void add_strings(Bits& bits, const Lane& mask, const Lane* planes, const Lane& fields,
                        int some, int most) {
  const auto string_of = [&](int l) {
    uint64_t string = 0;
    c10::ForcedUnroll<BITS>{}([&](auto i) {
      string |= uint64_t(_pext_u32(planes[i][l], mask[l])) << (i * fields[l]);
    });
    return string;
  };
  if (most * BITS > 64) {
    for (int l = 0; l < LANES; ++l)
      for (int i = 0; i < BITS; ++i) bits.add(_pext_u32(planes[i][l], mask[l]), fields[l]);
  } else if (some <= RARE) {
    with_fields(fields, [&](int l) { bits.add(string_of(l), fields[l] * BITS); });
  } else {
    alignas(64) uint64_t strings[LANES];
    for (int l = 0; l < LANES; ++l) strings[l] = string_of(l);
    bits.append(strings, fields, BITS, most);
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
struct Cursor {
  const uint64_t* stream;
  int64_t last, at = 0;

  inline uint64_t word() const {
    const int64_t word = std::min(at >> 6, last);
    const int shift = at & 63;
    return stream[word] >> shift | (stream[word + 1] << 1) << (63 - shift);
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
    with_fields(fields, [&](int l) {
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
