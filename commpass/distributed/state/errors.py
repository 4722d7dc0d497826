"""Errors for state whose model or owner is another one than expected."""

from __future__ import annotations

from collections.abc import Iterable

from commpass.distributed.state.names import Name
from commpass.errors import PolicyError, nearest


def other_model(some: Iterable[str], names: Iterable[str], have: str, value: str) -> PolicyError:
    """Return the error that ``some`` of what ``have`` says is not among ``names``, what ``value``
    says."""
    some, names = sorted(some), sorted(names)
    return PolicyError(
        "error feedback of another model (or of this one, if the mesh or what is compiled has"
        " changed: then leave the state out, and the first step begins with zeros):"
        f" {have} {', '.join(some)}; {value} {', '.join(names)}" + nearest(some[0], names)
    )


def ambiguous(name: Name, subject: str) -> PolicyError:
    """Return the error that the owner of a residual is unknown."""
    return PolicyError(
        f"error feedback of {name.label} is {subject} several instances or functions of one name,"
        " so its owner is unknown. Give the model, as in commpass.state_dict(model) and"
        " commpass.load_state_dict(state, model), and give functions different names"
    )


def lacks_ranks(label: str, missing: Iterable[int], first: str) -> PolicyError:
    """Return the error for state of which this rank needs more ranks than it was given."""
    return PolicyError(
        f"{label}: the state lacks rank {', '.join(map(str, sorted(missing)))} of the group that"
        f" begins at {first}; give every rank what commpass.state_dict(of=...) lists"
    )
