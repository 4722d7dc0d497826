"""Constant tensors of codecs (channels, static scales) in graphs: a traced graph names them.

A captured tensor has no place in the graph that an algorithm goes to, and each of its numbers would
be compiled. So ``constant`` traces to an operator that takes a name alone. Pass rewrite turns these
into inputs of the graph; a graph without further inputs runs the operator.
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
"""Constants on the CPU by name, which is a digest of what they hold: the same on all ranks."""
_copies: dict[tuple[str, torch.device], Tensor] = {}


def constant(name: str, like: Tensor, spec: str, variant: str) -> Tensor:
    """The constant that ``named`` gave a name, on the device of ``like``: a node where a graph is
    traced, else a tensor that all who ask share. It is that of codec ``spec``, or of a ``variant``
    of it (``Codec.variant``), from which a process that finds the graph in a cache makes it."""
    if _is_traced(like):
        return torch.ops.commpass.constant(name, str(like.device), spec, variant)
    return on_device(name, like.device)


def is_known(name: str) -> bool:
    """Whether this process has made a constant."""
    return name in _named


def shape_of(name: str, device: str) -> Tensor:
    """An empty tensor like a constant."""
    held = _named[name]
    return torch.empty(held.shape, dtype=held.dtype, device=device)


def named(values: Sequence[Any], dtype: torch.dtype) -> str:
    """Keeps a constant of (nested) numbers for the life of the process; gives its name."""
    with making_lasting_tensors():
        kept = torch.tensor(values, dtype=dtype, device="cpu")
        said = f"{kept.dtype} {list(kept.shape)} ".encode()
        name = hashlib.sha256(said + kept.numpy().tobytes()).hexdigest()[:24]
    _named.setdefault(name, kept)
    return name


def on_device(name: str, device: torch.device | str) -> Tensor:
    """A constant on a device, copied there once."""
    key = name, torch.device(device)
    if key not in _copies:
        with making_lasting_tensors():
            _copies[key] = _named[name].to(key[1])
    return _copies[key]


def _is_traced(like: Tensor) -> bool:
    compiling = torch.compiler.is_compiling()
    return compiling or isinstance(like, FakeTensor) or get_proxy_mode() is not None
