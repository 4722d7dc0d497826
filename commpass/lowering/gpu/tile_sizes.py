"""The sizes of the tiles that a program of a kernel processes."""

from __future__ import annotations

from dataclasses import dataclass

from commpass.codecs.block.grids import MiniFloatGrid, TableGrid
from commpass.codecs.block.packing import widths
from commpass.codecs.block.scales import Dual, LeastSquares, Rms
from commpass.lowering.chain import Chain, Sum
from commpass.lowering.gpu.parts import Group
from commpass.lowering.gpu.supported import block_codec, codecs_of

TILE = 2048
"""The most values of a tile: 64 per thread of a warp."""
DECODED = 1024
"""Bytes of codes in a tile that is decoded, 32 for each thread."""
SUMMED = 512
"""Bytes of codes in a tile of a sum, 16 for each thread. With fewer values than ``TILE``, more
registers hold what was loaded, and more programs run at once."""
HELD = 8192
"""Bytes of codes that a warp loads before it decodes the first, in 64 registers per thread, of at
most ``RANKS`` rows. A sum waits for memory once for so many, and is a loop over groups of them."""
RANKS = 8
PROGRAMS = 512
"""The fewest programs of a sum, about four for each multiprocessor; rows of fewer have smaller
tiles, down to ``LEAST`` values, or 8 per thread of a warp."""
LEAST = 256
DECODED_PART = 16
"""How many threads at least hold a block that is rotated after it is decoded: each has read 16
bytes of codes."""
WARPS = 1
"""Warps of a program. A block is within one warp, so its peak is found without a barrier."""


@dataclass(frozen=True)
class Tile:
    """The tile of a program: a number of blocks, and the warps that share them."""

    blocks: int
    num_warps: int = WARPS

    @property
    def padded_blocks(self) -> int:
        """The next power of two: the last blocks of a norm's tile may be idle."""
        return 1 << (self.blocks - 1).bit_length()

    def group(self, lanes: int, part: int = 1) -> Group:
        """Return the form in which all blocks are side by side in one warp, so that as few threads
        as possible hold one, but at least ``part``."""
        blocks = min(self.padded_blocks, lanes // part)
        return Group(blocks, lanes // blocks)


def tiles(chain: Chain, numel: int, lanes: int) -> list[Tile]:
    """Return the tiles worth measuring for rows of ``numel`` values, the static choice first.

    All of them give the same bits. Where a sum over the values of a block or of a row depends on
    how a tile is divided among threads, there is only the static choice.
    """
    chosen = static_tile(chain, numel, lanes)
    if chain.width or _sums_values(chain):
        return [chosen]
    layout = block_codec(codecs_of(chain)[0]).layout
    size, most = layout.size(numel), layout.blocks(numel)
    blocks = chosen.blocks
    found = [chosen]
    if blocks > 1 and blocks * size >= 2 * LEAST:
        found.append(Tile(blocks // 2))
    if 2 * blocks * size <= TILE and not is_sum(chain):  # sums spilled up to 4 KB with mxfp4
        found.append(Tile(2 * blocks))
    found += [Tile(warps * blocks, warps) for warps in (2, 4)]
    return [each for each in found if each == chosen or each.blocks <= most]


def _sums_values(chain: Chain) -> bool:
    """Whether a chain encodes with a scale that is a sum over the values of a block."""
    sums = (Rms, Dual, LeastSquares)
    return chain.encodes is not None and isinstance(block_codec(chain.encodes.codec).scale, sums)


def static_tile(chain: Chain, numel: int, lanes: int) -> Tile:
    """Choose a good tile without a measurement."""
    size = block_codec(codecs_of(chain)[0]).layout.size(numel)
    if chain.width:  # a program has the blocks of one norm, and idle lanes up to a power of two
        tile = Tile(chain.width // size)
        return Tile(tile.blocks, max(WARPS, tile.padded_blocks * size // TILE))
    values = tile_values(chain, numel, lanes)
    if size <= values // 2 or not (_sums_values(chain) or is_sum(chain)):
        return Tile(max(1, values // size))
    return _tile_of_large_blocks(chain, size, values)


def _tile_of_large_blocks(chain: Chain, size: int, values: int) -> Tile:
    """Return the tile of a sum, or of an encode with a scale that is a sum, for blocks of ``size``
    values, if a tile of ``values`` has one at most.

    In one warp, sums over ranks of more than TILE values spilled up to 1,656 bytes, or if such an
    encode follows, of more than half as many. Encodes spilled up to 2,048 bytes. If an encode has a
    tile of one block, Triton (3.7) keeps copies of all values in shared memory: 264 stores of a
    thread instead of 16. So it has two blocks.
    """
    if is_sum(chain):
        return Tile(1, max(WARPS, size // (TILE // 2 if _sums_values(chain) else TILE)))
    return Tile(2, 2 * size // values)


def tile_values(chain: Chain, numel: int, lanes: int) -> int:
    """Return the values of a tile, as many per thread as were measured as the fastest on an H200.
    AMD GPUs have warps of 64 threads."""
    codec = block_codec(codecs_of(chain)[-1])
    times = lanes // 32
    if chain.encodes is not None and not is_sum(chain):
        many = isinstance(codec.grid, (TableGrid, MiniFloatGrid)) or codec.offset  # registers
        return min(TILE // 2 * times, TILE) if many else TILE
    if not is_sum(chain):
        return _power_below(DECODED * times * 8 // codec.grid.bits)
    tile = min(summed_values(chain) * times, TILE)
    while tile > LEAST and numel < PROGRAMS * tile:
        tile //= 2
    return tile


def _power_below(values: int) -> int:
    return min(1 << (values.bit_length() - 1), TILE)


def summed_values(chain: Chain) -> int:
    """Return the values of a tile of a long row of a sum, a power of two."""
    assert chain.decodes is not None
    codec = block_codec(chain.decodes.codec)
    return _power_below(SUMMED * 8 // codec.grid.bits // (2 if codec.offset else 1))


def is_sum(chain: Chain) -> bool:
    return any(isinstance(step, Sum) for step in chain.steps)


def ranks_of_group(chain: Chain, size: int) -> int:
    """Return how many rows of a sum, in blocks of ``size`` values, are loaded before the first is
    decoded."""
    if chain.decodes is None:
        return 1
    codec = block_codec(chain.decodes.codec)
    values = TILE if chain.width else max(summed_values(chain), size)
    parts_ = len(widths(codec.grid.bits))
    # These need more registers to decode: with eight ranks, up to 5,104 bytes were spilled.
    most = RANKS // 2 // parts_ if parts_ > 1 else RANKS
    if codec.offset:
        # With two ranks, the assembler for sm_80 spilled 8 bytes to fit more programs.
        most = 2 if chain.encodes is not None or chain.width else RANKS // 2 // parts_
    held = HELD // 2 if chain.width else HELD  # a norm holds its residual and weight, too
    return max(min(held * 8 // (values * codec.grid.bits), most, chain.ranks), 1)
