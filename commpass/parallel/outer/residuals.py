"""Undo or drop the error feedback of outer steps, when a step does not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from commpass.distributed.owners import owner_of
from commpass.distributed.state.loaded import clear_loaded
from commpass.parallel.outer.means import HOOK


def residuals_of(parameter: Tensor) -> Iterator[Tensor]:
    """Yield what outer steps have not sent yet of a parameter: one tensor for each group so
    far."""
    for name, residual in owner_of([parameter]).state.values():
        if name.hook == HOOK:
            yield residual


class Snapshot:
    """The residuals of some parameters before an outer step."""

    def __init__(self, parameters: Iterable[Tensor]):
        self._saved: list[tuple[Tensor, Tensor | None]] = []
        for parameter in parameters:
            found = list(residuals_of(parameter))
            # A new group's residual begins with the sum of those of former groups.
            self._saved.append((parameter, sum_of(found) if found else None))

    @torch.no_grad()
    def restore(self) -> None:
        """Set the residuals back, because the step was not applied."""
        for parameter, saved in self._saved:
            for number, residual in enumerate(residuals_of(parameter)):
                if number == 0 and saved is not None:
                    residual.copy_(saved)
                else:
                    residual.zero_()


def sum_of(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@torch.no_grad()
def drop(parameters: Iterable[Tensor]) -> None:
    """Set the residuals of some parameters to zero, also those loaded and not used yet."""
    some = list(parameters)
    for parameter in some:
        for residual in residuals_of(parameter):
            residual.zero_()
    clear_loaded(some, HOOK)
