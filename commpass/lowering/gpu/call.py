"""Kernels with their arguments, for a launch or for a compilation without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commpass.lowering.gpu.source import Source, load

Arguments = dict[str, Tensor | int]
"""The arguments of a kernel by name."""
POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}
"""Options of all launches: products and sums are not fused, so that the bits equal those of the
aten form."""


@dataclass(frozen=True)
class Call:
    """A kernel call: ``arguments`` are tensors and integers by name, ``constants`` the compile-time
    arguments; ``programs`` is the size of the one-dimensional grid."""

    source: Source
    arguments: Arguments
    constants: dict[str, int]
    programs: int
    warps: int
    options: dict[str, Any] = field(default_factory=lambda: OPTIONS)


def launch(call: Call) -> None:
    """Run a kernel on the device of its tensors: a GPU, or the CPU if Triton interprets."""
    if call.programs:
        load(call.source)[(call.programs,)](
            **call.arguments, **call.constants, num_warps=call.warps, **call.options
        )


def signature(call: Call) -> dict[str, str]:
    """Return the types of all arguments, as named by Triton's compiler."""
    known = {
        name: POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"
        for name, value in call.arguments.items()
    }
    return known | dict.fromkeys(call.constants, "constexpr")


def divisible(call: Call) -> tuple[str, ...]:
    """Return the arguments that are multiples of 16 to Triton: addresses and integers."""
    return tuple(
        name
        for name, value in call.arguments.items()
        if (value.storage_offset() * value.itemsize if isinstance(value, Tensor) else value) % 16
        == 0
    )
