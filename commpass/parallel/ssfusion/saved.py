"""The names of what is kept of each gradient, and which saved state can be continued with."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from commpass.distributed.owners import Code
from commpass.distributed.state.checks import Check
from commpass.distributed.state.names import Name
from commpass.errors import PolicyError
from commpass.parallel.ssfusion.planner import Weight

CODE = Code("", 0, "ssfusion")
"""The owner's function in the names of ``commpass.state_dict``."""
VELOCITY = "velocity"
"""The place of velocities in these names."""
WITH = (
    "{}: the state has velocities of ssfusion, which are for momentum, but ssfusion was called with"
    " momentum=0. Give momentum=... as in the run that saved the state, or leave the state out"
)
WITHOUT = (
    "{}: the state has no velocities of ssfusion, so it was saved without momentum, but ssfusion"
    " was called with momentum={:g}. Give momentum=0, or leave the state out"
)


def is_velocity(name: Name) -> bool:
    """Return whether a name is that of a velocity."""
    return name.function == CODE.name and name.site.startswith(f"{VELOCITY}/")


def check_of(weights: Iterable[Weight], momentum: float) -> Check:
    """Return the check that state of these gradients has velocities just if there is momentum."""

    def refuse(names: Collection[Name]) -> None:
        velocities = [name for name in names if is_velocity(name)]
        if velocities and not momentum:
            raise PolicyError(WITH.format(min(name.label for name in velocities)))
        known = {name.parameter for name in velocities}
        lacking = [name for name in names if name.parameter not in known]
        if lacking and momentum:
            raise PolicyError(WITHOUT.format(min(name.label for name in lacking), momentum))

    return Check(CODE.name, frozenset(id(each.parameter) for each in weights), refuse)
