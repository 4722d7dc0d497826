"""Layouts: how the values of a row are grouped into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from commpass.codecs.rows import larger, pad


@dataclass(frozen=True)
class Flat:
    """Blocks of consecutive values; zeros fill the last block."""

    block: int

    @property
    def unit(self) -> int:
        """A row cut at a multiple of this many values is cut between blocks."""
        return self.block

    def size(self, numel: int) -> int:
        """Values per block for a row of ``numel``."""
        return self.block

    def blocks(self, numel: int) -> int:
        return (numel + self.block - 1) // self.block

    def split(self, rows: Tensor) -> Tensor:
        """Reshape ``[rows, n]`` to ``[rows, blocks, block]``."""
        blocks = self.blocks(rows.shape[1])
        return pad(rows, blocks * self.block).reshape(rows.shape[0], blocks, self.block)

    def padded_numel(self, numel: int) -> int:
        """Values in all blocks of a row of ``numel``, padding of the last one included."""
        return self.blocks(numel) * self.block

    def join(self, blocks: Tensor, numel: int) -> Tensor:
        """The inverse of ``split``: ``[rows, padded_numel(numel)]``."""
        return blocks.flatten(1)


@dataclass(frozen=True)
class Pairs:
    """As ``Flat``, but a block holds its even places, then its odd places. A byte of packed 4-bit
    codes then holds two neighbours, the first one in the low bits: ``torch.float4_e2m1fn_x2``."""

    block: int

    @property
    def unit(self) -> int:
        return self.block

    def size(self, numel: int) -> int:
        return self.block

    def blocks(self, numel: int) -> int:
        return Flat(self.block).blocks(numel)

    def split(self, rows: Tensor) -> Tensor:
        blocks = Flat(self.block).split(rows)
        return blocks.unflatten(2, (self.block // 2, 2)).transpose(2, 3).flatten(2)

    def padded_numel(self, numel: int) -> int:
        return Flat(self.block).padded_numel(numel)

    def join(self, blocks: Tensor, numel: int) -> Tensor:
        return blocks.unflatten(2, (2, self.block // 2)).transpose(2, 3).flatten(1)


@dataclass(frozen=True)
class Tiles:
    """Blocks of ``height`` x ``across`` values of a row-major matrix with ``width`` columns."""

    height: int
    across: int
    width: int

    @property
    def unit(self) -> int:
        return self.height * self.width

    def size(self, numel: int) -> int:
        return self.height * self.across

    def _tiles(self, numel: int) -> tuple[int, int]:
        lines = (numel + self.width - 1) // self.width
        return (lines + self.height - 1) // self.height, (
            self.width + self.across - 1
        ) // self.across

    def blocks(self, numel: int) -> int:
        down, along = self._tiles(numel)
        return down * along

    def split(self, rows: Tensor) -> Tensor:
        down, along = self._tiles(rows.shape[1])
        matrix = pad(rows, down * self.height * self.width).reshape(
            rows.shape[0], down * self.height, self.width
        )
        tiles = F.pad(matrix, (0, along * self.across - self.width)).unflatten(
            2, (along, self.across)
        )
        return (
            tiles.unflatten(1, (down, self.height))
            .transpose(2, 3)
            .reshape(rows.shape[0], down * along, self.size(0))
        )

    def join(self, blocks: Tensor, numel: int) -> Tensor:
        down, along = self._tiles(numel)
        tiles = blocks.reshape(blocks.shape[0], down, along, self.height, self.across).transpose(
            2, 3
        )
        matrix = tiles.reshape(blocks.shape[0], down * self.height, along * self.across).narrow(
            2, 0, self.width
        )
        return matrix.flatten(1)

    def padded_numel(self, numel: int) -> int:
        return self._tiles(numel)[0] * self.height * self.width


LANES = 8 * 128
"""Values in a vector register of a TPU (EQuARX, section III.B)."""


@dataclass(frozen=True)
class Lanes:
    """Blocks that take one value from each of several consecutive chunks of 8 x 128 values of a
    row.

    The maximum of a block is found by comparing whole registers, without a reduction within a
    register (EQuARX, section III.B). With ``depth``, at most that many chunks share their blocks: a
    row is divided into the fewest groups of chunks that allow this, all of the same size.
    """

    depth: int = 0

    @property
    def unit(self) -> int:
        return LANES

    def _groups(self, numel: int) -> tuple[int, int]:
        """The number of groups and of chunks per group; no groups for an empty row."""
        chunks = (numel + LANES - 1) // LANES
        if not self.depth:
            return int(not (isinstance(numel, int) and numel == 0)), larger(chunks, 1)
        groups = (chunks + self.depth - 1) // self.depth
        some = larger(groups, 1)
        return groups, larger((chunks + some - 1) // some, 1)

    def size(self, numel: int) -> int:
        return self._groups(numel)[1]

    def blocks(self, numel: int) -> int:
        return self._groups(numel)[0] * LANES

    def split(self, rows: Tensor) -> Tensor:
        groups, depth = self._groups(rows.shape[1])
        chunks = pad(rows, groups * depth * LANES).reshape(rows.shape[0], groups, depth, LANES)
        return chunks.transpose(2, 3).reshape(rows.shape[0], groups * LANES, depth)

    def join(self, blocks: Tensor, numel: int) -> Tensor:
        groups, depth = self._groups(numel)
        chunks = blocks.reshape(blocks.shape[0], groups, LANES, depth).transpose(2, 3)
        return chunks.flatten(1)

    def padded_numel(self, numel: int) -> int:
        groups, depth = self._groups(numel)
        return groups * depth * LANES


Layout = Flat | Pairs | Tiles | Lanes
