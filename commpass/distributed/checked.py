"""A compiled graph whose error budget is checked on its first calls, and which is compiled anew
where a site turns out to be over it."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commpass.distributed.budget import Check, Key
from commpass.passes import PassResult

_held: ContextVar[bool] = ContextVar("_held", default=False)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Within it graphs are called as they were last, and not checked: what is sent once more must
    arrive with the same bits."""
    token = _held.set(True)
    try:
        yield
    finally:
        _held.reset(token)


Function = Callable[[list[Any]], Any]
Rebuild = Callable[["Built", Mapping[Key, str]], "Built | None"]


@dataclass(frozen=True)
class Built:
    """A graph as it is compiled now: what compiled it gave ``compiled``; ``function`` is what is
    called with its inputs. ``strides`` are Inductor's, of its outputs, where it says them."""

    compiled: Any
    function: Function
    check: Check
    strides: Any
    outcome: PassResult


class Checked:
    """Calls a graph, and holds it to its budget.

    ``rebuild`` is given the sites that are over their budget, with the reasons. It compiles the
    graph without them, or returns None where none of them is in this graph. ``graphs`` are all that
    were compiled of the same code, for other sizes: of these the latest is checked, and what is
    over its budget there is left alone in all whose check it ended.
    """

    _boxed_call = True

    def __init__(self, built: Built, rebuild: Rebuild, graphs: weakref.WeakSet[Checked]):
        self.graphs = graphs
        self.over: dict[Key, str] = {}
        self.function = built.function
        self.built: Built | None = built
        self.rebuild = rebuild
        self.strides = built.strides
        self.found: tuple[tuple[int, ...] | None, ...] = ()

    def __call__(self, inputs: list[Any]) -> Any:
        if _held.get():
            return self.function(inputs)
        for each in list(self.graphs):
            if each is not self and each.checks:
                each.compare_latest()  # what another graph found is known to all ranks by now
        self.compare_latest()
        if self.built is None:
            return self.function(inputs)
        check = self.built.check
        check.begin()
        try:
            outputs = self.function(inputs)
        finally:
            check.end()
        if self.strides is not None and not self.found:
            self.found = tuple(x.stride() if isinstance(x, Tensor) else None for x in outputs)
        return outputs

    @property
    def checks(self) -> bool:
        """Whether its check goes on."""
        return self.built is not None and not self.built.check.done

    def compare_latest(self) -> None:
        """Compares the readings of the latest call with those of all ranks, and compiles anew if
        that says so."""
        if self.built is None:
            return
        left = self.built.check.done
        if not left and (found := self.built.check.collect()):
            for each in {self, *self.graphs}:
                each.over |= found
        if self.over:
            self._leave_alone()
            if left:
                self.built.check.leave()
        if self.built.check.done:
            release(self.graphs)

    def _leave_alone(self) -> None:
        """Compiles the graph again without the sites that are over their budget. Where that raises,
        the next call tries again: other ranks leave them alone."""
        assert self.built is not None
        made = self.rebuild(self.built, self.over)
        self.over = {}
        if made is not None:
            self.built = _with_strides(made, self.strides, self.found)
            self.function = self.built.function

    def leave(self) -> None:
        """Ends the check: the same code is compiled for other inputs, and other ranks may not call
        this graph as often as this one. It can be compiled again until that check has ended too."""
        self.compare_latest()
        if self.built is not None:
            self.built.check.leave()

    def drop(self) -> None:
        """Only what is called stays: the graph that it was compiled from, and copies of that, go
        with all that could compile it again."""
        self.built = None
        del self.rebuild


def release(graphs: weakref.WeakSet[Checked]) -> None:
    """Where the check of the latest of these graphs has ended: drops what could compile them again,
    but where a site has still to be left alone."""
    if not any(each.checks for each in graphs):
        for each in graphs:
            if each.built is not None and not each.over:
                each.drop()


def _with_strides(built: Built, expected: Any, found: Sequence[tuple[int, ...] | None]) -> Built:
    """A graph whose outputs lie in memory as they did before: what was compiled for them (the
    backward graph, say) takes that for granted. ``expected`` are Inductor's strides, maybe
    symbolic, and ``found`` those of a call."""
    if expected is None or built.strides is None or list(expected) == list(built.strides):
        return built
    differing = {
        number: (before, found[number])
        for number, (before, now) in enumerate(zip(expected, built.strides, strict=True))
        if before is not None and before != now
    }

    function = built.function  # alone: what is called must not keep the graph

    def run(inputs: list[Any]) -> Any:
        outputs = list(function(inputs))
        for number, (strides, example) in differing.items():
            outputs[number] = _laid_out(outputs[number], strides, example or ())
        return tuple(outputs)

    return dataclasses.replace(built, function=run)


def _laid_out(x: Tensor, strides: Sequence[str], example: Sequence[int]) -> Tensor:
    """The same values with these strides; where those are symbolic, with dimensions in the order in
    memory of an example."""
    if all(stride.isdigit() for stride in map(str, strides)):
        exact = [int(stride) for stride in strides]
        return torch.empty_strided(x.shape, exact, dtype=x.dtype, device=x.device).copy_(x)
    order = sorted(range(x.dim()), key=lambda dim: -example[dim])
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
