"""Warn of residuals that were loaded and that no exchange takes.

They are those of another policy, or of exchanges that the program no longer makes, and would be
saved again and again but never sent. A site that has not run yet may still take its residual. So
the warning is given when residuals are saved again after their parameters have been trained.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from commpass.distributed.owners import parameter_names
from commpass.groups import is_first_rank
from commpass.utils.printable import plural

log = logging.getLogger("commpass")

MOST_LOADS = 4
"""So many changes of a parameter's values may be those of loading a checkpoint and of giving all
ranks the same values. More of them are steps."""
NAMED = 3
"""So many residuals are named in the warning."""
_warned: list[bool] = []


@dataclass(frozen=True)
class _Before:
    """A parameter as it was when residuals were loaded for it.

    ``changes`` counts the changes of its values, and of its gradient if it has one.
    """

    parameter: TensorWeakRef
    changes: int
    gradient: TensorWeakRef | None
    gradient_changes: int

    def trained(self) -> bool:
        """Return whether it has a gradient of a later backward, or was changed by steps."""
        parameter = self.parameter()
        if parameter is None:
            return False
        before = self.gradient() if self.gradient is not None else None
        gradient = parameter.grad
        is_old = gradient is before and _changes(gradient) == self.gradient_changes
        if gradient is not None and not is_old:
            return True
        return _changes(parameter) > self.changes + MOST_LOADS


def _changes(tensor: Tensor | None) -> int:
    """Return how often a tensor was changed in place, as torch counts it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


@dataclass
class Trained:
    """Parameters by name, of which ``name in trained`` tells whether they were trained since."""

    _before: dict[str, _Before] = field(default_factory=dict)

    def watch(self, model: nn.Module | None, names: Collection[str]) -> None:
        """Observe some parameters of a model from now on."""
        known = parameter_names(model) if model is not None else {}
        for parameter in model.parameters() if model is not None else ():
            name, gradient = known.get(id(parameter)), parameter.grad
            if name is not None and name in names:
                self._before[name] = _Before(
                    TensorWeakRef(parameter),
                    _changes(parameter),
                    None if gradient is None else TensorWeakRef(gradient),
                    _changes(gradient),
                )

    def __contains__(self, name: str) -> bool:
        return name in self._before and self._before[name].trained()


def warn_of_unused(labels: Sequence[str]) -> None:
    """Warn once in a process, on the first rank, of residuals that are not sent."""
    labels = list(dict.fromkeys(labels))  # those of several groups and ranks have one
    if not labels or _warned or not is_first_rank():
        return
    _warned.append(True)
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    log.warning(UNUSED, plural(len(labels), "loaded residual"), ", ".join(labels[:NAMED]) + more)


UNUSED = (
    "%s not sent: no exchange has taken %s, although the parameters were trained since the load."
    " Call commpass.reset_state(model) to drop them, or give the policy with the sparse codec that"
    " saved them"
)
