"""Fake values: those of a graph's nodes, and how to create similar ones."""

from __future__ import annotations

import contextlib
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from commpass.errors import VerifyError
from commpass.passes.fx import meta


def mode_of(graph: fx.Graph) -> Any:
    """Return the fake mode under which a graph was traced."""
    values = map(meta.tensor, graph.nodes)
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    return next(modes, contextlib.nullcontext())


def fake_of(node: fx.Node) -> Tensor:
    """Return the fake value of a tensor node. Raise VerifyError if it has none."""
    found = meta.tensor(node)
    if found is None:
        raise VerifyError(f"node {node.name} has no fake value")
    return found


def storage(value: Tensor) -> int:
    """Return a key that is equal for a tensor and its views, while either exists."""
    return int(value.untyped_storage()._cdata)


def can_be_copied(value: Any) -> TypeGuard[FakeTensor]:
    """Whether ``another`` supports a value: a fake tensor of fixed sizes."""
    return isinstance(value, FakeTensor) and meta.is_fixed(value)


def another(value: FakeTensor) -> FakeTensor:
    """Return a similar fake tensor of fixed sizes with its own storage. Ten times faster than a
    fake run of its operator."""
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, memory, value.device)


def view_of(source: FakeTensor, like: Tensor) -> FakeTensor:
    """Return a fake tensor in the memory of another, with the dtype, sizes, strides and offset of
    ``like``, which are fixed. Faster than a fake run of a view."""
    with torch._C._DisableTorchDispatch():
        memory = torch.empty(0, dtype=like.dtype, device="meta")
        memory.set_(source.untyped_storage(), like.storage_offset(), like.shape, like.stride())
    return FakeTensor(source.fake_mode, memory, source.device)
