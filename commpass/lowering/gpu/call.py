"""A kernel with its arguments: what is launched, and what a compiler without a GPU is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commpass.lowering.gpu.source import Source, load

Arguments = dict[str, Tensor | int]
"""What a kernel is given, by name."""
POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}
"""Of all launches: products are not fused into sums, so that bits are those of the aten form."""


@dataclass(frozen=True)
class Call:
    """``arguments`` are tensors and integers by name, ``constants`` what is known when it is
    compiled; ``programs`` are counted along one axis."""

    source: Source
    arguments: Arguments
    constants: dict[str, int]
    programs: int
    warps: int
    options: dict[str, Any] = field(default_factory=lambda: OPTIONS)


def launch(call: Call) -> None:
    """Runs a kernel where its tensors are: on a GPU, or on the CPU where Triton interprets."""
    if call.programs:
        load(call.source)[(call.programs,)](
            **call.arguments, **call.constants, num_warps=call.warps, **call.options
        )


def signature(call: Call) -> dict[str, str]:
    """The types of all arguments, as Triton's compiler names them."""
    known = {
        name: POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"
        for name, value in call.arguments.items()
    }
    return known | dict.fromkeys(call.constants, "constexpr")


def divisible(call: Call) -> tuple[str, ...]:
    """The arguments that Triton takes for multiples of 16: addresses, and integers that are."""
    return tuple(
        name
        for name, value in call.arguments.items()
        if (value.storage_offset() * value.itemsize if isinstance(value, Tensor) else value) % 16
        == 0
    )
