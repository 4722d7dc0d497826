"""Sizes of the matmul that encodes its own result (``matmul_encode``): what is multiplied, and by
what tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import Fp8Grid, IntGrid, LevelGrid
from commpass.codecs.block.noise import Nearest, Stochastic
from commpass.codecs.block.scales import Absmax, Static
from commpass.codecs.block.transforms import NoTransform

WIDEST = 256
"""Columns of a tile, at most: a thread of 256 holds 128 results of 128 rows then."""
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory that one program may have."""


@dataclass(frozen=True)
class Matmul:
    """What is multiplied, and what is done with the result before it is encoded.

    ``operands`` is the dtype of ``a [m, k]`` and ``b [k, n]``, ``made`` the one that the result is
    rounded to. Operands lie by rows (the last dimension is contiguous) or else by columns: the
    weight of ``F.linear``, seen as ``[k, n]``, lies by columns. ``bias`` is the dtype of ``[n]``
    values that are added before the result is rounded; an activation is rounded once more.
    8-bit operands each have a scale, one float32 number in memory; ``fast`` adds their products
    up in the tensor cores' own registers all the way, which keeps fewer bits on sm_90 (see
    ``use_fast_accum`` of ``torch._scaled_mm``).
    """

    operands: torch.dtype
    made: torch.dtype
    a_by_rows: bool = True
    b_by_rows: bool = True
    bias: torch.dtype | None = None
    activation: str = ""
    fast: bool = False

    @property
    def scaled(self) -> bool:
        return self.operands.itemsize == 1


@dataclass(frozen=True)
class Configuration:
    """How the work is cut. ``flatten`` makes one loop of tiles and steps along k, so that the next
    tile's operands are loaded during this one's epilogue; ``descriptors`` loads through tensor
    descriptors that the kernel makes itself (TMA, from sm_90 on), else through pointers. ``group``
    tiles of rows share their tiles of columns. A tile is encoded in so many ``cuts``, one after the
    other. ``programs`` is how many run on a processor at
    once."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    flatten: bool = True
    group: int = 8
    cuts: int = 1
    programs: int = 1


@dataclass(frozen=True)
class Problem:
    """The sizes: ``a [m, k] @ b [k, n]``, for so many ranks, in so many chunks."""

    m: int
    n: int
    k: int
    ranks: int
    chunks: int = 1

    @property
    def segments(self) -> int:
        return self.ranks * self.chunks

    @property
    def rows(self) -> int:
        """Of a segment."""
        return self.m // self.segments

    def tiles(self, by: Configuration) -> int:
        """Tiles of one segment."""
        return -(-self.rows // by.block_m) * -(-self.n // by.block_n)


# --- configurations -------------------------------------------------------------------------------


def configurations(
    coder: BlockCodec, matmul: Matmul, problem: Problem, arch: str
) -> list[Configuration]:
    """Those worth a try, the static choice first."""
    chosen, most = configuration(coder, matmul, problem, arch), _most_rows(coder, matmul, arch)
    others = [
        _completed(
            replace(chosen, block_m=block_m, block_n=block_n, num_stages=stages),
            *(coder, matmul, arch),
        )
        for block_m, block_n in ((128, 256), (128, 128), (64, 256))
        for stages in ((2,) if arch == "gfx942" else (3, 4))
        if block_n % coder.block == 0 and block_m <= most
    ]
    fits = (by for by in others if shared_bytes(by, coder, matmul, arch) <= SHARED[arch])
    return list(dict.fromkeys([chosen, *fits]))


def configuration(coder: BlockCodec, matmul: Matmul, problem: Problem, arch: str) -> Configuration:
    """A good one by arch and sizes, without a measurement."""
    narrow = problem.n % WIDEST and problem.n % 128 == 0 and 128 % coder.block == 0
    by = Configuration(
        min(64 if problem.rows <= 64 else 128, _most_rows(coder, matmul, arch)),
        128 if narrow else WIDEST,
        128 if matmul.scaled else {"sm_80": 32}.get(arch, 64),
        num_warps=8,
        num_stages={"sm_80": 4, "gfx942": 2}.get(arch, 3),
        descriptors=arch in ("sm_90", "sm_100"),
        flatten=arch != "gfx942",
    )
    return _completed(by, coder, matmul, arch)


def _completed(by: Configuration, coder: BlockCodec, matmul: Matmul, arch: str) -> Configuration:
    """With warps, cuts and programs that suit the tile."""
    results, heavy = by.block_m * by.block_n, _heavy(coder, arch)
    num_warps = 8 if results > 128 * 128 or heavy or _twice(matmul, arch) else 4
    halves = heavy and arch in ("sm_80", "sm_90") and results >= 64 * 256
    programs = 2 if num_warps == 4 and arch != "gfx942" else 1
    return replace(by, num_warps=num_warps, cuts=2 if halves else 1, programs=programs)


def _most_rows(coder: BlockCodec, matmul: Matmul, arch: str) -> int:
    """Rows of a tile of 256 columns for which threads of eight warps have enough registers. 128
    leave each 128 results, and room for little more (tests compile them: none spills)."""
    if arch == "gfx942":
        if coder.transform.sums > 1:
            return 32
        return 64 if coder.grid.bits < 8 else 128
    if arch == "sm_90":
        return 64 if _twice(matmul, arch) or isinstance(coder.rounding, Stochastic) else 128
    return 64 if _heavy(coder, arch) else 128


def _twice(matmul: Matmul, arch: str) -> bool:
    """Whether there are sums in the tensor cores' registers, and others to which they are added."""
    return matmul.scaled and not matmul.fast and arch == "sm_90"


def shared_bytes(by: Configuration, coder: BlockCodec, matmul: Matmul, arch: str) -> int:
    """Bytes of shared memory that a program needs at most: operands of all stages, and what is on
    its way from the tensor cores' order to that of memory: codes, or whole numbers where a block
    lies in several warps and its values are rotated or packed there."""
    stage = (by.block_m + by.block_n) * by.block_k * matmul.operands.itemsize
    spread = coder.transform.sums > 1 or (arch == "gfx942" and coder.grid.bits < 8)
    moved = by.block_m * by.block_n // by.cuts * (4 if spread and arch != "sm_90" else 1)
    if arch == "gfx942":  # one stage is in registers, and the rest is free in the epilogue
        return max((by.num_stages - 1) * stage, moved)
    stages = by.num_stages if by.descriptors else by.num_stages - (arch == "sm_80")
    return stages * stage + moved + 1024


def _heavy(coder: BlockCodec, arch: str) -> bool:
    """Whether an encode needs many registers besides those of its values and codes."""
    plain = isinstance(coder.scale, (Absmax, Static)) and not coder.offset
    emulated = isinstance(coder.grid, Fp8Grid) and arch in ("sm_80", "gfx942")
    simple = isinstance(coder.grid, (IntGrid, LevelGrid, Fp8Grid)) and not emulated
    return not (
        plain
        and simple
        and isinstance(coder.rounding, Nearest)
        and isinstance(coder.transform, NoTransform)
    )
