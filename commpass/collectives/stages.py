"""The stages of an algorithm, read off a run of its own steps with tensors that hold no values.

What an algorithm costs is therefore never written beside it: an algorithm that is changed, or a new
one, has the stages that it has.
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
from commpass.plan.stage import Stage, all_to_all
from commpass.utils.ambient import ambient_free


@dataclass(frozen=True)
class Payload:
    """The tensor that one rank gives to a collective: ``numel`` values, of which one entry of the
    first dimension has ``width``."""

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
        """Bytes that the rank hands to collectives."""
        return sum(stage.nbytes for stage in self.stages)

    @property
    def dynamic_bytes(self) -> int:
        """Of ``wire_bytes``, those whose number depends on the values."""
        return sum(stage.nbytes for stage in self.stages if stage.dynamic)

    def values(self, role: str) -> int:
        """Values that are encoded, or decoded."""
        return sum(stage.values for stage in self.stages if stage.role == role)


@lru_cache(maxsize=4096)
def read_stages(kind: str, spec: str, code: str, payload: Payload, request: Request) -> Stages:
    """The stages of an algorithm with a codec for a tensor of known size.

    A Gaussian's bytes stand for those that depend on values; which do is found by a second run in
    which they are none.
    """
    chosen, coder = algorithm(kind, spec), codec(code)
    if kind == "all_to_all" and request.sent is not None:
        rows, width = sum(request.sent), max(payload.width, 1)
    else:  # of what has a row for each rank, only how long those are matters
        rows, width = request.ranks, payload.numel // request.ranks
        if kind not in ("all_to_all", "reduce_scatter"):
            rows, width = 1, payload.numel
    with unset_fake_temporarily():  # a meta tensor is enough, and takes a third of the time
        return _read(chosen, coder, (rows, width), payload.dtype, request)


def _read(
    algorithm: Algorithm, coder: Codec, shape: tuple[int, int], dtype: torch.dtype, request: Request
) -> Stages:
    x = torch.empty(shape, dtype=dtype, device="meta")
    found = record_stages(algorithm, coder, x, request)
    if not coder.dynamic:
        return found
    pairs = zip(found, record_stages(algorithm, coder, x, request, gaussian=False), strict=True)
    return Stages(
        tuple(dataclasses.replace(at, dynamic=at.nbytes != least.nbytes) for at, least in pairs)
    )


@ambient_free
def record_stages(
    algorithm: Algorithm, coder: Codec, x: Tensor, request: Request, *, gaussian: bool = True
) -> Stages:
    """The stages of an algorithm for a tensor on ``meta``, or a fake one, whose sizes may be
    symbolic: then so are those of the stages. Bytes that depend on values are a ``gaussian``'s, or
    else the fewest that there can be."""
    state = [coder.initial_state(x, request.ranks)] if coder.state is not None else []
    recorder = _Recorder(request)
    fixed = all(isinstance(size, int) for size in x.shape)
    with (
        nullcontext() if fixed else enable_python_dispatcher(),
        data_sized.foreseen(gaussian, recorder.read),
        operators.as_operators(),
        recorder,
    ):
        run(algorithm.run(x, request, coder, *state))
    return Stages(tuple(recorder.stages))


KIND_OF = {
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
EXCHANGES = {
    getattr(space, name).default: kind
    for name, kind in KIND_OF.items()
    for space in (ops, messages.ops)
    if hasattr(space, name)
}
"""The exchanges that algorithms are made of, and the kinds that the cost model has them by. torch
2.11 has no messages between two ranks."""
WITH_FEEDBACK = operators.ops.encode_with_feedback.default
UNCOUNTED = ("used_bytes", "join")
"""Roles that are no stage: they read a few bytes, or move what was just computed."""


class _Recorder(TorchDispatchMode):
    """Notes each coded operator and exchange as a stage, and from which stages every tensor is
    made."""

    def __init__(self, request: Request):
        super().__init__()
        self.request = request
        self.stages: list[Stage] = []
        self.made_by: dict[int, tuple[int, ...]] = {}
        self.known: set[int] = set()  # stages from which sizes of the next exchange were read
        self.tensors: list[Tensor] = []  # kept, since a number of one that is gone is used again

    def read(self, value: Tensor) -> None:
        """A size is read: the next exchange waits for whatever it comes from."""
        self.known.update(self.made_by.get(id(value), ()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = (
            _scattered(*args[:2])
            if EXCHANGES.get(func) == "all_to_all"
            else func(*args, **(kwargs or {}))
        )
        taken, given = list(_tensors(args)), list(_tensors([result]))
        after = tuple(sorted({n for each in taken for n in self.made_by.get(id(each), ())}))
        stage = self._stage(func, args, taken, given)
        if stage is not None and stage.role == "exchange":
            after = tuple(sorted({*after, *self.known}))
            self.known.clear()
        if stage is not None:
            self.stages.append(dataclasses.replace(stage, after=after))
            after = (len(self.stages) - 1,)
            if func is WITH_FEEDBACK:  # what is sent is decoded here too, to know what is left
                decoded = dataclasses.replace(stage, role="decode", after=after)
                self.stages.append(decoded)
        if after:
            for each in given:
                self.made_by[id(each)] = after
                self.tensors.append(each)
        if func is WITH_FEEDBACK:
            self.made_by[id(given[1])] = (len(self.stages) - 1,)
        return result

    def _stage(self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        if func in EXCHANGES:
            return self._exchange(EXCHANGES[func], inputs[0], args)
        role = operators.ROLES.get(func)
        if role is None or role in UNCOUNTED:
            return None
        if func is operators.ops.decode_and_sum_by_index.default:
            coder = operators.named(args[1])
            values = coder.slots(args[2]) * args[0].shape[0]
            return Stage(role=role, codec=coder.spec, values=values)
        if role not in ("encode", "decode"):
            return Stage(role=role, values=inputs[0].numel())
        coder, (rows, numel) = (
            operators.named(next(arg for arg in args if isinstance(arg, str))),
            (inputs if role == "encode" else outputs)[0].shape,
        )
        return Stage(role=role, codec=coder.spec, values=rows * coder.padded_numel(numel))

    def _exchange(self, kind: str, wire: Tensor, args: Any) -> Stage:
        nbytes = wire.numel() * wire.element_size()
        if kind != "all_to_all":
            return Stage(
                role="exchange",
                kind=kind,
                nbytes=nbytes,
                leaving=nbytes,
                by_messages=kind == "all_gather" and self.request.by_messages,
            )
        _, received, sent, _ = args
        return all_to_all(
            nbytes, sent, received, self.request.rank, by_messages=self.request.by_messages
        )


def _scattered(wire: Tensor, received: Sequence[Any]) -> Tensor:
    """What an all-to-all gives, whose rows have no values. The operator itself would look at each
    number of rows several times, of which there are as many as ranks."""
    return wire.new_empty((sum(received), *wire.shape[1:]))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments, and in lists there."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            yield from value
