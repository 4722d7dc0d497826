"""The residual of a tensor that holds the gradients of several parameters one after another.

The compiled exchange takes it as one tensor. It is kept, named, saved and loaded by parameter, and
each parameter owns its part of that tensor. So it stays right when parameters move to other
buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commpass.distributed.owners import HookCalls, Owner, local_part, owner_of
from commpass.distributed.state.residuals import move
from commpass.passes.results import StateInput

PLACE = "gradient"
"""The place name of the residual of a parameter's gradient, whatever bucket it is sent in."""


class Flat:
    """The residual of one exchange: flat, in the order of its parameters."""

    def __init__(self, state: StateInput, calls: HookCalls):
        self.state_input, self.calls = state, calls
        self.parameters: tuple[Tensor, ...] = ()
        self.whole: Tensor | None = None
        self.parts: list[tuple[Owner, Any, Tensor]] = []

    def current(self) -> Tensor:
        """Return the residual, with what other exchanges, a reset or a load have left for its
        parameters."""
        if self.whole is None or self.parameters is not self.calls.parameters_of_flat:
            kept, self.parameters = self.state_input, self.calls.parameters_of_flat
            self.whole = torch.zeros(kept.shape, dtype=kept.dtype, device=kept.device)
            views = views_of(self.whole, self.parameters)
            owners = [owner_of([parameter]) for parameter in self.parameters]
            self.parts = [(o, None, view) for o, view in zip(owners, views, strict=True)]
        for number, (owner, key, part) in enumerate(self.parts):
            if key not in owner.state or owner.state[key][1] is not part:
                one = dataclasses.replace(
                    self.state_input, place=PLACE, number=0, shape=tuple(part.shape)
                )
                self.parts[number] = owner, move(one, self.calls.code, owner, part), part
        return self.whole


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return each parameter's part of a flat tensor, in the memory layout of the parameter.

    Of a DTensor it is as large as this rank's part.
    """
    found, start = [], 0
    for parameter in map(local_part, parameters):
        part = flat.narrow(0, start, parameter.numel()).view(parameter.shape)
        dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        if dense:
            part = flat.as_strided(parameter.shape, parameter.stride(), start)
        found.append(part)
        start += parameter.numel()
    return found


def add_to_residual(hook: str, parameter: Tensor, values: Tensor) -> None:
    """Add ``values`` to the residual of a parameter's gradient in the exchanges of a ``hook``, if
    there is one."""
    for name, residual in owner_of([parameter]).state.values():
        if name.function == hook and name.local_site.startswith(f"{PLACE}/"):
            residual.add_(values)
