"""Read the stages of an algorithm from a run of its steps on tensors without values.

The cost of an algorithm is not described separately, so a changed or new algorithm always has
correct stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from commpass.codecs import Codec, codec, operators
from commpass.collectives import data_sized, messages
from commpass.collectives.algorithm import Algorithm
from commpass.collectives.request import Request, ops
from commpass.collectives.steps import run
from commpass.collectives.table import algorithm
from commpass.plan.kinds import KIND_OF, KINDS
from commpass.plan.stage import Stage, all_to_all, plain_exchange
from commpass.utils.ambient import ambient_free


@dataclass(frozen=True)
class Payload:
    """The input tensor of one rank: ``numel`` values, of which one entry of the first dimension has
    ``width``."""

    numel: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Stages:
    """All stages of an algorithm on one rank, in the order in which they start."""

    stages: tuple[Stage, ...]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    @property
    def exchanges(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.role == "exchange")

    @property
    def wire_bytes(self) -> int:
        """The bytes that the rank passes to collectives."""
        return sum(stage.nbytes for stage in self.stages)

    @property
    def dynamic_bytes(self) -> int:
        """The part of ``wire_bytes`` that depends on the values."""
        return sum(stage.nbytes for stage in self.stages if stage.dynamic)

    def values(self, role: str) -> int:
        """Return the number of values that are encoded or decoded."""
        return sum(stage.values for stage in self.stages if stage.role == role)


@lru_cache(maxsize=4096)
def read_stages(kind: str, spec: str, code: str, payload: Payload, request: Request) -> Stages:
    """Return the stages of an algorithm with a codec for a tensor of known size.

    Bytes that depend on values are those that Gaussian values need. A second run with the fewest
    possible bytes identifies them.
    """
    chosen, coder = algorithm(kind, spec), codec(code)
    scatters = KINDS[kind].scatters
    if request.sent is not None:
        rows = sum(request.sent) if scatters else request.sent[0]
        width = max(payload.width, 1)
    else:  # for equal parts, only the length of a part matters
        rows = request.ranks if scatters else 1
        width = payload.numel // rows
    with unset_fake_temporarily():  # meta tensors suffice, and take a third of the time
        return _read(chosen, coder, (rows, width), payload.dtype, request)


def _read(
    algorithm: Algorithm, codec: Codec, shape: tuple[int, int], dtype: torch.dtype, request: Request
) -> Stages:
    x = torch.empty(shape, dtype=dtype, device="meta")
    found = record_stages(algorithm, codec, x, request)
    if not codec.dynamic:
        return found
    pairs = zip(found, record_stages(algorithm, codec, x, request, gaussian=False), strict=True)
    return Stages(
        tuple(dataclasses.replace(at, dynamic=at.nbytes != least.nbytes) for at, least in pairs)
    )


@ambient_free
def record_stages(
    algorithm: Algorithm, codec: Codec, x: Tensor, request: Request, *, gaussian: bool = True
) -> Stages:
    """Return the stages of an algorithm for a ``meta`` or fake tensor; if its sizes are symbolic,
    so are those of the stages.

    Bytes that depend on values are those that Gaussian values need if ``gaussian``, else the fewest
    possible.
    """
    state = [codec.initial_state(x, request.ranks)] if codec.state is not None else []
    recorder = _Recorder(request)
    fixed = all(isinstance(size, int) for size in x.shape)
    with (
        nullcontext() if fixed else enable_python_dispatcher(),
        data_sized.foreseen(gaussian, recorder.read),
        operators.as_operators(),
        recorder,
    ):
        run(algorithm.run(x, request, codec, *state))
    return Stages(tuple(recorder.stages))


EXCHANGES = {
    getattr(space, name).default: kind
    for name, kind in KIND_OF.items()
    for space in (ops, messages.ops)
    if hasattr(space, name)
}
"""The exchanges that algorithms consist of, and their kinds in the cost model. torch 2.11 has no
messages between two ranks."""
WITH_FEEDBACK = operators.ops.encode_with_feedback.default
UNCOUNTED = ("used_bytes", "join")
"""Roles that are not stages: they read a few bytes, or move a result just computed."""


class _Recorder(TorchDispatchMode):
    """Record each coded operator and exchange as a stage, and the stages that each tensor depends
    on."""

    def __init__(self, request: Request):
        super().__init__()
        self.request = request
        self.stages: list[Stage] = []
        self.made_by: dict[int, tuple[int, ...]] = {}
        self.known: set[int] = set()  # stages from which sizes of the next exchange were read
        self.tensors: list[Tensor] = []  # kept alive, since ids of freed tensors are reused

    def read(self, value: Tensor) -> None:
        """Record that a size is read: the next exchange waits for the stages it depends on."""
        self.known.update(self.made_by.get(id(value), ()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = (
            _scattered(*args[:2])
            if EXCHANGES.get(func) == "all_to_all"
            else func(*args, **(kwargs or {}))
        )
        inputs, outputs = list(_tensors(args)), list(_tensors([result]))
        after = tuple(sorted({n for each in inputs for n in self.made_by.get(id(each), ())}))
        stage = self._stage(func, args, inputs, outputs)
        if stage is not None and stage.role == "exchange":
            after = tuple(sorted({*after, *self.known}))
            self.known.clear()
        if stage is not None:
            self.stages.append(dataclasses.replace(stage, after=after))
            after = (len(self.stages) - 1,)
            if func is WITH_FEEDBACK:  # the sent values are also decoded here, for the residual
                decoded = dataclasses.replace(stage, role="decode", after=after)
                self.stages.append(decoded)
        if after:
            for each in outputs:
                self.made_by[id(each)] = after
                self.tensors.append(each)
        if func is WITH_FEEDBACK:
            self.made_by[id(outputs[1])] = (len(self.stages) - 1,)
        return result

    def _stage(self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        if func in EXCHANGES:
            return self._exchange(EXCHANGES[func], inputs[0], args)
        role = operators.ROLES.get(func)
        if role is None or role in UNCOUNTED:
            return None
        if func is operators.ops.decode_and_sum_by_index.default:
            codec = operators.lookup(args[1])
            values = codec.slots(args[2]) * args[0].shape[0]
            return Stage(role=role, codec=codec.spec, values=values)
        if role not in ("encode", "decode"):
            return Stage(role=role, values=inputs[0].numel())
        codec, (rows, numel) = (
            operators.lookup(next(arg for arg in args if isinstance(arg, str))),
            (inputs if role == "encode" else outputs)[0].shape,
        )
        return Stage(role=role, codec=codec.spec, values=rows * codec.padded_numel(numel))

    def _exchange(self, kind: str, wire: Tensor, args: Any) -> Stage:
        nbytes = wire.numel() * wire.element_size()
        if not KINDS[kind].splits:
            by_messages = KINDS[kind].by_messages and self.request.by_messages
            return plain_exchange(kind, nbytes, by_messages=by_messages)
        _, received, sent, _ = args
        return all_to_all(
            nbytes, sent, received, self.request.rank, by_messages=self.request.by_messages
        )


def _scattered(wire: Tensor, received: Sequence[Any]) -> Tensor:
    """Return the result of an all-to-all without values. The operator itself would check each of
    the numbers of rows, one per rank, several times."""
    return wire.new_empty((sum(received), *wire.shape[1:]))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            yield from value
