"""What can be compiled and judged: a kernel with all that this takes, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commpass.lowering.gpu.source import Source, load
from commpass.lowering.inspect.architectures import ARCHITECTURES, cards_of
from commpass.lowering.inspect.compiled import Compiled, compiled
from commpass.lowering.inspect.roofline import MEMORY, Prediction, predicted
from commpass.lowering.inspect.sass import Counts, Trips, counted

NUMEL = 1 << 20
"""Values of a row where nobody says how many: enough for whole tiles."""
FP8 = ("sm_90", "sm_100")
"""Architectures that cast to the 8-bit floats of our grids themselves: see ``launch.constants``."""


@dataclass(frozen=True, kw_only=True)
class Lowerable:
    """A generated kernel with all that compiling and judging it takes. ``moved`` are the bytes that
    a program reads and writes (None: that depends on the values, and nothing is predicted),
    ``flops`` the operations of its matmuls, ``trips`` how often each of its loops turns, as far as
    is known; ``fuses``: a product and a sum may be rounded once. ``of`` and ``stays`` are those of
    ``roofline.predicted``."""

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


@dataclass(frozen=True)
class Lowered:
    """A kernel, what it became, what one warp of it issues and what that comes to on each card.
    ``counts`` is None where instructions are not counted (AMD);
    ``predictions`` are empty there, and where the bytes are not known."""

    kernel: Lowerable
    compiled: Compiled
    counts: Counts | None
    predictions: tuple[Prediction, ...]


def lowered(kernel: Lowerable, arch: str) -> Lowered:
    """Raises KernelError where it cannot be compiled."""
    found = _compiled(kernel, kernel.constants, arch)
    if not ARCHITECTURES[arch].counted:
        return Lowered(kernel, found, None, ())
    # What is issued as a rule: without the way of values that must be cut, which are rare.
    looks = kernel.constants.get("LOOKS")
    usual = _compiled(kernel, {**kernel.constants, "LOOKS": False}, arch) if looks else found
    counts = counted(usual.code, kernel.trips[: len(usual.code.loops)])
    if kernel.moved is None:
        return Lowered(kernel, found, counts, ())
    predictions = [
        predicted(
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
    return Lowered(kernel, found, counts, tuple(predictions))


def _compiled(kernel: Lowerable, constants: Mapping[str, Any], arch: str) -> Compiled:
    return compiled(
        load(kernel.source),
        kernel.signature,
        constants,
        arch,
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        hints=kernel.hints,
        enable_fp_fusion=kernel.fuses,
    )
