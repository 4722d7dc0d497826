"""Check what ``compress_outer`` is given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from commpass.distributed.integration import refuse_if_exchanged
from commpass.errors import PolicyError
from commpass.groups import need_group
from commpass.parallel.outer.replicas import KEY
from commpass.parallel.refusals import wrong_argument

CALL = "compress_outer"


@dataclass(frozen=True)
class Target:
    """What is averaged, and by whom.

    - ``model``: has the parameters; ``name`` describes the target.
    - ``group`` or ``manager``: who the replicas are.
    - ``attach``: gives the integration to an object of torchft, which makes the outer steps from
      then on; ``detach`` undoes that. None for a module.
    - ``keeps_parameters``: that object has a copy of the parameters itself.
    """

    model: nn.Module
    name: str
    group: dist.ProcessGroup | None = None
    manager: Any = None
    attach: Callable[[Any], None] | None = None
    detach: Callable[[], None] | None = None
    keeps_parameters: bool = False


def check_target(
    target: Any, group: dist.ProcessGroup | None, manager: Any, model: nn.Module | None
) -> Target:
    """Return what the arguments mean. Raise PolicyError if they are not possible."""
    if isinstance(target, nn.Module):
        found = _module(target, group, manager, model)
    elif _is_instance("torchft.local_sgd", target, "LocalSGD", "DiLoCo"):
        from commpass.parallel.outer.torchft import target_of

        for name, argument in (("group", group), ("manager", manager)):
            if argument is not None:
                raise PolicyError(
                    f"{CALL}: {type(target).__name__} has a Manager, which knows the replicas:"
                    f" leave out {name}="
                )
        found = target_of(target, model)
    else:
        needed = "a module, or a LocalSGD or DiLoCo of torchft.local_sgd"
        if _is_instance("torchft.manager", target, "Manager"):
            needed += ": write compress_outer(model, policy, manager=manager)"
        raise PolicyError(wrong_argument(CALL, "target", target, needed))
    _check_parameters(found.model)
    if found.manager is not None and KEY in found.manager._user_state_dicts:
        raise PolicyError(
            f"{CALL}: this Manager already has the outer steps of another model: give each model a"
            " Manager, or both as one module, or call close() on the first integration"
        )
    return found


def _is_instance(module: str, value: Any, *names: str) -> bool:
    """Whether a value is of one of these classes, or of a subclass, if the module is loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in names))


def _module(
    module: nn.Module, group: dist.ProcessGroup | None, manager: Any, model: nn.Module | None
) -> Target:
    if model is not None:
        raise PolicyError(f"{CALL}: model= is for objects of torchft: leave it out for a module")
    if manager is not None:
        if group is not None:
            raise PolicyError(f"{CALL}: give group= or manager=, not both")
        if not _is_instance("torchft.manager", manager, "Manager"):
            needed = "a Manager of torchft"
            raise PolicyError(wrong_argument(CALL, "manager", manager, needed))
        from commpass.parallel.outer.torchft import check_manager

        check_manager(manager)
        return Target(module, type(module).__name__, manager=manager)
    need_group(CALL)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        needed = "a process group that this rank is in, such as mesh['replicate'].get_group()"
        raise PolicyError(wrong_argument(CALL, "group", group, needed))
    return Target(module, type(module).__name__, group)


def _check_parameters(model: nn.Module) -> None:
    named = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in named.values()):
        raise PolicyError(
            f"{CALL}: {type(model).__name__} has no parameter that requires a gradient, so there is"
            " nothing to send: give the model that is trained"
        )
    for name, parameter in named.items():
        if parameter.requires_grad and parameter.is_complex():
            raise PolicyError(
                f"{CALL}: {name} is {parameter.dtype}, and codecs are for real numbers: keep a real"
                " parameter and use torch.view_as_complex in the module"
            )
        if parameter.is_meta:
            raise PolicyError(
                f"{CALL}: {name} is on the meta device, so it has no values: give the model its"
                " values before"
            )
    refuse_if_exchanged(model, "", CALL, (CALL,))
