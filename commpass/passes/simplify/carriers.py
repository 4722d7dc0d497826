"""The dtypes in which values and bits travel."""

from __future__ import annotations

import torch

SENT_EVERYWHERE = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Dtypes that gloo and other libraries can send. float8 and 16-bit integers are not among them."""
CARRIERS = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}
"""The integers that carry the bits of other dtypes, by the bytes of a value. Two uint8 carry two
bytes, since 16-bit integers are not sent everywhere."""
