"""Kernels: functions that are compiled once and called, as one operator, by every site that needs
the same one.

Inductor compiles them from the plain operators of the inline form, so both give the same bits. In a
model the operator is opaque to Inductor: a model with a hundred sites compiles little slower than
one with a single site. If generated C++ is faster, a kernel is generated from the codec's parts
instead (``Generated``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
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
from commpass.lowering.repairs import without_loop_splitting
from commpass.utils.ambient import ambient_free, making_lasting_tensors
from commpass.utils.running import stage


@dataclass(frozen=True)
class Form:
    """The fixed properties of a tensor that a kernel reads or writes."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def slice_of(self, buffer: Tensor, place: int) -> Tensor:
        """View a contiguous buffer as a tensor of this form, from its ``place``-th value of this
        dtype on."""
        values = buffer if buffer.dtype == self.dtype else buffer.view(self.dtype)
        return values.as_strided(self.shape, self.stride, values.storage_offset() + place)


def form_of(value: Tensor) -> Form:
    return Form(value.dtype, value.device, tuple(value.shape), value.stride())


@dataclass(frozen=True)
class KernelInput:
    """The part of an input that a kernel reads. ``form`` is the form of the part, which begins at a
    place given in each call; ``whole`` is the form of the input."""

    whole: Form
    form: Form

    def of(self, tensor: Tensor, place: int) -> Tensor:
        """Return the part of an input. An input with another layout than expected is copied
        first."""
        if tensor.shape != self.whole.shape or tensor.stride() != self.whole.stride:
            tensor = self.whole.empty().copy_(tensor)
        return tensor if self.form == self.whole else self.form.slice_of(tensor, place)


@dataclass(frozen=True)
class Piece:
    """A result of a kernel: it is written into the ``output``-th buffer, from its ``place``-th
    value of this form's dtype on."""

    output: int
    place: int
    form: Form


@dataclass(frozen=True)
class Source:
    """The source of a kernel: a graph of plain operators that writes ``pieces``, its last inputs.
    Its name is a hash of everything that determines the result."""

    body: fx.GraphModule
    inputs: tuple[KernelInput, ...]
    pieces: tuple[Piece, ...]
    name: str = field(init=False)

    def __post_init__(self) -> None:
        content = (
            f"{self.body.code}\n{self.inputs}\n{self.pieces}\n{torch.__version__}\n{_options()}"
        )
        object.__setattr__(self, "name", hashlib.sha256(content.encode()).hexdigest()[:24])


@dataclass(frozen=True)
class Generated:
    """A kernel generated from a chain that has C++ (``cpu.unsupported_reason``), for rows of
    ``numel`` values.

    ``inputs`` are the inputs of the chain: rows ``[rows * ranks, numel]`` (or ``wire_bytes``), then
    its ``further_inputs``. ``pieces`` are the destinations of its result, ``[rows, numel]`` (or
    ``wire_bytes``), and of its ``further_results``. In all forms the last stride is 1; the first
    stride and the start of a row are arbitrary.
    """

    chain: Chain
    numel: int
    inputs: tuple[KernelInput, ...]
    pieces: tuple[Piece, ...]
    name: str = field(init=False)

    def __post_init__(self) -> None:
        content = (cpu.source(self.chain), self.numel, self.inputs, self.pieces, torch.__version__)
        object.__setattr__(self, "name", hashlib.sha256(str(content).encode()).hexdigest()[:24])

    def compile(self) -> Kernel:
        chain, many = cpu.compile_chain(self.chain), len(self.inputs)

        def run(tensors: list[Tensor]) -> None:
            inputs, (output, *further) = tensors[:many], tensors[many:]
            chain(inputs, output, self.numel, further)
            tensors.clear()

        return Kernel(run, self.inputs, self.pieces)


def _options() -> list[tuple[str, Any]]:
    """Return Inductor's current options. Only plain values are used, since others have no stable
    text."""
    from torch._inductor import config

    options = config.save_config_portable()
    plain = (bool, int, float, str, list, tuple, type(None))
    return sorted((key, value) for key, value in options.items() if isinstance(value, plain))


@dataclass(frozen=True)
class Kernel:
    """A compiled function, which empties its argument list, and what it writes."""

    run: Callable[[list[Tensor]], object]
    inputs: tuple[KernelInput, ...]
    pieces: tuple[Piece, ...]


@ambient_free
def start_compiling(sources: Iterable[Source | Generated]) -> None:
    """Start compiling the C++ of those sources that have any, all at once, before ``make``."""
    new = (source for source in sources if source.name not in _kernels)
    cpu.start_compiling({source.chain: None for source in new if isinstance(source, Generated)})


@ambient_free
def make(sources: Sequence[Source | Generated]) -> None:
    """Compile the sources that are not compiled yet, so that the operator finds them by name."""
    for source in sources:
        if source.name in _kernels:
            continue
        if isinstance(source, Generated):
            _kernels[source.name] = source.compile()
            continue
        inputs, pieces = source.inputs, source.pieces
        forms = [*(part.form for part in inputs), *(piece.form for piece in pieces)]
        _kernels[source.name] = Kernel(_compile(source.body, forms), inputs, pieces)


_kernels: dict[str, Kernel] = {}
"""Kernels by name. Compiled graphs refer to them by name, including graphs from torch's cache: the
code that compiles or loads a graph registers its kernels here first."""


def _compile(body: fx.GraphModule, inputs: Sequence[Form]) -> Any:
    """Compile a graph independently of any compilation in progress, with separate fake values,
    symbolic sizes and tracing context. CUDA graphs are disabled, since they would need to know the
    caller."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with making_lasting_tensors():
        rest, tables = without_tables(body)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        given = [each.empty() for each in (*inputs, *map(form_of, tables))]
    context = torch._guards.TracingContext(mode)
    with tracing(context), without_loop_splitting():
        compiled = compile_fx_inner(rest, given, cudagraphs=BoxedBool(False))
    return lambda read: compiled([*read, *tables])


def _kernel_named(name: str) -> Kernel:
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
    """Write a kernel's results for ``inputs`` into contiguous ``outputs``.

    ``places`` are the offsets, in values, of the part of each input, then of each output. ``site``
    is the site's number in the plan of its graph, -1 for none, and ``role`` its role there:
    profilers show both.
    """
    kernel = _kernel_named(name)
    read = [
        part.of(given, place)
        for part, given, place in zip(kernel.inputs, inputs, places, strict=False)
    ]
    firsts = places[len(inputs) :]
    written = [
        piece.form.slice_of(outputs[piece.output], firsts[piece.output] + piece.place)
        for piece in kernel.pieces
    ]
    with stage(site, role) if site >= 0 else nullcontext():
        kernel.run([*read, *written])


def _no_op(*_: object) -> None: ...


_library = torch.library.Library("commpass", "FRAGMENT")
_library.define(
    "kernel_(Tensor[] inputs, Tensor(a!)[] outputs, int[] places, str name, int site=-1,"
    ' str role="") -> ()'
)
_library.impl("kernel_", ambient_free(_call), "CompositeExplicitAutograd")
torch.library.register_fake("commpass::kernel_", _no_op, lib=_library)
