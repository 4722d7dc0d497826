"""The public interface of SSFusion."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from commpass.codecs.codec import FLOATS
from commpass.costmodel import Link, Profile
from commpass.distributed.environment import dump_here, is_off
from commpass.distributed.integration import Bytes, Integration, refuse_if_exchanged
from commpass.distributed.machine import profile_here
from commpass.distributed.owners import divided_over
from commpass.distributed.record import wire_bytes
from commpass.distributed.refusal import publishing_refusal
from commpass.distributed.state.checks import check_loaded
from commpass.errors import PolicyError
from commpass.groups import close_with, duplicate, labels, need_group
from commpass.parallel.ddp.checks import refuse_if_optimized_in_backward, refuse_other_hook
from commpass.parallel.ddp.comm_hook import slot_of
from commpass.parallel.in_graph.layout import equalize
from commpass.parallel.meeting import wait_for_calls
from commpass.parallel.refusals import wrong_argument
from commpass.parallel.ssfusion.buckets import BucketHooks
from commpass.parallel.ssfusion.hooks import ModuleHooks
from commpass.parallel.ssfusion.options import Options, check_optimizer
from commpass.parallel.ssfusion.plan import FusionPlan, Settings
from commpass.parallel.ssfusion.planner import Planner, Weight, agree
from commpass.parallel.ssfusion.saved import check_of
from commpass.plan import Plan
from commpass.policy.paths import join, names
from commpass.utils.keywords import named_arguments


@publishing_refusal
@named_arguments
def ssfusion(
    model: nn.Module,
    *,
    density: float = 0.01,
    bound: float = 0.001,
    selector: str = "dgc",
    momentum: float = 0.0,
    optimizer: optim.Optimizer | None = None,
    clip: float | None = None,
    warmup: int = 0,
    step: int = 0,
    dense: str | None = None,
    fuse: bool = True,
    aware: bool = True,
    interleave: bool = True,
    offload: bool = True,
    force: bool = False,
    profile: str | Path | Profile | None = None,
    profile_steps: int = 5,
    dump: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
) -> SSFusion:
    """Train data-parallel with sparsified gradients in fusion buffers (SSFusion).

    Every rank calls it with the same model and the same arguments. ``model`` is one of:

    - A plain module. Its parameters and buffers are set to those of the group's first rank. Its
      gradients are means over ``group`` (None: all ranks) when ``backward()`` returns.
    - A ``DistributedDataParallel``, which gets a comm hook and keeps its own group.

    ``fuse``, ``aware``, ``interleave`` and ``offload`` are parts of the method that can be switched
    off (see ``Settings``). With COMMPASS=off everything is always sent dense.

    Args:
        model: a plain module or a DistributedDataParallel, as above.
        density: the share of all gradient entries that is sent.
        bound: the least share of one gradient that selection is thinned to.
        selector: a sparse codec, such as ``"dgc"``, ``"topk"`` or ``"dgc(values=bf16)"``.
        momentum: that of momentum correction, for plain SGD with momentum 0; with 0, what is not
            sent is added unchanged to the next gradient.
        optimizer: if given, is checked for that.
        clip: the largest 2-norm of the mean of one gradient; each rank clips its gradient to
            ``clip / sqrt(ranks)`` before it is accumulated.
        warmup: steps in which the density falls from 25 % to the target.
        step: the number of steps done before, in a run that is resumed.
        dense: a codec for dense gradients, such as ``"bf16"``, without error feedback.
        fuse: whether several gradients share a buffer.
        aware: whether large gradients compensate for those that are sent dense.
        interleave: whether dense gradients are sent by all_reduce.
        offload: whether the CPU may select entries.
        force: sparse even if dense is predicted to be as fast.
        profile: the link, as in ``commpass.backend``; None measures it after the first steps.
        profile_steps: the number of these steps: backward is measured, and all is sent dense.
        dump: a folder for plans, as in ``commpass.backend``; each plan is a separate run there.
        group: the ranks, for a plain module.

    Raise PolicyError for invalid arguments, and PlanMismatch on all ranks if they differ.
    """
    need_group("commpass.parallel.ssfusion")
    if not isinstance(model, nn.Module):
        needed = "a module or a DistributedDataParallel"
        raise PolicyError(wrong_argument("ssfusion", "model", model, needed))
    refuse_if_exchanged(model, "", "ssfusion", ("ssfusion", "compress_ddp"))
    if isinstance(model, DistributedDataParallel):
        refuse_other_hook(model, "ssfusion")
        refuse_if_optimized_in_backward(model._module_parameters, "ssfusion")
    if is_off():
        density, warmup, dense, force = 1.0, 0, None, False
    settings = Settings(density, bound, fuse, aware, interleave, offload, force)
    options = Options(settings, selector, momentum, clip, warmup, step, profile_steps, dense)
    check_optimizer(optimizer, momentum)
    user_group = _group_of(model, group)
    weights, known = _weights(model), profile_here(profile)
    check_loaded(check_of(weights, momentum))
    link = None if known is None else _link(known, user_group)
    wait_for_calls(user_group, "ssfusion")
    channel = duplicate(user_group)
    described = [(each.name, tuple(each.parameter.shape), each.parameter.dtype) for each in weights]
    agree(channel, (described, options), "parameters and options", "the same model and arguments")
    device = weights[0].parameter.device
    name = "measured" if known is None else known.name
    planner = Planner(weights, options, user_group, channel, device, link, name, dump_here(dump))
    hooks: ModuleHooks | BucketHooks
    if isinstance(model, DistributedDataParallel):
        hooks = BucketHooks(model, planner, slot_of(model))
    else:
        equalize([*model.parameters(), *model.buffers()], channel)
        hooks = ModuleHooks(model, planner)
    close_with(hooks.driver, channel)
    return SSFusion(model, hooks)


class SSFusion(Integration):
    """The exchange of one model's gradients; ``ssfusion`` creates it.

    Once it is closed, a plain module's gradients stay on their rank. Those of a
    DistributedDataParallel are sent by its own all_reduce.
    """

    call, per = "ssfusion", " a step"

    def __init__(self, model: nn.Module, hooks: ModuleHooks | BucketHooks):
        super().__init__(model)
        self._hooks, self._kept = hooks, model  # which trains as long as the handle is kept
        self.acquire(model, model)

    @property
    def plans(self) -> list[Plan]:
        """The plan of the last step, with a site for each message; empty before the first."""
        recorded = self._hooks.driver.planner.recorded
        return [] if recorded is None else [recorded]

    @property
    def bytes(self) -> Bytes:
        """The bytes that this rank sent in the last step, by its plan."""
        found = Bytes()
        for plan in self.plans:
            plain = sum(site.bytes for site in plan.sites)
            found.add("all_reduce", plain, wire_bytes(plan), len(plan.sites))
        return found

    @property
    def plan(self) -> FusionPlan | None:
        """The plan of the last step; None before the first."""
        return self._hooks.driver.plan

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, indexed by their numbers in the plan."""
        return tuple(each.name for each in self._hooks.driver.planner.weights)

    @property
    def steps(self) -> int:
        """How many steps were exchanged."""
        return self._hooks.driver.count

    @property
    def overhead_s(self) -> float:
        """The seconds that measuring and planning took so far."""
        return self._hooks.driver.planner.overhead_s

    @property
    def summary(self) -> str:
        if self.plan is None:
            return super().summary
        why = f" ({self.plan.why})" if self.plan.why else ""
        return (
            f"step {self.steps}, {len(self.plan.sparse)} of {len(self.names)} gradients sparse,"
            f" in {len(self.plan.messages)} messages{why}"
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in this context without exchanging them."""
        return self._hooks.no_sync()

    remove = Integration.close

    def _stop(self) -> None:
        self._hooks.remove()


def _group_of(model: nn.Module, group: Any) -> dist.ProcessGroup:
    if isinstance(model, DistributedDataParallel):
        if group is not None:
            raise PolicyError(
                "group: a DistributedDataParallel has its own, give it process_group=... instead"
            )
        found: Any = model.process_group
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            known = ", ".join(group.mesh_dim_names or ())
            raise PolicyError(
                f"group: a mesh of {group.ndim} dimensions ({known}); give one of them, such as"
                " mesh['dp']"
            )
        found = group.get_group()
    else:
        found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise PolicyError(f"group={group!r}: this rank is in no such group")
    return found


def _weights(model: nn.Module) -> list[Weight]:
    """Return the parameters that require a gradient, the last one first: about the order of
    backward."""
    found: dict[int, Weight] = {}
    for path, module in names(model):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in found:
                found[id(parameter)] = Weight(join(path, name), parameter)
    weights = list(found.values())[::-1]
    if not weights:
        raise PolicyError(
            "model: no parameter requires a gradient, so there is nothing to exchange"
        )
    for each in weights:
        if isinstance(each.parameter, DTensor) or divided_over(each.parameter):
            raise PolicyError(
                f"{each.name} is a DTensor: ssfusion needs all parameters in full on every rank"
            )
        if each.parameter.dtype not in FLOATS:
            raise PolicyError(f"{each.name} is {each.parameter.dtype}, which no codec supports")
    if len({each.parameter.device for each in weights}) > 1:
        raise PolicyError("model: its parameters are on several devices, but must be on one")
    return weights


def _link(profile: Profile, group: dist.ProcessGroup) -> Link:
    return profile.link_of(*labels(group), ranks=dist.get_process_group_ranks(group))
