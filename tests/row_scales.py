"""Float8 matmuls with a scale for each row, on the CPU of a torch that has only one scale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tiers import VERSION
from torch import Tensor


@contextlib.contextmanager
def scales_of_rows() -> Iterator[None]:
    """Let float8 matmuls on a CPU have scales of rows, as those of later versions have."""
    if VERSION >= (2, 12):
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_mm", _scaled_mm, "CPU")
        library.impl("_scaled_mm.out", _scaled_mm_into, "CPU")
        yield


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    result = (a.float() @ b.float()) * scale_a * scale_b
    result = result if bias is None else result + bias.float()
    return result.to(a.dtype if out_dtype is None else out_dtype)


def _scaled_mm_into(*given: Any, out: Tensor, **more: Any) -> Tensor:
    return out.copy_(_scaled_mm(*given, **more))
