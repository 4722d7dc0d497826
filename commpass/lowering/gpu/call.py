"""Kernels with their arguments, for a launch or for a compilation without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from commpass.lowering.gpu.current import on_device
from commpass.lowering.gpu.source import Source, load, of_function

Arguments = dict[str, Tensor | int]
"""The arguments of a kernel by name."""
POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
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

    entry: Callable[..., Any]
    arguments: Arguments
    constants: dict[str, Any]
    programs: int
    warps: int
    options: dict[str, Any]

    @property
    def source(self) -> Source:
        return of_function(self.entry)


def call_of(
    entry: Callable[..., Any],
    known: Mapping[str, Any],
    programs: int,
    warps: int = 4,
    options: dict[str, Any] = OPTIONS,
) -> Call:
    """Return the call of a kernel with the ``known`` values that it takes; compile-time arguments
    have names in capitals."""
    names = entry.__code__.co_varnames[: entry.__code__.co_argcount]
    arguments = {name: known[name] for name in names if not name.isupper()}
    constants = {name: known[name] for name in names if name.isupper()}
    return Call(entry, arguments, constants, programs, warps, options)


_recorded: ContextVar[list[Call] | None] = ContextVar("calls", default=None)


def calls_of(run: Callable[[], object]) -> list[Call]:
    """Return the calls that a function would launch; its tensors may be meta tensors."""
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        run()
    finally:
        _recorded.reset(token)
    return calls


def launch(call: Call, *, graph: bool = False) -> None:
    """Run a kernel on the device of its tensors: a GPU, or the CPU if Triton interprets.

    With ``graph``, the call is traced for Inductor, which launches the kernel itself.
    """
    if (calls := _recorded.get()) is not None:
        calls.append(call)
    elif call.programs:
        function = load(call.source)
        tensors = (each for each in call.arguments.values() if isinstance(each, Tensor))
        with nullcontext() if graph else on_device(next(tensors).device):
            (wrap_triton(function) if graph else function)[(call.programs,)](
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
