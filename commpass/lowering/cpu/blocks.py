"""Block codecs in C++."""

from __future__ import annotations

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import LevelGrid
from commpass.codecs.block.layouts import Flat, Pairs
from commpass.codecs.block.noise import Nearest
from commpass.codecs.block.scales import Static, row_numbers
from commpass.codecs.block.transforms import NoTransform
from commpass.lowering.cpu import grids, rotation, scales

LONGEST = 4096
"""The most values of a block: as float32 they fill half of a level-1 cache."""

BLOCKS = """
// A row of n values as blocks: all codes, then all offsets, the numbers of all scales one after the
// other, the number of the row, and all places of pivots. With PAIRS, neighbours share a byte.
template <int BLOCK, class Grid, class Scale, class Stored, class Transform, class Offset,
          bool PAIRS>
struct Blocks {
  static constexpr int CODES = BLOCK * Grid::BITS / 8;
  static constexpr int NUMBERS = Scale::NUMBERS;
  static constexpr bool ROTATED = Transform::SUMS > 1;

  // Where the regions of a row begin, and the last one ends.
  struct Regions {
    int64_t offsets, scales, each, row, places, end;
    explicit Regions(int64_t blocks)
        : offsets(aligned(blocks * CODES)),
          scales(offsets + aligned(blocks * Offset::BYTES)),
          each(aligned(blocks * Scale::BYTES)),
          row(scales + NUMBERS * each),
          places(row + aligned(Scale::TWO_LEVELS ? 4 : 0)),
          end(places + aligned(Transform::PIVOT ? blocks : 0)) {}
    int64_t scale(int number, int64_t block) const {
      return scales + number * each + block * Scale::BYTES;
    }
  };

  // Calls `work(n, packed, codes)` for the packed and the unpacked codes of blocks: of all at once
  // if there are UNIT values of pairs. Codes are packed behind the loop that makes them, and
  // unpacked before the one that reads them: reading bytes right after they were written in other
  // widths stops a processor.
  template <class At, class Work>
  static inline void for_blocks(int64_t blocks, At packed, Byte* codes, const Work& work) {
    if (PAIRS && blocks == UNIT / BLOCK)
      return work(std::integral_constant<int, UNIT>{}, packed, codes);
    for (int64_t block = 0; block < blocks; ++block)
      work(std::integral_constant<int, BLOCK>{}, packed + block * CODES, codes + block * BLOCK);
  }

  // Zeros from the end of the blocks of a region to where the next one begins.
  static inline void fill(Byte* wire, int64_t from, int64_t until) {
    std::memset(wire + from, 0, until - from);
  }

  // Encodes UNIT values at a time, to their places in the wire. Codes of rotated values are made
  // when those of the next ones have been measured: a processor then does both at once.
  class Encoder {
    struct Unit {
      alignas(64) float rotated[ROTATED ? UNIT : 1];
      std::array<std::array<float, NUMBERS>, UNIT / BLOCK> by;
      Byte* codes = nullptr;
      int64_t blocks;
    };
    Unit units[2];
    int turn = 0;

    // The codes of values, whose scales are known.
    static inline void code(const Unit& unit, const float* v) {
      alignas(64) Byte unpacked[Grid::BITS == 8 ? 1 : UNIT];
      for (int64_t block = 0; block < unit.blocks; ++block, v += BLOCK) {
        typename Scale::Factors by;
        for (int i = 0; i < NUMBERS; ++i) by[i] = Vec(unit.by[block][i]);
        Byte* codes = Grid::BITS == 8 ? unit.codes + block * CODES : unpacked + block * BLOCK;
        const auto number = [&](int i) { return Scale::divide(Vec::loadu(v + i), by); };
        if constexpr (BLOCK % (4 * W) == 0 && (Grid::CUTS || (Grid::SIGNED && Scale::IN_RANGE))) {
          for (int i = 0; i < BLOCK; i += 4 * W)
            to_bytes_around<1 << (Grid::BITS - 1)>(
                [&](int j) { return Grid::signed_code(number(i + j * W)); }, codes + i);
        } else if constexpr (BLOCK % (4 * W) == 0) {
          for (int i = 0; i < BLOCK; i += 4 * W)
            to_bytes_of_four([&](int j) { return Grid::encode(number(i + j * W)); }, codes + i);
        } else {
          for (int i = 0; i < BLOCK; i += W) to_bytes(Grid::encode(number(i)), codes + i);
        }
      }
      if constexpr (Grid::BITS != 8) {
        for_blocks(unit.blocks, unit.codes, unpacked, [](auto n, Byte* packed, Byte* codes) {
          if constexpr (PAIRS) pack_pairs<n>(codes, packed);
          else pack<n, Grid::BITS>(codes, packed);
        });
      }
    }

   public:
    // UNIT values, of which the first is number `first` of its row. In two levels, `row` is the
    // scale of the row.
    inline void encode(float* v, Byte* wire, int64_t n, int64_t first, float row = 0.0f) {
      const int64_t blocks = (n + BLOCK - 1) / BLOCK;
      const Regions at(blocks);
      const int64_t from = first / BLOCK, until = std::min(blocks, from + UNIT / BLOCK);
      Unit& unit = units[turn];
      unit.codes = wire + from * CODES;
      unit.blocks = until - from;
      if constexpr (Transform::PIVOT) {
        for (int64_t block = from; block < until; ++block) {
          float* own = v + (block - from) * BLOCK;
          const int place = pivot_of<BLOCK>(own);
          std::swap(own[0], own[place]);
          wire[at.places + block] = static_cast<Byte>(place);
        }
      }
      float* values = v;
      if constexpr (ROTATED) {
        values = unit.rotated;
        Transform::template forward<UNIT>(v, values);
      }
      for (int64_t block = from; block < until; ++block) {
        float* const own = values + (block - from) * BLOCK;
        const float offset = Offset::template subtract<BLOCK>(own);
        Offset::store(wire + at.offsets + block * Offset::BYTES, offset);
        const auto scale = [&] {
          if constexpr (Scale::TWO_LEVELS) return Scale::template measure<BLOCK>(own, row);
          else return Scale::template measure<BLOCK>(own);
        }();
        for (int i = 0; i < NUMBERS; ++i) Stored::store(wire + at.scale(i, block), scale[i]);
        if constexpr (Scale::TWO_LEVELS) unit.by[block - from] = Scale::reciprocals(scale, row);
        else unit.by[block - from] = Scale::reciprocals(scale);
      }
      if constexpr (ROTATED) {
        turn ^= 1;
        if (units[turn].codes) code(units[turn], units[turn].rotated);
      } else {
        code(unit, v);
      }
      if (until == blocks) {
        fill(wire, blocks * CODES, at.offsets);
        fill(wire, at.offsets + blocks * Offset::BYTES, at.scales);
        for (int i = 0; i < NUMBERS; ++i) fill(wire, at.scale(i, blocks), at.scale(i + 1, 0));
        if constexpr (Scale::TWO_LEVELS) {
          put<float>(wire + at.row, row);
          fill(wire, at.row + 4, at.places);
        }
        if constexpr (Transform::PIVOT) fill(wire, at.places + blocks, at.end);
      }
    }

    // The codes of the last values.
    inline void finish() {
      turn ^= 1;
      if (ROTATED && units[turn].codes) code(units[turn], units[turn].rotated);
    }
  };

  // The inverse; what lies behind the last block is zeros.
  static inline void decode(const Byte* wire, int64_t n, int64_t first, float limit, float* v) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    const Regions at(blocks);
    const int64_t from = first / BLOCK, until = std::min(blocks, from + UNIT / BLOCK);
    float* to = v;
    const Vec most(limit), least(-limit);
    alignas(64) Byte unpacked[Grid::BITS == 8 ? 1 : UNIT];
    if constexpr (Grid::BITS != 8) {
      const Byte* const packed = wire + from * CODES;
      for_blocks(until - from, packed, unpacked, [](auto n, const Byte* packed, Byte* codes) {
        if constexpr (PAIRS) unpack_pairs<n>(packed, codes);
        else unpack<n, Grid::BITS>(packed, codes);
      });
    }
    for (int64_t block = from; block < until; ++block, to += BLOCK) {
      typename Scale::Factors by;
      for (int i = 0; i < NUMBERS; ++i) {
        float number = Stored::load(wire + at.scale(i, block));
        if constexpr (Scale::TWO_LEVELS) number *= get<float>(wire + at.row);
        by[i] = Vec(i == 0 ? number / Transform::SUMS : number);
      }
      const Vec offset(Offset::load(wire + at.offsets + block * Offset::BYTES) / Transform::SUMS);
      const Byte* codes =
          Grid::BITS == 8 ? wire + block * CODES : unpacked + (block - from) * BLOCK;
      const auto put = [&](int i, Vec x) {
        x = Scale::multiply(x, by);
        if constexpr (Offset::BYTES > 0) x = x + offset;
        if constexpr (!ROTATED) x = at::vec::clamp(x, least, most);
        x.store(to + i);
      };
      if constexpr (BLOCK % (4 * W) == 0 && Grid::FOUR_AT_ONCE) {
        for (int i = 0; i < BLOCK; i += 4 * W)
          Grid::decode_four(codes + i, [&](int j, Vec x) { put(i + j * W, x); });
      } else {
        for (int i = 0; i < BLOCK; i += W) put(i, Grid::decode(codes + i));
      }
      if constexpr (ROTATED) Transform::template inverse<BLOCK>(to, limit);
    }
    cut<UNIT>(v, to - v);
    if constexpr (Transform::PIVOT) {
      for (int64_t block = from; block < until; ++block) {
        float* own = v + (block - from) * BLOCK;
        std::swap(own[0], own[std::min<int>(wire[at.places + block], BLOCK - 1)]);
      }
    }
  }
};
"""


def unsupported_reason(codec: BlockCodec) -> str:
    """Return why there is no C++ for a block codec, or "" if there is."""
    if not isinstance(codec.layout, (Flat, Pairs)):
        return f"there is no C++ for blocks laid out as {type(codec.layout).__name__}"
    if codec.block % 16 or codec.block > LONGEST:
        return f"blocks of {codec.block} values: C++ supports multiples of 16 up to {LONGEST}"
    if codec.offset is not None and not isinstance(codec.grid, LevelGrid):
        return "C++ supports an offset only on a level grid"
    if not isinstance(codec.rounding, Nearest):
        return "there is no C++ for stochastic rounding"
    if isinstance(codec.scale, Static) and not isinstance(codec.transform, NoTransform):
        return "there is no C++ for a transform with a static scale"
    changed = codec.offset is not None or not isinstance(codec.transform, NoTransform)
    if row_numbers(codec.scale) and changed:  # the peak of a row is measured before both
        return "there is no C++ for a transform or an offset with a scale of the row"
    return str(
        grids.unsupported_reason(codec.grid)
        or scales.unsupported_reason(codec.scale)
        or rotation.unsupported_reason(codec.transform)
    )


def text(codec: BlockCodec, name: str) -> str:
    """Return the C++ type ``name`` of a block codec."""
    grid, transform = f"{name}Grid", f"{name}Transform"
    stored = scales.STORED[codec.scale.stored]
    pairs = "true" if isinstance(codec.layout, Pairs) else "false"
    parts = [
        grids.grid(codec.grid, grid),
        rotation.transform(codec.transform, transform),
        f"using {name}Scale = {scales.scale(codec.scale, grid)};",
        f"using {name} = Blocks<{codec.block}, {grid}, {name}Scale, {stored}, {transform},"
        f" {scales.offset(codec.offset)}, {pairs}>;\n",
    ]
    return "\n".join(parts)
