"""Run kernels in Triton's interpreter, in a separate process.

Triton must know before it is imported whether it interprets.

    interpreted(function, *args)

calls a function of a test module there and returns its result. The function is found by module and
name; its arguments and its result are copied.

Triton 3.7.1 interprets the cast of a subnormal bfloat16 to float32 wrongly (GPUs do not), so the
process has an exact one.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import Any


def interpreted(function: Callable[..., Any], *args: Any) -> Any:
    return _process().submit(function, *args).result(timeout=240)


@lru_cache(maxsize=1)
def _process() -> ProcessPoolExecutor:
    """Return the one process for each process of the tests; it starts with the first call."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool.submit(_ready).result(timeout=240)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    atexit.register(pool.shutdown)
    return pool


def _ready() -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ModuleNotFoundError):
        _cast_subnormals()


def _cast_subnormals() -> None:
    """Let the interpreter cast bfloat16 to float32 exactly: these are its upper 16 bits."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter._convert_float

    def exact(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.bfloat16, tl.float32):
            return cast(data, source, target, mode)
        return (data.view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)

    interpreter._convert_float = exact
