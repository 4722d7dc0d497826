"""8-bit floats in C++: the bits of torch's casts to and from ``float8_e4m3fn`` and ``float8_e5m2``.

Integer arithmetic only, except for numbers below the smallest normal number of the 8-bit float. For
these, a float whose last place is the step of the 8-bit float is added, or the smallest normal
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

inline Ints if_below(Ints x, int limit, Ints below, Ints rest) {
  return Ints::blendv(rest, below, x < Ints(limit));
}

// To the nearest, ties to even, cut at the largest number. NaN stays NaN, and with MARKS an Inf
// becomes one.
template <class F, bool MARKS> inline Ints to_fp8(Vec x) {
  constexpr int INFINITE = 0x7F800000, LARGEST = (F::LARGEST << F::DROP) + F::NORMAL - (1 << 23);
  const Ints bits = at::vec::cast<int32_t>(x), all = bits & Ints(0x7FFFFFFF);
  const Ints size = at::vec::minimum(all, Ints(LARGEST));
  const Ints odd = size >> Ints(F::DROP) & Ints(1);
  const Ints half((1 << (F::DROP - 1)) - 1 + (1 << 23) - F::NORMAL);
  const Ints normal = (size + odd + half) >> Ints(F::DROP);
  const Vec steps(bits_of<float>(F::STEPS));
  const Ints below = at::vec::cast<int32_t>(at::vec::cast<float>(size) + steps) - Ints(F::STEPS);
  const Ints code = if_below(size, F::NORMAL, below, normal);
  const Ints sign = bits >> Ints(24) & Ints(0x80);
  const Ints nan = MARKS ? Ints(0x7F) : Ints(0x7F) | sign;
  return if_below(all, MARKS ? INFINITE : INFINITE + 1, code | sign, nan);
}

template <class F> inline Vec from_fp8(const Byte* codes) {
  const Ints bits = at::vec::convert<int32_t>(at::vec::Vectorized<Byte>::loadu(codes, W));
  const Ints size = bits & Ints(0x7F), shifted = size << Ints(F::DROP);
  const Ints normal = shifted + Ints(F::NORMAL - (1 << 23));
  const Vec above = at::vec::cast<float>(shifted + Ints(F::NORMAL));
  const Vec least(bits_of<float>(F::NORMAL));
  const Ints below = at::vec::cast<int32_t>(above - least);
  const Ints number = if_below(size, 1 << F::MANTISSA, below, normal);
  // Inf and NaN of e5m2 lie where those of a float do; that of e4m3 has all bits set.
  const Ints none = normal | Ints(0x7F800000);
  const Ints made = if_below(size, F::SPECIAL, number, none);
  return at::vec::cast<float>(made | bits >> Ints(7) << Ints(31));
}
"""
