"""torchft's LocalSGD and DiLoCo: their outer steps are sent by an integration.

torchft sends one tensor for each parameter by ``Manager.allreduce``. What is replaced here is the
method that calls it for all parameters, of the given object alone. So buckets, names and error
feedback are those of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager

from commpass.errors import CommpassError, PolicyError
from commpass.parallel.outer.checks import CALL, Target

VERSION = "0.2.0"
"""The version of torchft whose private attributes are known."""
OF_MANAGER = (
    *(
        "_group_rank",
        "_group_world_size",
        "_pg",
        "_load_state_dict_fns",
        "_user_state_dicts",
        "register_state_dict_fn",
    ),
    *("should_commit", "report_error", "errored", "wait_quorum", "num_participants"),
    *("is_participating", "start_quorum"),
)
OF_LOCAL_SGD = ("_manager", "_model", "_average")
OF_DILOCO = ("_manager", "_fragments")
OF_FRAGMENT = (
    *("_model_fragment", "_grads", "_average_grads", "_allreduce_work", "should_quantize"),
    "use_bucketization",
)


def check_manager(manager: Manager) -> None:
    """Raise CommpassError for a Manager of another version."""
    _refuse_other_version(manager, OF_MANAGER)


def target_of(target: LocalSGD | DiLoCo, model: nn.Module | None) -> Target:
    """Return the target of an object of torchft."""
    if isinstance(target, LocalSGD):
        _refuse_other_version(target, OF_LOCAL_SGD)
        if model is not None and model is not target._model:
            raise PolicyError(f"{CALL}: LocalSGD has a model itself: leave out model=")
        found = Target(
            target._model,
            "LocalSGD",
            manager=target._manager,
            attach=functools.partial(_attach_local_sgd, target),
            detach=functools.partial(target.__dict__.pop, "_average", None),
        )
    else:
        found = _diloco(target, model)
    check_manager(found.manager)
    return found


def _diloco(target: DiLoCo, model: nn.Module | None) -> Target:
    _refuse_other_version(target, OF_DILOCO)
    fragments = target._fragments
    for fragment in fragments:
        _refuse_other_version(fragment, OF_FRAGMENT)
        if fragment.should_quantize:
            raise PolicyError(
                f"{CALL}: DiLoCo(should_quantize=True) encodes pseudo-gradients in torchft, which"
                " would happen instead: leave it out, and use a policy with fp8 if you want that"
            )
    if model is None:
        if len(fragments) > 1:
            raise PolicyError(
                f"{CALL}: this DiLoCo has {len(fragments)} fragments, whose parameters may have the"
                " same names: give the whole model, as in compress_outer(diloco, policy,"
                " model=model)"
            )
        model = fragments[0]._model_fragment
    held = {id(parameter) for parameter in model.parameters()}
    for number, fragment in enumerate(fragments):
        for name, parameter in fragment._model_fragment.named_parameters():
            if id(parameter) not in held:
                raise PolicyError(
                    f"{CALL}: {name} of fragment {number} is no parameter of model=: give the model"
                    " that has all fragments"
                )
    return Target(
        model,
        "DiLoCo",
        manager=target._manager,
        attach=functools.partial(_attach_diloco, target),
        detach=functools.partial(_detach_diloco, target),
        keeps_parameters=True,
    )


def _attach_local_sgd(target: LocalSGD, integration: Any) -> None:
    target._average = integration.averaged


def _attach_diloco(target: DiLoCo, integration: Any) -> None:
    for fragment in target._fragments:
        send = functools.partial(_send_fragment, integration, fragment)
        fragment._average_grads = send


def _detach_diloco(target: DiLoCo) -> None:
    for fragment in target._fragments:
        fragment.__dict__.pop("_average_grads", None)


def _send_fragment(integration: Any, fragment: Any) -> None:
    """Replace the pseudo-gradients of a fragment by their means."""
    named = [
        (name, parameter)
        for name, parameter in fragment._model_fragment.named_parameters()
        if parameter.requires_grad
    ]
    values: list[Tensor] = [fragment._grads[name] for name, _ in named]
    integration.send([parameter for _, parameter in named], values)
    fragment._allreduce_work.append(_done(values))


def _done(values: Iterable[Tensor]) -> Any:
    """Return a handle of what was sent already, for the current stream."""
    tensors = list(values)
    cuda = sorted({each.device.index for each in tensors if each.is_cuda})
    future: Any = torch.futures.Future(devices=[torch.device("cuda", i) for i in cuda] or None)
    future.set_result(tensors)
    torch_c10d: Any = torch._C._distributed_c10d
    return torch_c10d._create_work_from_future(future)


def _refuse_other_version(of_torchft: object, names: Iterable[str]) -> None:
    if missing := [name for name in names if not hasattr(of_torchft, name)]:
        raise CommpassError(
            f"{CALL} knows the {type(of_torchft).__name__} of torchft {VERSION}; this one has no"
            f" {', '.join(missing)}"
        )
