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

_named: dict[str, Tensor] = {}
"""Constants on the CPU by name: a digest of their contents, equal on all ranks."""
_copies: dict[tuple[str, torch.device], Tensor] = {}


def constant(name: str, like: Tensor, spec: str, variant: str) -> Tensor:
    """Return the constant of a name returned by ``named``, on the device of ``like``.

    While a graph is traced this is a node; otherwise it is a tensor shared by all callers. The
    constant belongs to the codec ``spec`` or to a ``variant`` of it (``Codec.variant``). A process
    that loads the graph from a cache rebuilds the constant from these.
    """
    if _is_traced(like):
        return torch.ops.commpass.constant(name, str(like.device), spec, variant)
    return on_device(name, like.device)


def is_known(name: str) -> bool:
    """Whether this process has created the constant."""
    return name in _named


def shape_of(name: str, device: str) -> Tensor:
    """Return an uninitialized tensor with the shape and dtype of a constant."""
    held = _named[name]
    return torch.empty(held.shape, dtype=held.dtype, device=device)


def named(values: Sequence[Any], dtype: torch.dtype) -> str:
    """Store a constant of (nested) numbers for the lifetime of the process, and return its name."""
    with making_lasting_tensors():
        kept = torch.tensor(values, dtype=dtype, device="cpu")
        said = f"{kept.dtype} {list(kept.shape)} ".encode()
        name = hashlib.sha256(said + kept.numpy().tobytes()).hexdigest()[:24]
    _named.setdefault(name, kept)
    return name


def on_device(name: str, device: torch.device | str) -> Tensor:
    """Return a constant on a device; it is copied there once."""
    key = name, torch.device(device)
    if key not in _copies:
        with making_lasting_tensors():
            _copies[key] = _named[name].to(key[1])
    return _copies[key]


def _is_traced(like: Tensor) -> bool:
    compiling = torch.compiler.is_compiling()
    return compiling or isinstance(like, FakeTensor) or get_proxy_mode() is not None
