"""Compute a program in float64 from the definitions, with a bound of the rounding errors of a run.

A bound of the error accompanies every value (running error analysis): each operator adds its
rounding to the errors of its arguments. For sums over ranks, the terms are those of any order of
addition, and of any order of adding and scaling.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fuzz import quantised
from fuzz.program import COLLECTIVES, Case, Step, Where, aten, convert, instead, local
from torch import Tensor

ROUNDINGS = 8
"""The number of roundings of a value around a collective, beside one for each addend: scales and
sums that were moved past it."""


@dataclass(frozen=True)
class Bounded:
    """A value with its error bound.

    ``value`` is in float64 (int64 for integers), ``error`` is the most by which a run may differ
    from it, and ``dtype`` is that of the run.
    """

    value: Tensor
    error: Tensor
    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        return not self.dtype.is_floating_point


def rounded(
    value: Tensor, error: Tensor, dtype: torch.dtype, times: float = 1, of: Tensor | None = None
) -> Bounded:
    """Return a result that was rounded ``times`` times at the magnitude ``of`` (its own, if
    None)."""
    if not dtype.is_floating_point:
        return Bounded(value, torch.zeros_like(value, dtype=torch.float64), dtype)
    info = torch.finfo(dtype)
    size = (value.abs() if of is None else of) + error
    error = error + times * (info.eps / 2 * size + info.smallest_normal * info.eps)
    # If an overflow depends on rounding or order, any value is allowed.
    return Bounded(value, torch.where(size + error > info.max, torch.inf, error), dtype)


def given(x: Tensor) -> Bounded:
    """Return an exact input."""
    value = x.double() if x.dtype.is_floating_point else x
    return Bounded(value, torch.zeros(x.shape, dtype=torch.float64), x.dtype)


MOVES = {
    aten.view.default: aten.reshape.default,
    aten.reshape.default: aten.reshape.default,
    aten.permute.default: aten.permute.default,
    aten.unsqueeze.default: aten.unsqueeze.default,
    aten.squeeze.dim: aten.squeeze.dim,
    aten.expand.default: aten.expand.default,
    aten.slice.Tensor: aten.slice.Tensor,
}
"""Operators that move values, with the operator that does the same on a tensor of any memory
layout."""
LIPSCHITZ = {aten.relu.default: 0, aten.abs.default: 0, aten.neg.default: 0, aten.tanh.default: 8}
"""Functions whose results differ at most as much as their arguments, with the number of their
roundings."""


class Bounds:
    """Execute operators on bounded values."""

    def contiguous(self, x: Bounded) -> bool:
        return False

    def shape(self, x: Bounded) -> Sequence[int]:
        return x.value.shape

    def dtype(self, x: Bounded) -> torch.dtype:
        return x.dtype

    def note(self, *args: Any) -> None:
        pass

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if target in MOVES:
            move = MOVES[target]
            return Bounded(move(x.value, *args[1:]), move(x.error, *args[1:]), x.dtype)
        if target is aten.clone.default:
            return x
        if target is aten.split.Tensor:
            pairs = zip(x.value.split(*args[1:]), x.error.split(*args[1:]), strict=True)
            return [Bounded(value, error, x.dtype) for value, error in pairs]
        if target is operator.getitem:
            return x[args[1]]
        if target is aten.cat.default:
            dim = args[1] if len(args) > 1 else 0
            return _joined(x, x[0].dtype, dim)
        if target in (aten.full.default, aten.arange.default):
            return given(target(*args, **kwargs))
        if target in LIPSCHITZ:
            value = target(x.value)
            return rounded(value, x.error, x.dtype, LIPSCHITZ[target])
        if target is convert:
            return _cast(x, args[1])
        if target is aten.sum.dim_IntList:
            return self._sum(x, *args[1:])
        return {
            aten.mul.Tensor: self._mul,
            aten.mul.Scalar: self._mul,
            aten.div.Tensor: self._div,
            aten.div.Scalar: self._div,
            aten.gt.Scalar: self._above,
            aten.eq.Tensor: self._equal,
            aten.argmax.default: self._argmax,
            aten.add.Tensor: self._add,
            aten.sub.Tensor: self._sub,
            aten.mm.default: self._mm,
        }[target](*args, **kwargs)

    def _sum(self, x: Bounded, dims: list[int], keep: bool) -> Bounded:
        count = 1
        for dim in dims:
            count *= x.value.shape[dim]
        error, size = x.error.sum(dims, keep), x.value.abs().sum(dims, keep)
        return rounded(x.value.sum(dims, keep), error, x.dtype, count + 1, size)

    def _mul(self, x: Bounded, y: Any) -> Bounded:
        if not isinstance(y, Bounded):
            return rounded(x.value * y, _known(x.error * abs(y), x.value), x.dtype, 2)
        if x.exact:
            return rounded(x.value * y.value, x.error, x.dtype)
        error = x.error * y.value.abs() + x.value.abs() * y.error + x.error * y.error
        return rounded(x.value * y.value, _known(error, x.value * y.value), x.dtype)

    def _div(self, x: Bounded, y: float) -> Bounded:
        return rounded(x.value / y, x.error / abs(y), x.dtype, 2)

    def _add(self, x: Bounded, y: Bounded, alpha: float = 1) -> Bounded:
        if x.exact:
            return rounded(x.value + y.value * int(alpha), x.error, x.dtype)
        size = x.value.abs() + abs(alpha) * y.value.abs()
        error = _known(x.error + abs(alpha) * y.error, size)
        return rounded(x.value + alpha * y.value, error, x.dtype, 2, size)

    def _sub(self, x: Bounded, y: Bounded, alpha: float = 1) -> Bounded:
        return self._add(x, y, -alpha)

    def _above(self, x: Bounded, number: float) -> Bounded:
        unsure = ~((x.value - number).abs() > x.error)
        return Bounded((x.value > number).double(), unsure.double(), torch.bool)

    def _equal(self, x: Bounded, y: Bounded) -> Bounded:
        made = x.value == y.value
        return Bounded(made.double(), torch.zeros(made.shape, dtype=torch.float64), torch.bool)

    def _argmax(self, x: Bounded, dim: int, keep: bool) -> Bounded:
        """If values are not exact, any position may be that of the largest value."""
        place = x.value.argmax(dim, keep)
        sure = x.error.amax(dim, keep) == 0
        return Bounded(
            place.double(), torch.where(sure, 0.0, float(x.value.shape[dim])), torch.int64
        )

    def _mm(self, x: Bounded, y: Bounded) -> Bounded:
        a, b = x.value.abs(), y.value.abs()
        value = x.value @ y.value
        error = _known(x.error @ b + a @ y.error + x.error @ y.error, value)
        return rounded(value, error, x.dtype, x.value.shape[1] + 2, a @ b)


def _known(error: Tensor, value: Tensor) -> Tensor:
    """If the value is a number, replace a NaN error (infinity times zero) by infinity."""
    return torch.where(error.isnan() & value.isfinite(), torch.inf, error)


def _cast(x: Bounded, dtype: torch.dtype) -> Bounded:
    if not dtype.is_floating_point:
        assert x.exact, "numbers that were rounded become integers by chance"
        return x
    value, error = x.value.double(), x.error
    # has no infinity: an overflow becomes NaN or the largest number
    if dtype is torch.float8_e4m3fn:
        error = torch.where(value.isinf(), torch.inf, error)
        value = torch.where(value.isinf(), 0.0, value)
    wider = x.exact or torch.finfo(dtype).eps < torch.finfo(x.dtype).eps
    narrow = torch.finfo(dtype).max < torch.finfo(x.dtype).max if not x.exact else True
    return rounded(value, error, dtype, 0 if wider and not narrow else 1)


def computed(case: Case, inputs: Sequence[Sequence[Tensor]]) -> list[list[Bounded]]:
    """Return the outputs of each rank."""
    on = Bounds()
    env = [[given(x) for x in inputs[rank]] for rank in range(case.world)]
    for step in case.steps:
        taken = [[env[rank][number] for number in step.of] for rank in range(case.world)]
        for rank in range(case.world):
            where = Where(case, rank)
            if step.op in quantised.OPERATORS:
                env[rank].append(_approximate(step, *taken[rank]))
                continue
            if step.op not in COLLECTIVES:
                env[rank].append(local(on, step, taken[rank], where))
                continue
            ranks = case.dims[step.how["group"]].of(rank)
            for position in range(len(step.of)):
                if ranks is None:
                    env[rank].append(instead(on, step, taken[rank][position], where))
                else:
                    all_of_it = [taken[each][position] for each in ranks]
                    env[rank].append(_together(step, all_of_it, ranks, rank, case.world))
    return [[values[number] for number in case.outputs] for values in env]


def _approximate(step: Step, x: Bounded, y: Bounded | None = None) -> Bounded:
    """Return a quantised matrix, a product of codes or a norm, without quantisation. A finite error
    is given for the first alone, if its scale is from the values, and float16 cannot overflow."""
    value = x.value if y is None else x.value @ y.value.T
    error = torch.full_like(value, torch.inf)
    if step.how.get("scale") == "static":  # infinity is clamped
        value = torch.where(value.isfinite(), value, 0.0)
    elif step.op == "quantised" and value.numel() and x.dtype is not torch.float16:
        largest = (value.abs() + x.error).max()
        error = x.error + largest / 2 if bool(largest.isfinite()) else error
    return rounded(value, error, x.dtype)


def _together(
    step: Step, given: Sequence[Bounded], ranks: Sequence[int], rank: int, world: int
) -> Bounded:
    """Return what one rank of a group gets from a collective."""
    dtype, mine, size = given[0].dtype, ranks.index(rank), len(given)
    if step.op == "broadcast":
        return given[step.how["root"]]
    if step.op == "all_gather":
        return _joined(given, dtype)
    if step.op == "all_to_all":
        splits = step.how["splits"]
        parts = []
        for sender, x in zip(ranks, given, strict=True):
            even = [x.value.shape[0] // size] * size
            rows = [splits[sender][to] for to in ranks] if splits else even
            value, error = x.value.split(rows), x.error.split(rows)
            parts.append(Bounded(value[mine], error[mine], dtype))
        return _joined(parts, dtype)
    values, errors = torch.stack([x.value for x in given]), torch.stack([x.error for x in given])
    op = step.how["reduce"]
    if op in ("max", "min"):
        whole = Bounded(values.amax(0) if op == "max" else values.amin(0), errors.amax(0), dtype)
    else:
        total = rounded(values.sum(0), errors.sum(0), dtype, world + ROUNDINGS, values.abs().sum(0))
        by = size if op == "avg" else 1
        whole = Bounded(total.value / by if by > 1 else total.value, total.error / by, dtype)
    if step.op == "all_reduce":
        return whole
    rows = whole.value.shape[0] // size
    part = slice(mine * rows, (mine + 1) * rows)
    return Bounded(whole.value[part], whole.error[part], dtype)


def _joined(parts: Sequence[Bounded], dtype: torch.dtype, dim: int = 0) -> Bounded:
    value, error = [x.value for x in parts], [x.error for x in parts]
    return Bounded(torch.cat(value, dim), torch.cat(error, dim), dtype)
