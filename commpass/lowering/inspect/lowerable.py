"""A compilable kernel with its arguments, and the results of compiling and predicting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commpass.lowering.gpu.source import Source, load, without_rare
from commpass.lowering.inspect.architectures import ARCHITECTURES, CARDS, cards_of
from commpass.lowering.inspect.compiled import Compiled, compile_kernel
from commpass.lowering.inspect.one_warp import clocks_of_one_warp
from commpass.lowering.inspect.roofline import MEMORY, Prediction, exposed, predict
from commpass.lowering.inspect.sass import Counts, Sass, Trips, count_instructions


def casts(arch: str) -> dict[str, int]:
    """As ``launch.casts``, for an architecture."""
    return {"CASTS": True, "FP8": {"sm_90": 1, "sm_100": 2}.get(arch, 0)}


@dataclass(frozen=True)
class Multiplies:
    """The matrices of a compiled matmul, ``[m, k] @ [k, n]``.

    ``m`` counts the rows of all ``batches`` batches or groups, of which each has a right matrix.
    ``tile`` has the rows and columns that a program computes at a time, and the values along k of
    one step.
    """

    m: int
    n: int
    k: int
    tile: tuple[int, int, int]
    batches: int = 1


@dataclass(frozen=True)
class Work:
    """What all programs of a kernel do together that its text does not tell: the bytes ``moved``,
    and the iterations of its loops (``trips``). ``whole`` are the bytes of its direction, encode or
    decode, in all its kernels: values and wire once."""

    moved: float
    trips: tuple[Trips, ...]
    whole: float


@dataclass(frozen=True, kw_only=True)
class Lowerable:
    """A generated kernel with everything needed to compile it and predict its time.

    ``moved`` is the number of bytes that a program reads and writes, or None if that is not known,
    and nothing is predicted. ``flops`` are the operations of its matmuls, ``trips`` the iterations
    of its loops, if known. ``fuses`` says whether a product and a sum may be rounded once. ``of``
    and ``stays`` are arguments of ``roofline.predict``. ``multiplies`` has the matrices of a
    matmul. If it is one of several kernels in a row, ``launched`` is the number of its programs,
    and ``whole`` as in ``Work``. A matmul that encodes a tile beside the next one's products does
    so in ``parts``, each in a branch of its first loop; its last loop has the same code. If a
    program processes ``tiles`` tiles, all is counted for one of them.
    """

    name: str
    source: Source
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    hints: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 3
    moved: float | None
    flops: float = 0.0
    fuses: bool = False
    trips: tuple[Trips, ...] = ()
    of: str = MEMORY
    stays: bool = False
    multiplies: Multiplies | None = None
    launched: int = 0
    whole: float | None = None
    parts: int = 0
    tiles: float = 1.0


@dataclass(frozen=True)
class Lowered:
    """A kernel, its compilation, the instructions that one warp issues, and predictions for each
    GPU.

    ``counts`` is None if instructions are not counted (AMD); ``predictions`` are empty then, and if
    the bytes are not known. ``exposed``, of a matmul that encodes: see ``roofline.exposed``.
    """

    kernel: Lowerable
    compiled: Compiled
    counts: Counts | None
    predictions: tuple[Prediction, ...]
    exposed: float | None = None


def lower(kernel: Lowerable, arch: str) -> Lowered:
    """Compile a kernel and predict its time. Raises KernelError if it cannot be compiled."""
    found = _compile(kernel, kernel.constants, arch)
    if not ARCHITECTURES[arch].can_count:
        return Lowered(kernel, found, None, ())
    usual = _usual(kernel, found, arch)
    trips = kernel.trips[: len(usual.code.loops)]
    counts = count_instructions(usual.code, trips)
    # What is outside of loops is for all tiles, and a part is counted once so far.
    outside = count_instructions(usual.code, [0.0] * len(trips))
    part = _last_loop(usual.code, trips) if kernel.parts else Counts({})
    counts = _added(counts, outside, 1.0 / kernel.tiles - 1.0)
    counts = _added(counts, part, max(kernel.parts - 1.0, 0.0))
    if kernel.moved is None:
        return Lowered(kernel, found, counts, ())
    of_memory = kernel.of == MEMORY
    warp_clocks = clocks_of_one_warp(usual.code, trips, ARCHITECTURES[arch]) if of_memory else None
    predictions = [
        predict(
            counts,
            found.num_warps,
            found.residence.programs,
            kernel.moved,
            card,
            kernel.flops,
            of=kernel.of,
            stays=kernel.stays,
            warp_clocks=warp_clocks,
        )
        for card in cards_of(arch)
    ]
    beside = None
    if kernel.stays and usual.code.loops:
        rest = _added(rest_of_tile(usual.code, trips), part, -1.0)
        rest = _added(rest, outside, 1.0 / kernel.tiles - 1.0)
        beside = exposed(rest, found.num_warps, ARCHITECTURES[arch], kernel.flops)
    return Lowered(kernel, found, counts, tuple(predictions), beside)


def _usual(kernel: Lowerable, found: Compiled, arch: str) -> Compiled:
    """Compile the kernel without what is rare: the path for values that must be clamped, and suites
    that its text marks. Its instructions are the usual ones."""
    source, constants = without_rare(kernel.source), kernel.constants
    if constants.get("CHECKS"):
        constants = {**constants, "CHECKS": False}
    if source.text == kernel.source.text and constants is kernel.constants:
        return found
    return _compile(replace(kernel, source=source), constants, arch)


@dataclass(frozen=True)
class Share:
    """The share of a copy's bandwidth that several kernels reach on a GPU, as ``share`` and ``low``
    of a prediction."""

    card: str
    share: float
    low: float


def together(found: Sequence[Lowered]) -> tuple[Share, ...]:
    """Return, for each GPU, the share of kernels that run one after the other: the bytes of their
    direction, each once, in the time of all. Empty if one of them is not predicted, or their
    direction is not known. Launches are not counted."""
    if not all(each.predictions and each.kernel.whole for each in found):
        return ()
    shares = []
    for cards in zip(*(each.predictions for each in found), strict=True):
        numbers = [each.kernel.launched for each in found]
        least = sum(n * card.ns[card.limit] for n, card in zip(numbers, cards, strict=True))
        waits = sum(n * (card.waits or 0.0) for n, card in zip(numbers, cards, strict=True))
        card = next(one for one in CARDS if one.name == cards[0].card)
        copy = (found[0].kernel.whole or 0.0) / card.gb_s
        shares.append(Share(card.name, copy / least, copy / (least + waits)))
    return tuple(shares)


def rest_of_tile(code: Sass, trips: Sequence[Trips]) -> Counts:
    """Return the instructions of a tile of a matmul outside the steps along k: what does not grow
    with their number. That is the only pair of ``trips``, or the last of them."""
    place = next((n for n, each in enumerate(trips) if isinstance(each, tuple)), len(trips) - 1)
    steps = trips[place]
    more = (2.0 * steps[0], steps[1]) if isinstance(steps, tuple) else 2.0 * (steps or 1.0)
    once, twice = (
        count_instructions(code, [*trips[:place], each, *trips[place + 1 :]])
        for each in (steps, more)
    )
    return _added(_added(once, once, 1.0), twice, -1.0)


def _last_loop(code: Sass, trips: Sequence[Trips]) -> Counts:
    """Return the instructions of an iteration of the last loop."""
    once, never = (count_instructions(code, [*trips[:-1], each]) for each in (1.0, 0.0))
    return _added(once, never, -1.0)


def _added(counts: Counts, others: Counts, times: float) -> Counts:
    """Return the instructions of both, ``others`` as often as ``times``."""
    if not times:
        return counts
    names = {
        name: counts.names.get(name, 0.0) + times * others.names.get(name, 0.0)
        for name in {**counts.names, **others.names}
    }
    return Counts(names, counts.loops)


def _compile(kernel: Lowerable, constants: Mapping[str, Any], arch: str) -> Compiled:
    return compile_kernel(
        load(kernel.source),
        kernel.signature,
        constants,
        arch,
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        hints=kernel.hints,
        enable_fp_fusion=kernel.fuses,
    )
