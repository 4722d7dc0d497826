"""Kernels: functions that are compiled once and called, as one operator, by every site that needs
the same.

Inductor compiles them from the same plain operators that the inline form has, so both give the same
bits. It knows the operator as something that it cannot look into: a model with a hundred sites then
compiles little slower than one with a single site.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing

from commpass.errors import CommpassError

ops = torch.ops.commpass


@dataclass(eq=False)
class Kernel:
    """A graph of tensors of fixed shapes, by a name that says all that it computes. It is compiled
    when it is first called or ``ready`` is asked for."""

    name: str
    body: fx.GraphModule
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    compiled: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """The compiled function: it takes a list, which it empties."""
        if self.compiled is None:
            with self.lock:
                if self.compiled is None:
                    self.compiled = _compiled(self.body, self.inputs)
        return self.compiled


def kernel_of(body: fx.GraphModule, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Kernel:
    """The kernel that computes a graph of plain operators, in which inputs and results are fake
    tensors of fixed shapes."""
    said = f"{body.code}\n{[_facts(value) for value in inputs]}\n{torch.__version__}"
    name = hashlib.sha256(said.encode()).hexdigest()[:24]
    if name not in _kernels:
        _kernels[name] = Kernel(name, body, tuple(inputs), tuple(outputs))
    return _kernels[name]


_kernels: dict[str, Kernel] = {}
"""By name. A graph that is compiled refers to them by that, and so does a graph that torch finds in
its cache: whoever compiles or finds one has put its kernels here before."""


def _facts(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, str(value.device), tuple(value.shape), value.stride()


def _compiled(body: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    mode = getattr(inputs[0], "fake_mode", None)
    context = torch._guards.TracingContext(mode)
    with tracing(context), torch.no_grad(), torch._C._DisableAutocast():
        return compile_fx_inner(body, list(inputs))


def _found(name: str) -> Kernel:
    if name not in _kernels:
        raise CommpassError(
            f"kernel {name} is not here: this graph was compiled in another process, and commpass"
            " did not see it in this one"
        )
    return _kernels[name]


def _call(inputs: list[Tensor], name: str) -> list[Tensor]:
    return list(_found(name).ready()(list(inputs)))


def _shapes(inputs: list[Tensor], name: str) -> list[Tensor]:
    return [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        for value in _found(name).outputs
    ]


_library = torch.library.Library("commpass", "FRAGMENT")
_library.define("kernel(Tensor[] inputs, str name) -> Tensor[]")
_library.impl("kernel", _call, "CompositeExplicitAutograd")
torch.library.register_fake("commpass::kernel", _shapes, lib=_library)
