"""Constant tensors of codecs (channels, static scales) that a traced graph refers to by name.

A captured tensor would have no place in the graph that an algorithm is traced into, and each of its
numbers would be compiled. So ``constant`` traces to an operator that takes only a name. Pass
rewrite turns these operators into graph inputs; a graph without further inputs runs the operator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from commpass.utils.ambient import making_lasting_tensors

_constants: dict[str, Tensor] = {}
"""Constants on the CPU by name: a digest of their contents, equal on all ranks."""
_copies: dict[tuple[str, torch.device], Tensor] = {}


def constant(name: str, like: Tensor, spec: str, variant: str) -> Tensor:
    """Return the constant of a name returned by ``register``, on the device of ``like``.

    While a graph is traced this is a node; otherwise it is a tensor shared by all callers. The
    constant belongs to the codec ``spec`` or to a ``variant`` of it (``Codec.variant``). A process
    that loads the graph from a cache rebuilds the constant from these.
    """
    if _is_traced(like):
        return torch.ops.commpass.constant(name, str(like.device), spec, variant)
    return on_device(name, like.device)


def is_known(name: str) -> bool:
    """Whether this process has created the constant."""
    return name in _constants


def shape_of(name: str, device: str) -> Tensor:
    """Return an uninitialized tensor with the shape and dtype of a constant."""
    stored = _constants[name]
    return torch.empty(stored.shape, dtype=stored.dtype, device=device)


def register(values: Sequence[Any], dtype: torch.dtype) -> str:
    """Store a constant of (nested) numbers for the lifetime of the process, and return its name."""
    with making_lasting_tensors():
        tensor = torch.tensor(values, dtype=dtype, device="cpu")
        header = f"{tensor.dtype} {list(tensor.shape)} ".encode()
        name = hashlib.sha256(header + tensor.numpy().tobytes()).hexdigest()[:24]
    _constants.setdefault(name, tensor)
    return name


def on_device(name: str, device: torch.device | str) -> Tensor:
    """Return a constant on a device; it is copied there once."""
    key = name, torch.device(device)
    if key not in _copies:
        with making_lasting_tensors():
            _copies[key] = _constants[name].to(key[1])
    return _copies[key]


def _is_traced(like: Tensor) -> bool:
    compiling = torch.compiler.is_compiling()
    return compiling or isinstance(like, FakeTensor) or get_proxy_mode() is not None
