"""How a compiled graph is called: something first, with the state that it keeps as its last
inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commpass.distributed import references, state
from commpass.distributed.flat import Flat
from commpass.distributed.owners import Calls, HookCalls, part_of
from commpass.distributed.samples import Samples
from commpass.passes.constants import ConstantInput
from commpass.passes.rewrite import StateInput
from commpass.utils.running import Running, profiled, running

Compiler = Callable[..., Any]


@dataclass(frozen=True)
class OfParameters:
    """State that a site keeps, the numbers of the parameters that it is of, or whose gradients it
    serves (() if that is not known), and which one of its place it is among those that have the
    same."""

    of: StateInput
    parameters: tuple[int, ...]
    number: int


def owner_of(states: Sequence[StateInput], gm: fx.GraphModule, calls: Calls) -> list[OfParameters]:
    outputs = gm.graph.output_node()
    found: list[OfParameters] = []
    for one in states:
        parameters = one.parameters or calls.parameters(outputs, one.reaches)
        like = [
            each for each in found if (each.of.place, each.parameters) == (one.place, parameters)
        ]
        found.append(OfParameters(one, parameters, len(like)))
    return found


def state_for(
    states: Sequence[StateInput], gm: fx.GraphModule, calls: Calls, direction: str
) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
    """What gives the state that each call of a graph needs beside its inputs."""
    if isinstance(calls, HookCalls) and calls.parameters_of_flat:
        flats = [Flat(one, calls) for one in states]
        return lambda inputs: [flat.current() for flat in flats]
    return functools.partial(state_of, owner_of(states, gm, calls), calls, direction)


def state_of(
    states: Sequence[OfParameters], calls: Calls, direction: str, inputs: Sequence[Any]
) -> list[torch.Tensor]:
    """The state that a graph is called with beside its ``inputs``: that of the instance whose call
    it is."""
    if not states:
        return []
    owner = calls.owner(direction)
    found = []
    for one in states:
        part = part_of(owner, one.parameters)
        if one.of.source is None:
            found.append(state.residual(one.of, one.number, calls.code, part))
        else:
            key = (calls.code, one.of.place, one.number)
            found.append(references.reference(one.of, key, part, inputs))
    return found


def constants_of(constants: Sequence[ConstantInput], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The constants that each call of a graph needs beside its ``inputs``."""
    return [each.tensor() for each in constants]


def callable_of(compiled: Any) -> Compiler:
    """What a compiled graph calls: Inductor's object has it inside."""
    inner: Compiler | None = getattr(compiled, "current_callable", None)
    return inner if inner is not None else compiled


def before_each_call(compiled: Any, hook: Callable[[], None], function: Compiler) -> Any:
    """What calls ``hook``, then ``function``, in the place of a compiled graph. Inductor's object
    stays itself: torch asks for its type."""

    def run(inputs: list[Any]) -> Any:
        hook()
        return function(inputs)

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    if getattr(compiled, "current_callable", None) is None:
        return run
    compiled.current_callable = run
    return compiled


def with_more(function: Compiler, more: Callable[[Sequence[Any]], list[Any]]) -> Compiler:
    """A function whose last inputs come from ``more``, which is given the others."""

    def run(inputs: list[Any]) -> Any:
        inputs.extend(more(inputs))
        return function(inputs)

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def named(function: Compiler, name: str, labels: tuple[str, ...], samples: Samples) -> Compiler:
    """The function, which profilers show by ``name`` and whose sites have ``labels``; on some calls
    they are sampled."""

    def run(inputs: list[Any]) -> Any:
        with running(Running(labels, samples.next_sink())), profiled(name):
            return function(inputs)

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def with_boxed_args(function: Compiler) -> Compiler:
    """The calling convention of AOTAutograd: one list of arguments."""
    from functorch.compile import make_boxed_func

    return function if getattr(function, "_boxed_call", False) else make_boxed_func(function)


@dataclass(frozen=True)
class Raising:
    """A compiled function that raises: errors then reach the user as they are, from the call, and
    not out of a compiler."""

    error: Exception

    def __call__(self, *args: Any) -> Any:
        raise self.error
