"""Small floats in C++: the bits of torch's casts to and from ``float8_e4m3fn`` and
``float8_e5m2``, and those of the 4-bit and 6-bit floats of ``codecs.block.grids``.

Integer arithmetic only, except for numbers below the smallest normal number of the small float. For
these, a float whose last place is the step of the small float is added, or the smallest normal
number is subtracted.
"""

FLOATS = """
// SPECIAL is the least code, without its sign, that is no finite number.
template <int MANTISSA_, int BIAS_, int SPECIAL_, int LARGEST_> struct Form {
  static constexpr int MANTISSA = MANTISSA_, BIAS = BIAS_, SPECIAL = SPECIAL_, LARGEST = LARGEST_;
  static constexpr int DROP = 23 - MANTISSA;  // bits of a float's mantissa that it has not
  static constexpr int NORMAL = (128 - BIAS) << 23;  // its smallest normal number, as a float
  static constexpr int STEPS = (151 - BIAS - MANTISSA) << 23;  // whose last place is its step
};
using E4M3 = Form<3, 7, 0x7F, 0x7E>;
using E5M2 = Form<2, 15, 0x7C, 0x7B>;
using E2M1 = Form<1, 1, 8, 7>;
using E2M3 = Form<3, 1, 32, 31>;
using E3M2 = Form<2, 3, 32, 31>;

inline Ints if_below(Ints x, int limit, Ints below, Ints rest) {
  return Ints::blendv(rest, below, x < Ints(limit));
}

// The code of |x| without its sign, from the bits of |x|: the nearest, ties to even, cut at the
// largest number.
template <class F> inline Ints to_small(Ints all) {
  constexpr int LARGEST = (F::LARGEST << F::DROP) + F::NORMAL - (1 << 23);
  const Ints size = at::vec::minimum(all, Ints(LARGEST));
  const Ints odd = size >> Ints(F::DROP) & Ints(1);
  const Ints half((1 << (F::DROP - 1)) - 1 + (1 << 23) - F::NORMAL);
  const Ints normal = (size + odd + half) >> Ints(F::DROP);
  const Vec steps(bits_of<float>(F::STEPS));
  const Ints below = at::vec::cast<int32_t>(at::vec::cast<float>(size) + steps) - Ints(F::STEPS);
  return if_below(size, F::NORMAL, below, normal);
}

// NaN stays NaN, and with MARKS an Inf becomes one.
template <class F, bool MARKS> inline Ints to_fp8(Vec x) {
  constexpr int INFINITE = 0x7F800000;
  const Ints bits = at::vec::cast<int32_t>(x), all = bits & Ints(0x7FFFFFFF);
  const Ints code = to_small<F>(all);
  const Ints sign = bits >> Ints(24) & Ints(0x80);
  const Ints nan = MARKS ? Ints(0x7F) : Ints(0x7F) | sign;
  return if_below(all, MARKS ? INFINITE : INFINITE + 1, code | sign, nan);
}

// Codes of fewer bits, all of which are finite; NaN becomes the largest number.
template <class F, int BITS> inline Ints to_minifloat(Vec x) {
  constexpr int INFINITE = 0x7F800000;
  const Ints bits = at::vec::cast<int32_t>(x), all = bits & Ints(0x7FFFFFFF);
  const Ints sign = bits >> Ints(32 - BITS) & Ints(1 << (BITS - 1));
  return to_small<F>(all) | if_below(all, INFINITE + 1, sign, Ints(0));
}

// The bits of the number of a code without its sign.
template <class F> inline Ints from_small(Ints size) {
  const Ints shifted = size << Ints(F::DROP);
  const Ints normal = shifted + Ints(F::NORMAL - (1 << 23));
  const Vec above = at::vec::cast<float>(shifted + Ints(F::NORMAL));
  const Vec least(bits_of<float>(F::NORMAL));
  const Ints below = at::vec::cast<int32_t>(above - least);
  return if_below(size, 1 << F::MANTISSA, below, normal);
}

template <class F, int BITS> inline Vec from_minifloat(const Byte* codes) {
  const Ints bits = from_bytes(codes);
  const Ints size = bits & Ints((1 << (BITS - 1)) - 1);
  return at::vec::cast<float>(from_small<F>(size) | bits >> Ints(BITS - 1) << Ints(31));
}

template <class F> inline Vec from_fp8(const Byte* codes) {
  const Ints bits = from_bytes(codes);
  const Ints size = bits & Ints(0x7F), number = from_small<F>(size);
  const Ints normal = (size << Ints(F::DROP)) + Ints(F::NORMAL - (1 << 23));
  // Inf and NaN of e5m2 lie where those of a float do; that of e4m3 has all bits set.
  const Ints none = normal | Ints(0x7F800000);
  const Ints made = if_below(size, F::SPECIAL, number, none);
  return at::vec::cast<float>(made | bits >> Ints(7) << Ints(31));
}
"""
