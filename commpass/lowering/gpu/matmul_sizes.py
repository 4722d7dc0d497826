"""Sizes of the matmul that encodes its own result (``matmul_encode``): problems and tile
configurations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import Fp8Grid, IntGrid, LevelGrid, TableGrid
from commpass.codecs.block.noise import Nearest, Stochastic
from commpass.codecs.block.scales import Absmax, LeastSquares, Static
from commpass.codecs.block.transforms import NoTransform
from commpass.lowering.matmul import BATCHED, GROUPED, SINGLE
from commpass.lowering.pointwise import VALUE, Epilogue

WIDEST = 256
"""The most columns of a tile: with 128 rows, each of 256 threads holds 128 results."""
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory available to one program."""
PART = (8, 16, 32)
"""The values of a thread in a part of a tile that is encoded during the next one: the fewest for
which a tile has enough steps."""
LIGHT = ("relu", "cast")
"""The operations of an epilogue that need no registers in addition."""


@dataclass(frozen=True)
class Matmul:
    """A matmul, and the operations on its result before it is encoded.

    ``dtype`` is that of ``a [m, k]`` and ``b [k, n]``, to which the result is rounded. Operands are
    stored by rows (the last dimension is contiguous) or by columns: the weight of ``F.linear``,
    viewed as ``[k, n]``, is stored by columns. ``bias`` is the dtype of ``[n]`` values that are
    added before the result is rounded, and the ``epilogue`` is applied after it. The ``form`` is
    one of ``lowering.matmul``.
    """

    dtype: torch.dtype
    a_by_rows: bool = True
    b_by_rows: bool = True
    bias: torch.dtype | None = None
    epilogue: Epilogue = field(default_factory=Epilogue)
    form: str = SINGLE


@dataclass(frozen=True)
class Configuration:
    """How the work is divided.

    - ``flatten`` fuses the loops over tiles and along k, so that the next tile's operands are
      loaded during this one's epilogue.
    - ``descriptors`` loads through tensor descriptors that the kernel creates (TMA, from sm_90 on),
      else through pointers.
    - ``group`` tiles of rows share their tiles of columns.
    - ``cuts`` is the number of parts in which a tile is encoded at its end, one after another.
    - ``deferred`` is the number of rows of a tile that are encoded in each step along k of the next
      tile; with 0 a tile is encoded at its end. It needs ``descriptors``.
    - ``programs`` is the number of programs that run on a processor at once.
    """

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
    deferred: int = 0


@dataclass(frozen=True)
class Problem:
    """The sizes: ``a [m, k] @ b [k, n]``, for ``ranks`` ranks. ``m`` counts the rows of all
    ``batches`` batches or groups, of which each has a matrix ``b``."""

    m: int
    n: int
    k: int
    ranks: int
    batches: int = 1

    @property
    def rows(self) -> int:
        """Rows of a shard."""
        return self.m // self.ranks

    @property
    def height(self) -> int:
        """Rows of a batch."""
        return self.m // self.batches

    def segment(self, form: str) -> int:
        """Return the rows that are divided into tiles: those of a shard. Those of batches are the
        largest equal parts that lie in one shard and in one batch."""
        return math.gcd(self.rows, self.height) if form == BATCHED else self.rows

    def free_steps(self, by: Configuration) -> int:
        """Return the steps of a tile in which a part of the tile before can be encoded: all but the
        first two (``matmul_deferred``)."""
        return max(-(-self.k // by.block_k) - 2, 0)

    def tiles(self, by: Configuration, form: str = SINGLE) -> int:
        """Return the number of tiles. Groups may begin at any row: a tile of rows that contains
        rows of several groups is computed once for each of them. So there is one more for each
        group, and for the rows behind the last group."""
        segment = self.segment(form)
        down = self.m // segment * -(-segment // by.block_m)
        return (down + (self.batches if form == GROUPED else 0)) * -(-self.n // by.block_n)


# --- configurations -------------------------------------------------------------------------------


def configurations(
    codec: BlockCodec,
    problem: Problem,
    arch: str,
    matmul: Matmul | None = None,
    *,
    aligned: bool = True,
) -> list[Configuration]:
    """Return the configurations worth measuring, the static choice first. ``matmul`` and
    ``aligned`` are as in ``configuration``."""
    chosen = configuration(codec, problem, arch, matmul, aligned=aligned)
    load = _load(codec, arch, matmul)
    others = []
    for block_m, block_n in ((128, 256), (128, 128), (64, 256)):
        for stages in (2,) if arch == "gfx942" else (3, 4):
            by = replace(chosen, block_m=block_m, block_n=block_n, num_stages=stages)
            if block_n % codec.block:
                continue
            if chosen.deferred:
                deferred = _deferred(by, problem, codec, arch, matmul)
                others += [deferred] if deferred.deferred else []
            if block_m <= _most_rows(codec, load, arch):
                others.append(_complete(by, codec, arch, matmul))
    fits = (by for by in others if shared_bytes(by, codec, arch, matmul) <= SHARED[arch])
    return list(dict.fromkeys([chosen, *fits]))


def configuration(
    codec: BlockCodec,
    problem: Problem,
    arch: str,
    matmul: Matmul | None = None,
    *,
    aligned: bool = True,
) -> Configuration:
    """Choose a good configuration by architecture and sizes, without a measurement. ``matmul`` is
    a single product without an epilogue by default. Descriptors can load operands that are
    ``aligned``."""
    form, load = matmul.form if matmul else SINGLE, _load(codec, arch, matmul)
    rows = problem.height if form == GROUPED else problem.segment(form)
    narrow = problem.n % WIDEST and problem.n % 128 == 0 and 128 % codec.block == 0
    by = Configuration(
        64 if rows <= 64 else 128,
        128 if narrow else WIDEST,
        {"sm_80": 32}.get(arch, 64),
        num_warps=8,
        num_stages={"sm_80": 4, "gfx942": 2}.get(arch, 3),
        descriptors=aligned and arch in ("sm_90", "sm_100"),
        flatten=_flattens(codec, arch),
    )
    if by.descriptors and form != GROUPED:  # a group may be empty: its tiles have no steps
        deferred = _deferred(by, problem, codec, arch, matmul)
        if deferred.deferred:
            return deferred
    by = replace(by, block_m=min(by.block_m, _most_rows(codec, load, arch)))
    return _complete(by, codec, arch, matmul)


def _deferred(
    by: Configuration, problem: Problem, codec: BlockCodec, arch: str, matmul: Matmul | None
) -> Configuration:
    """Return the configuration with tiles that are encoded in parts, each in one step of the next
    tile. There are none if a tile has too few steps (``deferred`` is 0)."""
    biased = matmul is not None and matmul.bias is not None
    few = by.block_m * by.block_n <= 128 * 128 and not (biased or _load(codec, arch, matmul))
    # With Triton 3.9 a search of 32 levels spills beside 128 results a thread.
    many = arch == "sm_90" and _is_large(codec)
    if arch == "sm_90" or isinstance(codec.rounding, Stochastic):
        many |= _has_large_bias(codec, arch, matmul)
    rows = min(by.block_m, 64) if many else by.block_m
    made = replace(by, block_m=rows, num_warps=4 if few else 8, cuts=1)
    steps, most = problem.free_steps(by), _most_in_part(codec, arch, matmul)
    sizes = [made.num_warps * 32 * each // by.block_n for each in PART if each <= most]
    # With too few steps, a tile has as few rows as one that is encoded at its end.
    fewer = min(rows, _most_rows(codec, _load(codec, arch, matmul), arch))
    found = ((m, n) for m in (rows, fewer) for n in sizes if n * steps >= m)
    block_m, deferred = next(found, (rows, 0))
    made = replace(made, block_m=block_m, deferred=deferred)
    return replace(made, programs=_programs(made, codec, arch, matmul))


def _most_in_part(codec: BlockCodec, arch: str, matmul: Matmul | None) -> int:
    """Return the most values of a thread in a part for which the registers have room (tests compile
    them: none spills). On sm_90 these also hold the results; on sm_100 another memory does."""
    many = isinstance(codec.grid, TableGrid) or codec.offset is not None
    if arch == "sm_90" and _load(codec, arch, matmul).operand_bytes:
        return 0 if many else 8
    if arch == "sm_90" and matmul and not matmul.a_by_rows:
        return 8
    if arch == "sm_100" and codec.offset is not None:
        return 8
    biased = arch == "sm_90" and matmul is not None and matmul.bias is not None
    return 16 if many or biased else 32


def _has_large_bias(codec: BlockCodec, arch: str, matmul: Matmul | None) -> bool:
    """Whether the entries of a bias spill beside 128 results a thread, whose parts are encoded
    later: if they have 32 bits or a place for each batch, or if the codec or the operands also need
    many registers."""
    if matmul is None or matmul.bias is None:
        return False
    light = matmul.form == SINGLE and matmul.bias.itemsize == 2 and matmul.a_by_rows
    return _is_heavy(codec, arch) or not light


@dataclass(frozen=True)
class _Load:
    """What needs many registers in addition to values and codes: the codec or the epilogue.

    ``operand_bytes`` are those of an entry of the widest tensor that the epilogue reads, as large
    as the result; 0 if there is none.
    """

    codec: bool
    epilogue: bool
    operand_bytes: int

    def __bool__(self) -> bool:
        return self.codec or self.epilogue


def _load(codec: BlockCodec, arch: str, matmul: Matmul | None) -> _Load:
    operations = matmul.epilogue.operations if matmul else ()
    operands = matmul.epilogue.operands if matmul else ()
    return _Load(
        _is_heavy(codec, arch),
        any(each.name not in LIGHT for each in operations),
        max((each.dtype.itemsize for each in operands if each.per == VALUE), default=0),
    )


def _complete(
    by: Configuration, codec: BlockCodec, arch: str, matmul: Matmul | None
) -> Configuration:
    """Return the configuration with suitable warps, cuts and programs for its tile, encoded at its
    end."""
    results, load = by.block_m * by.block_n, _load(codec, arch, matmul)
    few = results <= 128 * 128 and not load
    searched = _searches_in_few_warps(codec, load, arch, matmul)
    num_warps = 4 if few or searched else 8
    cuts = _cuts(codec, load, arch, results)
    made = replace(by, num_warps=num_warps, cuts=cuts, deferred=0)
    return replace(made, programs=_programs(made, codec, arch, matmul))


def _programs(by: Configuration, codec: BlockCodec, arch: str, matmul: Matmul | None) -> int:
    """Return the programs that a processor runs at once."""
    fit = 2 * shared_bytes(by, codec, arch, matmul) <= SHARED[arch]
    return 2 if by.num_warps == 4 and arch != "gfx942" and fit else 1


def _cuts(codec: BlockCodec, load: _Load, arch: str, results: int) -> int:
    """Return the parts in which a tile of ``results`` results is encoded (tests compile them).

    On sm_80 and sm_90 the registers hold the results. On sm_80 they also hold addresses of shared
    memory across all tiles, and of groups two parts spill. On sm_90 the assembler begins the second
    part of a tile while the first is still encoded. A table's comparisons, and the signs that both
    parts use, then spill beside 128 results a thread; a whole tile does not.
    """
    if load.codec and arch in ("sm_80", "sm_90") and results >= 64 * 256:
        if arch == "sm_80":
            return 4
        searches = isinstance(codec.grid, TableGrid) and not load.epilogue
        return 1 if searches and results > 64 * 256 else 2
    whole = arch == "sm_100" and load.operand_bytes  # parts spill there
    return 2 if load.epilogue and not whole else 1


def _searches_in_few_warps(
    codec: BlockCodec, load: _Load, arch: str, matmul: Matmul | None
) -> bool:
    """Whether four warps encode a tile, not eight, since they search eight levels or more.

    On sm_100 the assembler gives 128 registers to each thread of eight warps if it must spill only
    a little for it, so that two programs might fit. The shared memory has room for one. The threads
    of four warps need more, and have 255. Loops over groups have fewer instructions, and fit.
    """
    flattened = (matmul is None or matmul.form != GROUPED) and _flattens(codec, arch)
    many = isinstance(codec.grid, TableGrid) and codec.grid.bits >= 4
    return arch == "sm_100" and flattened and many and not load.epilogue


def _flattens(codec: BlockCodec, arch: str) -> bool:
    """Whether the loops over tiles and along k are one.

    On sm_100 they are not for large tables. Such an encode has so many instructions that a tile
    takes less time without the next one beside it (predicted), and eight warps then have registers
    enough.
    """
    return arch != "gfx942" and not (arch == "sm_100" and _is_large(codec))


def _is_large(codec: BlockCodec) -> bool:
    """Whether a table has 32 levels of each sign, or is searched for a scale of least squares."""
    table = isinstance(codec.grid, TableGrid)
    return table and (codec.grid.bits > 5 or isinstance(codec.scale, LeastSquares))


def _most_rows(codec: BlockCodec, load: _Load, arch: str) -> int:
    """Return the most rows of a tile of 256 columns for which the threads of eight warps have
    enough registers.

    128 rows leave 128 results to each thread, and room for little more (tests compile them: none
    spills).
    """
    if arch == "gfx942":
        narrow = codec.grid.bits < 8
        if codec.transform.sums > 1 or (narrow and load.epilogue):
            return 32
        return 64 if narrow or load.epilogue else 128
    if arch == "sm_90":
        # Least squares hold values and codes until the levels of a table are found again.
        again = isinstance(codec.scale, LeastSquares) and isinstance(codec.grid, TableGrid)
        many = again or isinstance(codec.rounding, Stochastic) or load.operand_bytes
        return 64 if many else 128
    return 64 if load else 128


def shared_bytes(
    by: Configuration, codec: BlockCodec, arch: str, matmul: Matmul | None = None
) -> int:
    """Return the most bytes of shared memory that a program needs.

    They hold the operands of all stages, and values that are converted between the tensor cores'
    layout and that of memory. The latter are codes, or integers if a block spans several warps and
    its values are rotated or packed there. They may also be what an epilogue reads, or its results.
    If parts are encoded later, they are results of 16 bits, of wide tiles on sm_90 half at a time.
    """
    load = _load(codec, arch, matmul)
    stage = (by.block_m + by.block_n) * by.block_k * 2  # operands have 16 bits
    if by.deferred:
        whole = arch == "sm_100" or (by.block_n < WIDEST and by.num_warps == 8)
        return by.num_stages * stage + by.block_m * by.block_n * (1 + whole) + 1024
    spread = codec.transform.sums > 1 or (arch == "gfx942" and codec.grid.bits < 8)
    results = 2 if load.epilogue and codec.grid.bits < 8 else 1
    one_warp = arch == "sm_90" and by.block_m == 128  # whole rows, 16 for each
    width = 4 if spread and not one_warp else max(results, load.operand_bytes)
    moved = by.block_m * by.block_n // by.cuts * width
    if arch == "gfx942":  # one stage is in registers, and the rest is free in the epilogue
        return max((by.num_stages - 1) * stage, moved)
    stages = by.num_stages if by.descriptors else by.num_stages - (arch == "sm_80")
    return stages * stage + moved + 1024


def _is_heavy(codec: BlockCodec, arch: str) -> bool:
    """Whether encoding needs many registers in addition to values and codes."""
    plain = isinstance(codec.scale, (Absmax, Static)) and not codec.offset
    emulated = isinstance(codec.grid, Fp8Grid) and arch in ("sm_80", "gfx942")
    simple = isinstance(codec.grid, (IntGrid, LevelGrid, Fp8Grid)) and not emulated
    return not (
        plain
        and simple
        and isinstance(codec.rounding, Nearest)
        and isinstance(codec.transform, NoTransform)
    )
