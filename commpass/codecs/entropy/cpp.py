"""The entropy coder in C++ (``coder.cpp``): its constants, its compilation, and its calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from commpass.codecs.entropy import coder
from commpass.codecs.entropy.coder import BLOCK, CHUNK, Form
from commpass.codecs.entropy.tables import (
    ALWAYS_DITHERED,
    COST_BITS,
    HALF,
    LARGEST_RATIO,
    LEAST_DITHERED,
    LEAST_RATIO,
    PER_OCTAVE,
    TOTAL_BITS,
    roots,
    tables,
)


def source() -> str:
    """Return the C++: the constants, and ``coder.cpp`` after them."""
    code = resources.files(__package__) / "coder.cpp"
    return f"{_constants()}\n{code.read_text(encoding='utf-8')}"


def _constants() -> str:
    every = tables()
    single = {
        "int64_t BLOCK": BLOCK,
        "int64_t CHUNK": CHUNK,
        "int HALF": HALF,
        "int TOTAL_BITS": TOTAL_BITS,
        "int COST_BITS": COST_BITS,
        "int LEAST_RATIO": LEAST_RATIO,
        "int LARGEST_RATIO": LARGEST_RATIO,
        "int LEAST_DITHERED": LEAST_DITHERED,
        "int ALWAYS_DITHERED": ALWAYS_DITHERED,
        "int PER_OCTAVE": PER_OCTAVE,
        "int PER_RMS": coder.PER_RMS,
        "int COARSEST": coder.COARSEST,
        "int ATTEMPTS": coder.ATTEMPTS,
        "int MOST_LANES": coder.LANES,
        "int DITHER": coder.DITHER,
        "int OVERHEAD": coder.OVERHEAD,
        "int SPARE": coder.SPARE,
        "double PEAK": coder.PEAK,
        "int ZERO": coder.ZERO,
        "int TABLES": len(every),
    }
    frequencies = [_braces(map(str, table.frequencies)) for table in every]
    arrays = {
        "uint16_t FREQUENCIES[TABLES][2 * HALF]": frequencies,
        "int LOW[TABLES]": [str(table.low) for table in every],
        "float LEVELS[TABLES]": [_float(table.level) for table in every],
        "int64_t COSTS[TABLES]": [str(table.cost) for table in every],
        "float ROOTS[]": map(_float, roots()),
    }
    values = {name: str(value) for name, value in single.items()}
    values |= {name: _braces(each) for name, each in arrays.items()}
    lines = [f"constexpr {name} = {value};" for name, value in values.items()]
    return "\n".join(["#include <cstdint>", "", *lines, ""])


def _braces(items: Iterable[str]) -> str:
    return "{" + ",".join(items) + "}"


def _float(value: float) -> str:
    """Return a float32 number as C++ text."""
    return f"{value.hex()}f"


@cache
def _entry() -> Callable[..., object] | None:
    """Return the function, built by Inductor's builder and kept in its cache; None, with a warning,
    without a C++ compiler or a directory for the cache."""
    types = ["int64_t"] * 7 + ["float", "const unsigned char*", "int64_t"]
    types += ["unsigned char*", "int64_t"] * 2
    try:
        return _built(types)
    except OSError as error:
        _warn(error, "set TORCHINDUCTOR_CACHE_DIR to a directory that can be written")
        return None


def _built(types: list[str]) -> Callable[..., object] | None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # makes the directory
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        entry: Callable[..., object] = CppPythonBindingsCodeCache.load_pybinding(types, source())
    except (CppCompileError, InvalidCxxCompiler) as error:
        _warn(error, "install a C++ compiler")
        return None
    return entry


def _warn(error: Exception, remedy: str) -> None:
    what = str(error).strip().partition("\n")[0]
    warnings.warn(
        f"codec 'ecq' runs without its C++, and each encode and decode takes a second or more:"
        f" {remedy}, or use codec 'rotated' ({what})",
        stacklevel=4,
    )


def encode(rows: Tensor, form: Form, rotated: bool, code: Tensor, side: Tensor) -> bool:
    """Encode contiguous float32 rows ``[n, size]`` on a CPU. Return False without a C++ compiler.

    The code of the blocks is written to ``code``, uint8 ``[n, blocks * nbytes]``, and the scales of
    the chunks to ``side``, uint8 ``[n, chunks]``.
    """
    return _call(0, rows, side, code, rows.shape, form, rotated, 0.0)


def decode(
    code: Tensor, side: Tensor, form: Form, rotated: bool, limit: float, rows: Tensor
) -> bool:
    """The inverse of ``encode``. Values are clamped to ``limit``, and those that are not finite
    become NaN."""
    return _call(1, code, side, rows, rows.shape, form, rotated, limit)


def _call(
    decoding: int,
    source: Tensor,
    side: Tensor,
    target: Tensor,
    shape: Sequence[int],
    form: Form,
    rotated: bool,
    limit: float,
) -> bool:
    entry = _entry()
    if entry is None:
        return False
    rows, numel = shape
    threads = min(torch.get_num_threads(), rows * numel // CHUNK)  # a thread takes a whole chunk
    given: list[Any] = [
        threads,
        decoding,
        rows,
        numel,
        form.nbytes,
        form.even,
        int(rotated),
        limit,
    ]
    for each in (source, side, target):
        given += [each, each.stride(0) * each.itemsize]
    entry(*given)
    return True
