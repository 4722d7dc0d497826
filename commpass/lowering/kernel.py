"""Kernels: functions that are compiled once and called, as one operator, by every site that needs
the same.

Inductor compiles them from the same plain operators that the inline form has, so both give the same
bits. It knows the operator as something that it cannot look into: a model with a hundred sites then
compiles little slower than one with a single site. Where C++ of our own is quicker, a kernel is
generated from the codec's parts instead (``Generated``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from commpass.errors import CommpassError
from commpass.lowering import cpu
from commpass.lowering.chain import Chain
from commpass.lowering.constants import without_tables
from commpass.lowering.repairs import repaired
from commpass.utils.ambient import ambient_free, making_lasting_tensors
from commpass.utils.running import stage


@dataclass(frozen=True)
class Form:
    """What is fixed of a tensor that a kernel takes or gives."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def slice_of(self, buffer: Tensor, place: int) -> Tensor:
        """So many values of a contiguous buffer, from its ``place``-th value of this dtype on."""
        values = buffer if buffer.dtype == self.dtype else buffer.view(self.dtype)
        return values.as_strided(self.shape, self.stride, values.storage_offset() + place)


def form_of(value: Tensor) -> Form:
    return Form(value.dtype, value.device, tuple(value.shape), value.stride())


@dataclass(frozen=True)
class KernelInput:
    """What a kernel reads of an input: ``form`` is that of the part, from a place on that each
    call names; ``whole`` the input's own."""

    whole: Form
    form: Form

    def of(self, tensor: Tensor, place: int) -> Tensor:
        """The part of an input. One that is laid out otherwise than was said is copied first."""
        if tensor.shape != self.whole.shape or tensor.stride() != self.whole.stride:
            tensor = self.whole.empty().copy_(tensor)
        return tensor if self.form == self.whole else self.form.slice_of(tensor, place)


@dataclass(frozen=True)
class Piece:
    """What a kernel writes into its ``output``-th buffer, from that buffer's ``place``-th value of
    this form's dtype on."""

    output: int
    place: int
    form: Form


@dataclass(frozen=True)
class Source:
    """What a kernel is compiled from: a graph of plain operators that writes ``pieces``, its last
    inputs; by a name that says all that it computes."""

    body: fx.GraphModule
    inputs: tuple[KernelInput, ...]
    pieces: tuple[Piece, ...]
    name: str = field(init=False)

    def __post_init__(self) -> None:
        said = f"{self.body.code}\n{self.inputs}\n{self.pieces}\n{torch.__version__}\n{_options()}"
        object.__setattr__(self, "name", hashlib.sha256(said.encode()).hexdigest()[:24])


@dataclass(frozen=True)
class Generated:
    """What a kernel is generated from: a chain for which there is C++ (``cpu.supports``), of rows
    of ``numel`` values.

    ``inputs`` are what the chain takes: rows ``[rows * ranks, numel]`` (or ``wire_bytes``), then
    what is added, ``[rows, numel]``; ``piece`` is where what it gives goes, ``[rows, numel]`` (or
    ``wire_bytes``). In all forms the last stride is 1; the first, and where a row begins, are free.
    """

    chain: Chain
    numel: int
    inputs: tuple[KernelInput, ...]
    piece: Piece
    name: str = field(init=False)

    def __post_init__(self) -> None:
        said = (cpu.source(self.chain), self.numel, self.inputs, self.piece, torch.__version__)
        object.__setattr__(self, "name", hashlib.sha256(str(said).encode()).hexdigest()[:24])

    def compiled(self) -> Kernel:
        chain = cpu.compiled(self.chain)

        def run(tensors: list[Tensor]) -> None:
            chain(tensors[:-1], tensors[-1], self.numel)
            tensors.clear()

        return Kernel(run, self.inputs, (self.piece,))


def _options() -> list[tuple[str, Any]]:
    """The options of Inductor's that are in force. What is no plain value has no lasting name."""
    from torch._inductor import config

    options = config.save_config_portable()
    plain = (bool, int, float, str, list, tuple, type(None))
    return sorted((key, value) for key, value in options.items() if isinstance(value, plain))


@dataclass(frozen=True)
class Kernel:
    """A compiled function, which empties the list that it takes, and what it writes."""

    run: Callable[[list[Tensor]], object]
    inputs: tuple[KernelInput, ...]
    pieces: tuple[Piece, ...]


@ambient_free
def make(sources: Sequence[Source | Generated]) -> None:
    """Compiles what is not compiled yet: after that the operator knows it by name."""
    for source in sources:
        if source.name in _kernels:
            continue
        if isinstance(source, Generated):
            _kernels[source.name] = source.compiled()
            continue
        inputs, pieces = source.inputs, source.pieces
        forms = [*(part.form for part in inputs), *(piece.form for piece in pieces)]
        _kernels[source.name] = Kernel(_compiled(source.body, forms), inputs, pieces)


_kernels: dict[str, Kernel] = {}
"""By name. A graph that is compiled refers to them by that, and so does a graph that torch finds in
its cache: whoever compiles or finds one has put its kernels here before."""


def _compiled(body: fx.GraphModule, inputs: Sequence[Form]) -> Any:
    """Compiled on its own, whatever is being compiled around it: with fake values, sizes and a
    context of its own. CUDA graphs would want to know who calls it."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with making_lasting_tensors():
        rest, tables = without_tables(body)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        given = [each.empty() for each in (*inputs, *map(form_of, tables))]
    context = torch._guards.TracingContext(mode)
    with tracing(context), repaired():
        compiled = compile_fx_inner(rest, given, cudagraphs=BoxedBool(False))
    return lambda read: compiled([*read, *tables])


def _found(name: str) -> Kernel:
    if name not in _kernels:
        raise CommpassError(
            f"kernel {name} is not here: this graph was compiled in another process, and commpass"
            " did not see it in this one"
        )
    return _kernels[name]


def _call(
    inputs: list[Tensor],
    outputs: list[Tensor],
    places: list[int],
    name: str,
    site: int = -1,
    role: str = "",
) -> None:
    """Writes what a kernel computes of ``inputs`` into contiguous ``outputs``; ``places`` are the
    values of each of those, and then of these, at which its part begins. ``site`` is the number of
    the site that it is for in the plan of its graph, -1 for none, and ``role`` what it does there:
    profilers show both."""
    kernel = _found(name)
    taken = [
        part.of(given, place)
        for part, given, place in zip(kernel.inputs, inputs, places, strict=False)
    ]
    firsts = places[len(inputs) :]
    written = [
        piece.form.slice_of(outputs[piece.output], firsts[piece.output] + piece.place)
        for piece in kernel.pieces
    ]
    with stage(site, role) if site >= 0 else nullcontext():
        kernel.run([*taken, *written])


def _no_op(*_: object) -> None: ...


_library = torch.library.Library("commpass", "FRAGMENT")
_library.define(
    "kernel_(Tensor[] inputs, Tensor(a!)[] outputs, int[] places, str name, int site=-1,"
    ' str role="") -> ()'
)
_library.impl("kernel_", ambient_free(_call), "CompositeExplicitAutograd")
torch.library.register_fake("commpass::kernel_", _no_op, lib=_library)
