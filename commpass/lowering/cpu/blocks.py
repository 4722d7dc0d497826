"""Block codecs in C++."""

from __future__ import annotations

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.layouts import Flat
from commpass.codecs.block.noise import Nearest
from commpass.codecs.block.transforms import Hadamard
from commpass.lowering.cpu import grids, rotation, scales

LONGEST = 4096
"""Values of the longest block: as float32 they fill half of a first cache."""

BLOCKS = """
// A row of n values as blocks: all codes, then all scales.
template <int BLOCK, class Grid, class Scale, class Stored, class Transform> struct Blocks {
  static constexpr int CODES = BLOCK * Grid::BITS / 8;
  // Blocks of whole tiles may be coded turned.
  static constexpr bool TURNED = Transform::SUMS > 1 && BLOCK % (W * W) == 0;

  // UNIT values, of which the first is number `first` of its row, to their places in the wire.
  static inline void encode(float* v, Byte* wire, int64_t n, int64_t first) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, scales = aligned(blocks * CODES);
    Transform::template forward<TURNED>(v);
    const int64_t from = first / BLOCK, until = std::min(blocks, from + UNIT / BLOCK);
    for (int64_t block = from; block < until; ++block, v += BLOCK) {
      const float scale = Scale::template measure<BLOCK>(v);
      Stored::store(wire + scales + block * Scale::BYTES, scale);
      const Vec factor(Scale::reciprocal(scale));
      Byte* to = wire + block * CODES;
      alignas(64) Byte unpacked[Grid::BITS == 8 ? 1 : BLOCK];
      Byte* codes = Grid::BITS == 8 ? to : unpacked;
      const auto code = [&](const float* at) { return Grid::encode(Vec::loadu(at) * factor); };
      if constexpr (TURNED) {
        for (int i = 0; i < BLOCK; i += W * W)
          put_turned_codes([&](int row) { return code(v + i + row * W); }, codes + i);
      } else {
        for (int i = 0; i < BLOCK; i += W) put_codes(code(v + i), codes + i);
      }
      if constexpr (Grid::BITS != 8) pack<BLOCK, Grid::BITS>(codes, to);
    }
    if (until == blocks) {
      std::memset(wire + blocks * CODES, 0, scales - blocks * CODES);
      const int64_t end = blocks * Scale::BYTES;
      std::memset(wire + scales + end, 0, aligned(end) - end);
    }
  }

  // The inverse; what lies behind the last block is zeros.
  static inline void decode(const Byte* wire, int64_t n, int64_t first, float limit, float* v) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, scales = aligned(blocks * CODES);
    const int64_t from = first / BLOCK, until = std::min(blocks, from + UNIT / BLOCK);
    float* to = v;
    for (int64_t block = from; block < until; ++block, to += BLOCK) {
      const float scale = Stored::load(wire + scales + block * Scale::BYTES);
      const Vec factor(scale / Transform::SUMS);
      const Byte* codes = wire + block * CODES;
      alignas(64) Byte unpacked[Grid::BITS == 8 ? 1 : BLOCK];
      if constexpr (Grid::BITS != 8) {
        unpack<BLOCK, Grid::BITS>(codes, unpacked);
        codes = unpacked;
      }
      if constexpr (TURNED && Grid::TABLE) {
        for (int i = 0; i < BLOCK; i += W * W)
          for (int row = 0; row < W; ++row)
            (Grid::template decode<W>(codes + i + row) * factor).store(to + i + row * W);
      } else {
        for (int i = 0; i < BLOCK; i += W) (Grid::decode(codes + i) * factor).store(to + i);
      }
    }
    cut<UNIT>(v, to - v);
    Transform::template inverse<TURNED && Grid::TABLE>(v);
    for (int i = 0; i < UNIT; i += W)
      at::vec::clamp(Vec::loadu(v + i), Vec(-limit), Vec(limit)).store(v + i);
  }
};
"""


def why_not(codec: BlockCodec) -> str:
    """Why there is no C++ for a block codec; "" where there is."""
    if not isinstance(codec.layout, Flat):
        return f"there is no C++ for blocks laid out as {type(codec.layout).__name__}"
    if codec.block % 16 or codec.block > LONGEST:
        return f"blocks of {codec.block}: C++ has multiples of 16 up to {LONGEST}"
    if codec.offset is not None:
        return "there is no C++ for offsets"
    if not isinstance(codec.rounding, Nearest):
        return "there is no C++ for rounding at random"
    if isinstance(codec.transform, Hadamard) and codec.transform.pivot:
        return "there is no C++ for a pivot swap"
    return str(grids.why_not(codec.grid) or scales.why_not(codec.scale))


def text(codec: BlockCodec, name: str) -> str:
    """The C++ type ``name`` of a block codec."""
    grid, transform = f"{name}Grid", f"{name}Transform"
    stored = scales.STORED[codec.scale.stored]
    parts = [
        grids.grid(codec.grid, grid),
        rotation.transform(codec.transform, transform),
        f"using {name}Scale = {scales.scale(codec.scale, grid)};",
        f"using {name} = Blocks<{codec.block}, {grid}, {name}Scale, {stored}, {transform}>;\n",
    ]
    return "\n".join(parts)
