"""Wrap the call of a compiled graph: hooks before it, and the graph's state as its last inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commpass.distributed import references
from commpass.distributed.dropped_gradients import takes_gradients
from commpass.distributed.flat import Flat
from commpass.distributed.inference_of_shapes import infers_shapes
from commpass.distributed.owners import Calls, HookCalls, part_of
from commpass.distributed.samples import Samples
from commpass.distributed.state.residuals import residual
from commpass.passes.results import ConstantInput, StateInput
from commpass.utils.running import Running, profiled, running

Compiler = Callable[..., Any]


@dataclass(frozen=True)
class OfParameters:
    """State that a site keeps, with the parameters that it belongs to.

    ``parameters`` are the numbers of the parameters whose state it is or whose gradients it serves;
    () if unknown. ``number`` is its number among states with the same place and parameters.
    """

    of: StateInput
    parameters: tuple[int, ...]
    number: int


def with_parameters(
    states: Sequence[StateInput], gm: fx.GraphModule, calls: Calls
) -> list[OfParameters]:
    outputs = gm.graph.output_node()
    found: list[OfParameters] = []
    for one in states:
        parameters = one.parameters or calls.parameters(outputs, one.reaches)
        earlier = [
            each for each in found if (each.of.place, each.parameters) == (one.place, parameters)
        ]
        found.append(OfParameters(one, parameters, len(earlier)))
    return found


def state_for(
    states: Sequence[StateInput], gm: fx.GraphModule, calls: Calls, direction: str
) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
    """Return a function that returns the state that each call of a graph takes after its inputs."""
    if isinstance(calls, HookCalls) and calls.parameters_of_flat:
        flats = [Flat(one, calls) for one in states]
        return lambda inputs: _of_call([flat.current() for flat in flats])
    found = with_parameters(states, gm, calls)
    return lambda inputs: _of_call(state_of(found, calls, direction, inputs))


def _of_call(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the state that a call changes: a copy if the call is no step."""
    return [each.clone() for each in found] if found and infers_shapes() else found


def state_of(
    states: Sequence[OfParameters], calls: Calls, direction: str, inputs: Sequence[Any]
) -> list[torch.Tensor]:
    """Return the state that a graph takes after its ``inputs``: that of the instance which calls
    it.

    It is a copy of a residual if nobody takes the gradients that the call computes.
    """
    if not states:
        return []
    owner = calls.owner(direction)
    found = []
    for one in states:
        part = part_of(owner, one.parameters)
        if one.of.source is None:
            kept = residual(one.of, one.number, calls.code, part)
            taken = calls.hook or calls.autograd or takes_gradients(part)
            found.append(kept if taken else kept.clone())
        else:
            key = (calls.code, one.of.place, one.number)
            found.append(references.reference(one.of, key, part, inputs))
    return found


def constants_of(constants: Sequence[ConstantInput], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return the constants that each call of a graph takes after its ``inputs``."""
    return [each.tensor() for each in constants]


def callable_of(compiled: Any) -> Compiler:
    """Return the function that a compiled graph calls: an attribute of Inductor's object."""
    inner: Compiler | None = getattr(compiled, "current_callable", None)
    return inner if inner is not None else compiled


def before_each_call(compiled: Any, hook: Callable[[], None], function: Compiler) -> Any:
    """Return a replacement for a compiled graph that calls ``hook``, then ``function``.

    Inductor's object is changed in place, since torch checks its type.
    """

    def run(inputs: list[Any]) -> Any:
        hook()
        return function(inputs)

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    if getattr(compiled, "current_callable", None) is None:
        return run
    compiled.current_callable = run
    return compiled


def with_more(function: Compiler, more: Callable[[Sequence[Any]], list[Any]]) -> Compiler:
    """Return a function whose last inputs are the result of ``more`` on the others."""

    def run(inputs: list[Any]) -> Any:
        inputs.extend(more(inputs))
        return function(inputs)

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def with_name(function: Compiler, name: str, labels: tuple[str, ...], samples: Samples) -> Compiler:
    """Return the function under a ``name`` that profilers show, with the ``labels`` of its sites.

    On some calls the sites are sampled.
    """

    def run(inputs: list[Any]) -> Any:
        with running(Running(labels, samples.next_sink())), profiled(name):
            return function(inputs)

    run._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def with_boxed_args(function: Compiler) -> Compiler:
    """Return the function in AOTAutograd's calling convention: one list of arguments."""
    from functorch.compile import make_boxed_func

    return function if getattr(function, "_boxed_call", False) else make_boxed_func(function)


@dataclass(frozen=True)
class Raising:
    """A compiled function that raises, so that errors reach the user from the call and not from the
    compiler."""

    error: Exception

    def __call__(self, *args: Any) -> Any:
        raise self.error
