"""The outer step of local-update methods under one policy.

Replicas train alone for some steps. Then each sends the difference of its parameters from those of
the last outer step (a pseudo-gradient), and all apply the mean. The differences are sent in
buckets, each written as one exchange (``parallel/exchange.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from commpass.backend import backend
from commpass.costmodel import Profile
from commpass.distributed.integration import Integration
from commpass.distributed.owners import parameter_names
from commpass.distributed.refusal import publishing_refusal
from commpass.errors import PolicyError
from commpass.parallel.exchange import Exchanges
from commpass.parallel.in_graph.layout import check_same_parameters, equalize
from commpass.parallel.meeting import wait_for_calls
from commpass.parallel.outer.checks import Target, check_target
from commpass.parallel.outer.means import Means, local, trained
from commpass.parallel.outer.replicas import GroupReplicas, ManagedReplicas
from commpass.plan import Plan
from commpass.policy import Policy
from commpass.utils.keywords import named_arguments


@publishing_refusal
@named_arguments
def compress_outer(
    target: Any,
    policy: str | Path | Policy = "lossless",
    *,
    group: dist.ProcessGroup | None = None,
    manager: Any = None,
    model: nn.Module | None = None,
    inner: str | Callable[..., Any] = "inductor",
    profile: str | Path | Profile | None = None,
    strict: bool = False,
    dump: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> CompressedOuter:
    """Send the outer steps of a local-update method as a policy allows. Return the integration.

        outer = commpass.parallel.compress_outer(model, "balanced")
        ...
        outer.step(outer_optimizer)  # every so many steps; without optimizer: LocalSGD

        commpass.parallel.compress_outer(diloco, "balanced")  # torchft's DiLoCo or LocalSGD

    Every replica calls this function alike. The other arguments are those of ``commpass.backend``.

    Args:
        target: a module whose parameters are averaged by ``step``, or an object of
            ``torchft.local_sgd``, which then sends its outer steps by this integration.
        policy: the name of a preset, the path of a TOML file, or a Policy. COMMPASS_POLICY and
            COMMPASS=off override it.
        group: the ranks that have the same parameters of a module, one of each replica; None for
            all ranks. They get the parameters of the first one.
        manager: a Manager of torchft that finds the replicas for a module, instead of a group.
        model: for an object of torchft, the whole model, for the names in rules and states. It is
            required for a DiLoCo of several fragments.
        inner: the compiler of codes, as in ``commpass.backend``.
        profile: the links and kernels that the cost model assumes, as in ``commpass.backend``: a
            Profile, a name or a file. If None, COMMPASS_PROFILE, or else the network that is read
            from the system.
        strict: if True, raise when a pass fails. Otherwise log a warning and send uncompressed.
        dump: a folder for plans, for ``commpass explain``. If None, COMMPASS_DUMP.
        timeout: seconds that ranks wait for each other's plans. If None, the time-out of the
            process group.

    Raise PolicyError for another target, a Manager that cannot be used, complex parameters, or
    parameters that ``compress_outer`` already sends. Raise ParallelError if models differ.
    """
    found = check_target(target, group, manager, model)
    made = backend(policy, inner=inner, profile=profile, strict=strict, dump=dump, timeout=timeout)
    return CompressedOuter(found, Exchanges(made))


CLOSED = (
    "compress_outer: this integration was closed, and sends no outer step: call compress_outer"
    " again"
)


class CompressedOuter(Integration):
    """The outer steps of one model; ``compress_outer`` creates it.

    ``bytes`` are those since the call or ``clear``.
    """

    call = "compress_outer"

    def __init__(self, target: Target, exchanges: Exchanges):
        super().__init__(target.model, exchanges.backend.policy)
        self.exchanges, self._target = exchanges, target
        names = parameter_names(target.model)
        self.parameters = [each for each in target.model.parameters() if id(each) in names]
        self._synced: list[Tensor] = []
        self._averaged: list[tuple[Tensor, Tensor, Tensor]] = []
        # Its parameters are what is sent; the model may be the sender of other integrations.
        self._sender = nn.ParameterList(self.parameters)
        self.replicas: GroupReplicas | ManagedReplicas
        if target.manager is None:
            assert target.group is not None
            self.replicas = GroupReplicas(target.group)
        else:
            self.replicas = ManagedReplicas(
                target.manager,
                self.parameters,
                self._shared_state,
                self._heal,
                self._on_commit,
            )
        self._means = Means(exchanges, target.model, names, self._sent, self.replicas.hook)
        if not target.keeps_parameters:
            self.restart()
        if target.attach is not None:
            target.attach(self)
        self.acquire(self._sender, target.model)

    @property
    def plans(self) -> list[Plan]:
        """The plan of each exchange, in the order in which they first happened in this group."""
        return self.exchanges.plans

    @torch.no_grad()
    def restart(self) -> None:
        """Take the current parameters as those of the last outer step, as after loading a
        checkpoint.

        The ranks of a process group get those of the first rank. Replicas of a Manager must have
        the same ones, or get them from it.
        """
        if isinstance(self.replicas, GroupReplicas):
            group = self.replicas.group
            named = dict(self._target.model.named_parameters())
            device = self.parameters[0].device.type
            wait_for_calls(group, self.call)
            check_same_parameters(named, group, group.group_name, device)
            equalize(self.parameters, group)
        self._synced = [local(each).clone() for each in self.parameters]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Make an outer step, on all replicas alike.

        Without ``optimizer`` parameters become their mean over the replicas (LocalSGD). With one,
        they are set back to those of the last outer step, the mean difference from them becomes
        their gradient, and the optimizer makes a step (DiLoCo). Their gradients are None then.

        Return whether the step was made: False only if a Manager discards it, which leaves the
        parameters as they are.
        """
        if self.closed:
            raise PolicyError(CLOSED)
        if self._target.attach is not None:
            raise PolicyError(
                f"compress_outer: {self._target.name} makes the outer steps: leave out step()"
            )
        self.replicas.begin()
        numbers = trained(self.parameters)
        means = self.average(numbers)
        if not self.replicas.commit():
            return False
        for number, mean in zip(numbers, means, strict=True):
            parameter, synced = self.parameters[number], self._synced[number]
            local(parameter).copy_(synced if optimizer is not None else synced - mean)
            parameter.grad = _like(parameter, mean) if optimizer is not None else None
        if optimizer is not None:
            optimizer.step()
            for number in numbers:
                self.parameters[number].grad = None
        for number in numbers:
            self._synced[number].copy_(local(self.parameters[number]))
        return True

    def average(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return the mean difference of parameters, given by number, from the last outer step."""
        parameters = [self.parameters[number] for number in numbers]
        means = [self._synced[number] - local(self.parameters[number]) for number in numbers]
        self.send(parameters, means)
        return means

    def send(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Replace values, one for each parameter, by their means over the replicas."""
        self.replicas.average(self._means, parameters, values)

    def averaged(self) -> list[Tensor]:
        """Return what all parameters are after an outer step of LocalSGD.

        The tensors are new ones, except of parameters that are not trained. They change if the
        Manager then gives this replica the state of another one, and count once it commits.
        """
        numbers = trained(self.parameters)
        means = dict(zip(numbers, self.average(numbers), strict=True))
        results = []
        self._averaged.clear()
        for number, (parameter, synced) in enumerate(
            zip(self.parameters, self._synced, strict=True)
        ):
            if number in means:
                result = synced - means[number]
                self._averaged.append((result, synced, means[number]))
            else:
                result = local(parameter)
            results.append(result)
        return results

    def _shared_state(self) -> dict[str, Any]:
        return {"synced": [each.clone() for each in self._synced]}

    @torch.no_grad()
    def _heal(self, state: dict[str, Any]) -> None:
        """Continue from the last outer step of another replica."""
        for synced, values in zip(self._synced, state["synced"], strict=True):
            synced.copy_(values)
        for result, synced, mean in self._averaged:
            result.copy_(synced - mean)

    @torch.no_grad()
    def _on_commit(self, committed: bool) -> None:
        for result, synced, _ in self._averaged if committed else ():
            synced.copy_(result)
        self._averaged.clear()

    def _stop(self) -> None:
        """Let torchft send again; a module's outer steps are refused."""
        if self._target.detach is not None:
            self._target.detach()
        self.replicas.close()


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a gradient of a parameter, of which this rank has ``values``."""
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
