"""Check which DDP models can get a comm hook: each takes one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commpass.distributed.integration import refuse_if_exchanged
from commpass.errors import PolicyError
from commpass.parallel.ddp.comm_hook import Released, hook_name
from commpass.parallel.refusals import instead, refuse_other_torch, wrong_argument
from commpass.policy import paths

log = logging.getLogger("commpass")

NEEDED = ("_comm_hooks", "_delay_all_reduce_params", "_join_config", "_module_parameters")
"""Private attributes of a model that are read."""


def check_model(model: Any) -> DistributedDataParallel:
    """Return the DDP model in the argument.

    Raise PolicyError if there is none that accepts a hook of ``compress_ddp``.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        needed = "a DistributedDataParallel model" + instead(ddp, "compress_ddp")
        raise PolicyError(wrong_argument("compress_ddp", "model", ddp, needed))
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
    refuse_other_torch("compress_ddp", ddp, "the DistributedDataParallel", NEEDED)
    refuse_other_hook(ddp, "compress_ddp")
    refuse_if_optimized_in_backward(ddp._module_parameters, "compress_ddp")
    held = {id(parameter) for parameter in ddp.module.parameters()}
    if any(each.requires_grad and id(each) not in held for each in ddp._module_parameters):
        raise PolicyError(
            "compress_ddp: parameters were replaced after DistributedDataParallel was called (for"
            " example by load_state_dict(assign=True)), and it exchanges no gradient of the new"
            " ones: wrap the model in DistributedDataParallel once more"
        )
    if ddp._delay_all_reduce_params:
        log.warning(
            "compress_ddp: delay_all_reduce_named_params names %d parameters, whose gradients DDP"
            " sends itself, and not in buckets: they stay uncompressed",
            len(ddp._delay_all_reduce_params),
        )
    refuse_if_exchanged(ddp, "", "compress_ddp", ("ssfusion",))
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


def refuse_if_optimized_in_backward(parameters: Iterable[Any], integration: str) -> None:
    """Raise PolicyError for parameters with an optimizer of _apply_optimizer_in_backward.

    DDP runs it in a comm hook, or it runs before gradients are exchanged.
    """
    if any(hasattr(each, "_in_backward_optimizers") for each in parameters):
        raise PolicyError(
            f"{integration}: parameters of this model have an optimizer that runs in backward"
            " (_apply_optimizer_in_backward), for which DDP registers its own comm hook, and it"
            " takes only one: leave out one of the two, and call step() after backward"
        )


def refuse_other_hook(ddp: DistributedDataParallel, integration: str) -> None:
    """Raise PolicyError in the name of ``integration`` if another hook, or an open integration, is
    the comm hook of a model."""
    ddp._comm_hooks[:] = [each for each in ddp._comm_hooks if not isinstance(each[1], Released)]
    if name := hook_name(ddp):
        why = "mixed_precision= registers it" if ddp.mixed_precision is not None else "by hand"
        why = "by that call" if "commpass.parallel" in name else why
        raise PolicyError(
            f"{integration}: this model already has the comm hook {name} ({why}). DDP takes"
            f" only one, so that of commpass.parallel.{integration} cannot be added. Leave out one"
            " of the two"
        )
