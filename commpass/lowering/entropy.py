"""Triton kernels of codec ``ecq`` behind its two operators (``codecs.entropy.operators``)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from commpass.codecs.entropy import operators
from commpass.codecs.entropy.coder import Form


def unsupported_reason(device: torch.device, numel: int) -> str:
    """Return why a device has no kernels for rows of ``numel`` values, or "" if it has."""
    if device.type != "cuda":
        return f"{device.type} has no kernel for it"
    if find_spec("triton") is None:
        return "Triton is not installed"
    from commpass.lowering.gpu import entropy

    return entropy.unsupported_reason(numel)


def _encode(rows: Tensor, form: Form, rotated: bool) -> tuple[Tensor, Tensor]:
    from commpass.lowering.gpu import entropy

    return entropy.encode_rows(rows, form, rotated)


def _decode(
    code: Tensor, side: Tensor, form: Form, rotated: bool, limit: float, numel: int
) -> Tensor:
    from commpass.lowering.gpu import entropy

    return entropy.decode_rows(code, side, form, rotated, limit, numel)


def register() -> None:
    """Make the operators of the codec run these kernels."""
    operators.KERNELS[:] = [operators.Kernels(_encode, _decode, unsupported_reason)]
