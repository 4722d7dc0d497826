"""Check which models can get an integration: only one may exchange gradients, and DDP has one comm
hook."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commpass.distributed import summary
from commpass.errors import PolicyError
from commpass.policy import paths

log = logging.getLogger("commpass")

DOORS = ("commpass.parallel.ssfusion", "commpass.parallel.compress_ddp")

_claimed: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def acquire(model: nn.Module, integration: str) -> None:
    """Record that ``integration`` exchanges the gradients of a model from now on."""
    _claimed[model] = integration
    summary.doors.add(model)


def release(model: nn.Module) -> None:
    """Record that the model has no integration any more."""
    _claimed.pop(model, None)
    summary.doors.discard(model)


def refuse_if_claimed(model: nn.Module, integration: str, allowed: Collection[str]) -> None:
    """Raise PolicyError if one of ``allowed`` already exchanges a parameter of the model."""
    mine = {id(parameter): name for name, parameter in model.named_parameters()}

    def found() -> str:
        return next(
            (
                f"{integration}: {mine[id(parameter)]} of this model is exchanged by"
                f" commpass.parallel.{other} of a {type(held).__name__} already, and would be"
                f" exchanged twice. Leave one of the two out, or call remove() on ssfusion's first"
                for held, other in list(_claimed.items())
                for parameter in held.parameters()
                if other in allowed and id(parameter) in mine
            ),
            "",
        )

    if found():
        gc.collect()  # a model that is no longer referenced does not count
        if why := found():
            raise PolicyError(why)


class Released:
    """Replaces the state of our hook in a copy of a model: torch copies the list of hooks, not the
    hook."""


def checked(model: Any) -> DistributedDataParallel:
    """Return the DDP model in the argument.

    Raise PolicyError if there is none that accepts a hook of ``compress_ddp``.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        what = f"compress_ddp(model={type(ddp).__name__}): must be a DistributedDataParallel model"
        raise PolicyError(f"{what}{_instead(ddp)}")
    if getattr(ddp, "_use_python_reducer", False):
        raise PolicyError(
            "compress_ddp: optimize_ddp='python_reducer' puts the gradients' collectives into the"
            " compiled graph, where no hook is: use torch.compile(model,"
            " backend=commpass.backend(policy)) alone"
        )
    if not hasattr(ddp, "reducer"):
        raise PolicyError(
            "compress_ddp: delay_all_reduce_named_params names all parameters, so that DDP has no"
            " buckets to give to a hook: leave it out"
        )
    refuse_if_taken(ddp, "compress_ddp")
    refuse_if_optimized_in_backward(ddp._module_parameters, "compress_ddp")
    held = {id(parameter) for parameter in ddp.module.parameters()}
    if any(each.requires_grad and id(each) not in held for each in ddp._module_parameters):
        raise PolicyError(
            "compress_ddp: parameters were replaced after DistributedDataParallel was called (by"
            " load_state_dict(assign=True), say), and it exchanges no gradient of the new ones:"
            " wrap the model in DistributedDataParallel once more"
        )
    if ddp._delay_all_reduce_params:
        log.warning(
            "compress_ddp: delay_all_reduce_named_params names %d parameters, whose gradients DDP"
            " sends itself, and not in buckets: they stay as they are",
            len(ddp._delay_all_reduce_params),
        )
    refuse_if_claimed(ddp, "compress_ddp", ("ssfusion",))
    sparse = [
        name
        for name, module in paths.names(ddp)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and module.weight.requires_grad
    ]
    if sparse:
        raise PolicyError(
            f"compress_ddp: {sparse[0]} has sparse=True, and codecs are for dense gradients: set"
            " sparse=False, or leave the module out of DDP"
        )
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise PolicyError(
                f"compress_ddp: {name} is {parameter.dtype}, and codecs are for real numbers: keep"
                " a real parameter and use torch.view_as_complex in the module, or use DDP alone"
            )
    return ddp


def _instead(model: Any) -> str:
    """Return the message about what to call, or to pass, if the model is not DDP's."""
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, DistributedDataParallel):
            return f", and {path!r} in it is one: give that one"
        if isinstance(module, FSDPModule):
            return ", but has modules of fully_shard: call commpass.parallel.compress_fsdp"
        if isinstance(module, FullyShardedDataParallel):
            return ", but is FSDP1's, which has no door: use fully_shard and compress_fsdp"
    return (
        ". Wrap it first: DistributedDataParallel(model); use"
        " commpass.parallel.compress_fsdp(model, policy) for FSDP2's fully_shard, or"
        " commpass.parallel.replicate(model, mesh) for gradients in the compiled graph"
    )


def refuse_if_optimized_in_backward(parameters: Iterable[Any], integration: str) -> None:
    """Raise PolicyError for parameters with an optimizer of _apply_optimizer_in_backward.

    DDP runs it in a comm hook, or it runs before gradients are exchanged.
    """
    if any(hasattr(each, "_in_backward_optimizers") for each in parameters):
        raise PolicyError(
            f"{integration}: parameters of this model have an optimizer that runs in backward"
            " (_apply_optimizer_in_backward), for which DDP registers a comm hook of its own, and"
            " it takes one alone: leave one of the two out, and call step() after backward"
        )


def refuse_if_taken(ddp: DistributedDataParallel, integration: str) -> None:
    """Raise PolicyError in the name of ``integration`` if a model already has a comm hook."""
    ddp._comm_hooks[:] = [each for each in ddp._comm_hooks if not isinstance(each[1], Released)]
    if taken := _hook_of(ddp):
        why = "mixed_precision= registers it" if ddp.mixed_precision is not None else "by hand"
        why = "by that call" if "commpass.parallel" in taken else why
        raise PolicyError(
            f"{integration}: this model already has the comm hook {taken} ({why}), and DDP takes"
            " one"
            f" alone: that of commpass.parallel.{integration} cannot be added. Leave one of the"
            " two out"
        )


def _hook_of(ddp: DistributedDataParallel) -> str:
    """Return the name of a model's comm hook; "" if none."""
    if ddp._comm_hooks:
        hook, _ = ddp._comm_hooks[0]
        name = f"{hook.__module__}.{hook.__qualname__}"
        if hook.__module__.startswith("commpass.parallel."):
            return DOORS[hook.__module__ == "commpass.parallel.ddp"]
        return name
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))
