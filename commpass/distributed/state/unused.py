"""Warn of residuals that were loaded and that no exchange takes.

They are those of another policy, or of exchanges that the program no longer makes, and would be
saved again and again but never sent. A site that has not run yet may still take its residual, and
the first steps of some integrations send no codes. So the warning is given when residuals are saved
again after many changes of their parameters.
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

MOST_CHANGES = 32
"""So many changes of a parameter's values may be those of loads, of averages that are swapped in,
and of first steps that send no codes. An optimizer makes one or two in each step."""
NAMED = 3
"""So many residuals are named in the warning."""
_warned: list[bool] = []


@dataclass(frozen=True)
class _Before:
    """A parameter, and how often its values had been changed when residuals were loaded for it."""

    parameter: TensorWeakRef
    changes: int

    def trained(self) -> bool:
        """Return whether it was changed by many steps."""
        parameter = self.parameter()
        return parameter is not None and _changes(parameter) > self.changes + MOST_CHANGES


def _changes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class Trained:
    """Parameters by name. ``name in trained`` tells whether many steps were taken since."""

    _before: dict[str, _Before] = field(default_factory=dict)

    def watch(self, model: nn.Module | None, names: Collection[str]) -> None:
        """Observe some parameters of a model from now on."""
        known = parameter_names(model) if model is not None else {}
        for parameter in model.parameters() if model is not None else ():
            name = known.get(id(parameter))
            if name is not None and name in names:
                self._before[name] = _Before(TensorWeakRef(parameter), _changes(parameter))

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
    "%s not sent: no exchange has taken %s, although the parameters were changed many times since"
    " the load. If this run sends no sparse gradients, call commpass.reset_state(model) to drop"
    " them; or give the policy with the sparse codec that saved them"
)
