"""Torch modes that a caller may have set around a call of commpass: context managers by name.

The two user modes change every result that passes through them, so that a leak is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ARITHMETIC = {
    *("abs", "add", "amax", "arange", "bitwise_and", "bmm", "clamp", "cumsum", "div", "matmul"),
    *("mm", "mul", "round", "sub", "sum", "to", "_to_copy", "where"),
}
"""Functions and operators, at least one of which every codec needs."""


def _changed(name: str, result: Any) -> Any:
    return result * 2 if name in ARITHMETIC and isinstance(result, torch.Tensor) else result


class UsersDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _changed(func._schema.name.removeprefix("aten::"), func(*args, **(kwargs or {})))


class UsersFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _changed(getattr(func, "__name__", ""), func(*args, **(kwargs or {})))


@contextmanager
def _set(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def _default_dtype(dtype: torch.dtype) -> Callable[[], AbstractContextManager[None]]:
    return lambda: _set(torch.get_default_dtype, torch.set_default_dtype, dtype)


def _deterministic() -> AbstractContextManager[None]:
    enabled, use = (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    )
    return _set(enabled, use, True)


def _default_device() -> AbstractContextManager[None]:
    return _set(lambda: None, torch.set_default_device, "meta")


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype float64": _default_dtype(torch.float64),
    "default dtype bfloat16": _default_dtype(torch.bfloat16),
    "default device": _default_device,
    "device as context": lambda: torch.device("meta"),
    "deterministic": _deterministic,
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "dispatch mode": UsersDispatchMode,
    "function mode": UsersFunctionMode,
}
OF_THE_PROCESS = ("default dtype float64", "default dtype bfloat16", "deterministic")
NOT_COMPILED = ("dispatch mode",)
"""Modes in which Dynamo compiles nothing."""

CODECS = (
    *("int8", "int6", "int4", "int2", "fp8", "rotated", "rotated(bits=4)", "table", "taco"),
    *("equarx", "sdp4bit", "tahquant", "exponent", "raw", "cast", "bf16", "fp16", "mixed"),
    *("outlier(width=64)", "ecq"),
)
"""Codecs without state."""
SPARSE = ("topk", "randomk", "dgc", "gaussiank", "redsync", "sidco")


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two tensors, or lists of them, are equal in bits, dtype and device."""
    if not isinstance(one, torch.Tensor):
        return len(one) == len(other) and all(map(same_bits, one, other))
    facts = [(each.dtype, each.shape, each.device) for each in (one, other)]
    return facts[0] == facts[1] and torch.equal(_raw(one), _raw(other))


def _raw(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1).contiguous().view(torch.uint8)


def differing(
    run: Callable[[str], Any],
    cases: tuple[str, ...],
    mode: str,
    plain: Callable[[str], Any] | None = None,
) -> list[str]:
    """Return the cases whose results within a mode differ from those outside, or raise.

    If ``plain`` is given, its results are the expected ones.
    """
    found = []
    for case in cases:
        wanted = (plain or run)(case)
        try:
            with MODES[mode]():
                here = run(case)
        except Exception as error:
            found.append(f"{case}: {type(error).__name__}: {error}")
            continue
        if not same_bits(here, wanted):
            found.append(case)
    return found
