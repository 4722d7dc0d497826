"""A compiled graph whose error budget is checked on its first calls.

It is compiled anew if a site turns out to be over its budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commpass.distributed.budget import Check, Key
from commpass.distributed.inference_of_shapes import infers_shapes
from commpass.passes import PassContext

_suspended: ContextVar[bool] = ContextVar("_suspended", default=False)


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Call graphs as they were last, without checks, within this context.

    A transfer that is repeated must arrive with the same bits.
    """
    token = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(token)


Function = Callable[[list[Any]], Any]
Rebuild = Callable[["Built", Mapping[Key, str]], "Built | None"]


@dataclass(frozen=True)
class Built:
    """A graph as it is compiled now.

    ``compiled`` is the result of the compiler, ``function`` what is called with the graph's inputs.
    ``strides`` are the strides that Inductor reports for its outputs, if it does.
    """

    compiled: Any
    function: Function
    check: Check
    strides: Any
    outcome: PassContext


class Checked:
    """Call a graph, and check its sites against their error budget.

    ``rebuild`` gets the sites that are over their budget, with the reasons. It compiles the graph
    without them, or returns None if none of them is in this graph. ``graphs`` are all graphs that
    were compiled of the same code for other sizes. The latest of them is checked. What is over its
    budget there is left uncompressed in all graphs whose check it ended.

    A backward graph may recompute sites of ``forward`` graphs, which check them. ``is_behind`` then
    returns whether one of these sites is still compressed here, and no longer there.
    """

    _boxed_call = True

    def __init__(
        self,
        built: Built,
        rebuild: Rebuild,
        graphs: weakref.WeakSet[Checked],
        forward: Collection[Checked] = (),
        is_behind: Callable[[Built], bool] = lambda built: False,
    ):
        self.graphs, self.forward, self.is_behind = graphs, forward, is_behind
        self.over: dict[Key, str] = {}
        self.function = built.function
        self.built: Built | None = built
        self.rebuild = rebuild
        self.strides = built.strides
        self.output_strides: tuple[tuple[int, ...] | None, ...] = ()

    def __call__(self, inputs: list[Any]) -> Any:
        if _suspended.get() or (self.is_checking and infers_shapes()):
            return self.function(inputs)
        for each in list(self.graphs):
            if each is not self and each.is_checking:
                each.compare_latest()  # all ranks have the findings of another graph by now
        self.compare_latest()
        if self.built is None:
            return self.function(inputs)
        check = self.built.check
        check.begin()
        try:
            outputs = self.function(inputs)
        finally:
            check.end()
        if self.strides is not None and not self.output_strides:
            strides = (x.stride() if isinstance(x, Tensor) else None for x in outputs)
            self.output_strides = tuple(strides)
        return outputs

    @property
    def is_checking(self) -> bool:
        """Whether its check, or that of the forward graph, is still going on."""
        return self.built is not None and (
            not self.built.check.done or any(each.is_checking for each in self.forward)
        )

    def compare_latest(self) -> None:
        """Compare the readings of the latest call with those of all ranks, and recompile if
        needed."""
        if self.built is None:
            return
        had_ended = self.built.check.done
        if not had_ended and (found := self.built.check.collect()):
            for each in {self, *self.graphs}:
                each.over |= found
        if self.over or self.is_behind(self.built):
            self._recompile()
            if had_ended:
                self.built.check.end_early()
        if not self.is_checking:
            release(self.graphs)

    def _recompile(self) -> None:
        """Compile the graph again without the sites that are over their budget.

        If that raises, the next call tries again, since other ranks leave those sites uncompressed.
        """
        assert self.built is not None
        made = self.rebuild(self.built, self.over)
        self.over = {}
        if made is not None:
            self.built = _with_strides(made, self.strides, self.output_strides)
            self.function = self.built.function

    def end_check(self) -> None:
        """End the check, because the same code is compiled for other inputs.

        Other ranks may not call this graph as often as this one. It can be compiled again until the
        new check has ended too.
        """
        self.compare_latest()
        if self.built is not None:
            self.built.check.end_early()

    def drop(self) -> None:
        """Keep only the function that is called. Drop the graph, its copies, and ``rebuild``."""
        self.built = None
        del self.rebuild, self.is_behind


def release(graphs: weakref.WeakSet[Checked]) -> None:
    """Drop what could recompile these graphs once the latest check has ended.

    A graph keeps it while one of its sites still has to be left uncompressed.
    """
    if not any(each.is_checking for each in graphs):
        for each in graphs:
            if each.built is not None and not each.over:
                each.drop()


def _with_strides(built: Built, expected: Any, found: Sequence[tuple[int, ...] | None]) -> Built:
    """Return a graph whose outputs have the memory layout that they had before.

    Code that was compiled for them (the backward graph, for example) relies on it. ``expected`` are
    Inductor's strides, which may be symbolic; ``found`` those of a call.
    """
    if expected is None or built.strides is None or list(expected) == list(built.strides):
        return built
    differing = {
        number: (before, found[number])
        for number, (before, now) in enumerate(zip(expected, built.strides, strict=True))
        if before is not None and before != now
    }

    function = built.function  # a separate name: the called function must not keep the graph alive

    def run(inputs: list[Any]) -> Any:
        outputs = list(function(inputs))
        for number, (strides, example) in differing.items():
            outputs[number] = _with_layout(outputs[number], strides, example or ())
        return tuple(outputs)

    return dataclasses.replace(built, function=run)


def _with_layout(x: Tensor, strides: Sequence[str], example: Sequence[int]) -> Tensor:
    """Copy a tensor to these strides.

    If they are symbolic, its dimensions get the memory order of an example.
    """
    if all(stride.isdigit() for stride in map(str, strides)):
        exact = [int(stride) for stride in strides]
        return torch.empty_strided(x.shape, exact, dtype=x.dtype, device=x.device).copy_(x)
    order = sorted(range(x.dim()), key=lambda dim: -example[dim])
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
