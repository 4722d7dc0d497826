"""A compilable kernel with its arguments, and the results of compiling and predicting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commpass.lowering.gpu.source import Source, load
from commpass.lowering.inspect.architectures import ARCHITECTURES, cards_of
from commpass.lowering.inspect.compiled import Compiled, compile_kernel
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


@dataclass(frozen=True, kw_only=True)
class Lowerable:
    """A generated kernel with everything needed to compile it and predict its time.

    ``moved`` is the number of bytes that a program reads and writes, or None if that depends on the
    values, and nothing is predicted. ``flops`` are the operations of its matmuls, ``trips`` the
    iterations of its loops, if known. ``fuses`` says whether a product and a sum may be rounded
    once. ``of`` and ``stays`` are arguments of ``roofline.predict``. ``multiplies`` has the
    matrices of a matmul.
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
    # Count the usual instructions, without the path for values that must be clamped, which is rare.
    checks = kernel.constants.get("CHECKS")
    usual = _compile(kernel, {**kernel.constants, "CHECKS": False}, arch) if checks else found
    counts = count_instructions(usual.code, kernel.trips[: len(usual.code.loops)])
    if kernel.moved is None:
        return Lowered(kernel, found, counts, ())
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
        )
        for card in cards_of(arch)
    ]
    beside = None
    if kernel.stays and usual.code.loops:
        rest = rest_of_tile(usual.code, kernel.trips[: len(usual.code.loops)])
        beside = exposed(rest, found.num_warps, ARCHITECTURES[arch], kernel.flops)
    return Lowered(kernel, found, counts, tuple(predictions), beside)


def rest_of_tile(code: Sass, trips: Sequence[Trips]) -> Counts:
    """Return the instructions of a tile of a matmul outside the steps along k, whose number is the
    last of ``trips``: what does not grow with it."""
    *others, last = trips
    more = (2.0 * last[0], last[1]) if isinstance(last, tuple) else 2.0 * (last or 1.0)
    once, twice = (count_instructions(code, [*others, each]) for each in (last, more))
    names = {name: 2.0 * number - twice.names[name] for name, number in once.names.items()}
    return Counts(names, once.loops)


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
