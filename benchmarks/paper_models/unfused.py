"""Model the cost of a codec whose operators are separate kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commpass.codecs import codec
from commpass.costmodel import Kernels

from .sites import MANY


@dataclass(frozen=True)
class Unfused:
    """The number of kernels of one encode and one decode with separate kernels, and the bytes that
    they read and write per value."""

    encode_kernels: int
    decode_kernels: int
    encode_bytes: float
    decode_bytes: float

    def time_us(self, role: str, values: float, kernels: Kernels, calls: int = 1) -> float:
        """Return the microseconds of coding some values, in some calls."""
        many = self.encode_kernels if role == "encode" else self.decode_kernels
        each = self.encode_bytes if role == "encode" else self.decode_bytes
        return kernels.copies_us(many * calls, each * values)


class _Counted(TorchDispatchMode):
    """Count operators that read or write at least ``least`` bytes, and all their bytes.

    Views and pure allocations do not count.
    """

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least, self.kernels, self.nbytes = least, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        given = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        held = {each.untyped_storage().data_ptr() for each in taken}
        is_view = any(each.untyped_storage().data_ptr() in held for each in given)
        nbytes = sum(each.nbytes for each in (*taken, *given))
        if not is_view and "empty" not in str(func) and nbytes >= self.least:
            self.kernels, self.nbytes = self.kernels + 1, self.nbytes + nbytes
        return made


@lru_cache
def count_unfused(code: str, block: int = 256) -> Unfused:
    """Count the operators of commpass's codec, run eagerly on bf16 values.

    Tensors smaller than one number per block are tables that do not depend on values, and are left
    out.
    """
    coder, rows = codec(code), torch.randn(1, MANY, generator=torch.Generator().manual_seed(0))
    rows = rows.to(torch.bfloat16)
    with _Counted(4 * MANY / block) as encoding:
        wire = coder.encode_rows(rows)
    with _Counted(4 * MANY / block) as decoding:
        coder.decode_rows(wire, MANY, torch.bfloat16)
    return Unfused(
        encoding.kernels, decoding.kernels, encoding.nbytes / MANY, decoding.nbytes / MANY
    )
