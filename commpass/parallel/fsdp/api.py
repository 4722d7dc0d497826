"""The FSDP2 integration: what ``fully_shard`` sends eagerly is sent under a policy.

FSDP2 gathers the parameters of a unit before its forward and again before its backward, and
reduce-scatters its gradients. With replicas (HSDP) it then sums them over these. ``compress_fsdp``
replaces the calls that send all of this. FSDP2 still decides when and on which stream they happen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from commpass.backend import backend
from commpass.costmodel import Profile
from commpass.distributed.agreed_profile import agreed_profile
from commpass.distributed.checked import without_checks
from commpass.distributed.integration import Integration, refuse_if_exchanged
from commpass.distributed.record import wire_bytes
from commpass.distributed.refusal import publishing_refusal
from commpass.errors import PolicyError
from commpass.parallel.exchange import Compiled, Exchange, Exchanges
from commpass.parallel.fsdp import replicas
from commpass.parallel.fsdp.exact_cast import FLAG, cast_if_exact, is_faster
from commpass.parallel.fsdp.parts import parts_of_row
from commpass.parallel.refusals import instead, refuse_other_torch, wrong_argument
from commpass.passes.simplify.rules.gathers import EXACT_WIDENINGS
from commpass.plan import Plan
from commpass.policy import Policy, paths
from commpass.policy.annotate import annotations_of
from commpass.utils.keywords import named_arguments

log = logging.getLogger("commpass")

PACKED = (
    "its parameters are gathered in several dtypes, which FSDP2 packs as bytes: give fully_shard a"
    " MixedPrecisionPolicy(param_dtype=...), or make them one dtype"
)
OWN_CODES = (
    "its parameters are gathered as codes of {}, as bytes. Parameters beside them travel in the"
    " same bytes: to compress those, call fully_shard on their modules as well"
)
CODES = "its parameters are gathered as float8 codes"
RESHARDED = (
    "it gathers for backward from shards over fewer ranks (reshard_after_forward is a number)."
    " Codes of those shards would round the weights again, so backward would use other weights than"
    " forward"
)
UNKNOWN_PARTS = (
    "some of its parameters have no gradient here, so it is unknown which values other ranks hold"
    " too. Those must get the same codes on all of these ranks"
)
OTHER_OP = "FSDP2 reduces with {}, but codes can only be summed or averaged"
"""Why an exchange is sent uncompressed."""


@dataclass(eq=False)
class Unit:
    """The result of one call of ``fully_shard``.

    It has the names of its modules, their annotation (as of the first exchange), torch's parameter
    group, and the names of its parameters.
    """

    name: str
    annotation: str | None
    group: Any
    names: tuple[str, ...]

    @property
    def parameters(self) -> list[Tensor]:
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def codes(self) -> list[str]:
        """The names of the classes of parameters that are gathered as what they themselves give,
        such as torchao's, once each."""
        given = (each.sharded_param for each in self.group.fsdp_params)
        local = (each._local_tensor if isinstance(each, DTensor) else each for each in given)
        named = (type(each).__name__ for each in local if hasattr(each, PRE_ALL_GATHER))
        return list(dict.fromkeys(named))

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype in which its gradients are computed; None if they differ in it."""
        trained = (each for each in self.group.fsdp_params if each.sharded_param.requires_grad)
        found = {each.param_dtype or each.orig_dtype for each in trained}
        return found.pop() if len(found) == 1 else None

    @property
    def gathers_again(self) -> bool:
        """Whether backward gathers from the shards from which forward gathered."""
        return self.group.post_forward_mesh_info is self.group.mesh_info

    @property
    def in_backward(self) -> bool:
        """Whether the current gather is for backward."""
        return getattr(self.group._training_state, "name", "") == "PRE_BACKWARD"

    def shards_over(self, group: dist.ProcessGroup) -> bool:
        """Return whether the parameters are sharded over this group between steps."""
        return group is getattr(self.group.mesh_info, "shard_process_group", None)


class _Comm:
    """A replaced call of FSDP2: torch's own one allocates, and sends what stays uncompressed."""

    def __init__(self, integration: CompressedFSDP, unit: Unit, plain: Any):
        self.integration, self.unit, self.plain = integration, unit, plain

    def allocate(self, size: Sequence[Any], **how: Any) -> Tensor:
        made: Tensor = self.plain.allocate(size, **how)
        return made


class CompressedAllGather(_Comm):
    """FSDP2's ``AllGather`` with codes: every rank gets the decoded values, its own shard included.

    Backward's gather is the same exchange as forward's, so it gives the same bits.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        what = _exchange("all_gather", "forward", self.unit, group)
        plain = self.plain
        if input_tensor.dtype.itemsize == 1 and input_tensor.is_floating_point():
            what = replace(what, unsupported_reason=CODES)
            plain = _as_bytes(plain)
        elif input_tensor.dtype == torch.uint8:
            codes = self.unit.codes
            packed = OWN_CODES.format(" and ".join(codes)) if codes else PACKED
            what = replace(what, unsupported_reason=packed)
        elif not self.unit.shards_over(group):
            what = replace(what, direction="backward", unsupported_reason=RESHARDED)
        elif self.unit.gathers_again:
            what = replace(what, recomputed=True)
        send = self.integration.sender_of(what, input_tensor, output_tensor, self.unit)
        if send is None:
            work: dist.Work | None = plain(output_tensor, input_tensor, group, async_op)
            return work
        with (
            without_checks()
            if what.recomputed and self.unit.in_backward
            else contextlib.nullcontext()
        ):
            send(input_tensor.clone(), output_tensor)  # FSDP2's input is a part of its output
        return _done(output_tensor) if async_op else None


def _as_bytes(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gather that sends 8-bit floats as bytes, since gloo has no float8."""

    def gather_bytes(out: Tensor, x: Tensor, *rest: Any) -> Any:
        return gather(out.view(torch.uint8), x.view(torch.uint8), *rest)

    return gather_bytes


class CompressedReduceScatter(_Comm):
    """FSDP2's ``ReduceScatter`` with codes: each rank gets the sum, or the mean, of all decoded
    values."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        what = _reduced_by(_exchange("reduce_scatter", "backward", self.unit, group), op)
        if self.integration.sends_narrow(what, input_tensor, output_tensor, self.unit, group):
            return _done(output_tensor) if async_op else None
        send = self.integration.sender_of(what, input_tensor, output_tensor, self.unit)
        if send is None:
            plain: dist.Work | None = self.plain(output_tensor, input_tensor, group, op, async_op)
            return plain
        send(input_tensor, output_tensor)
        return _done(output_tensor) if async_op else None


COMMS = {"_all_gather_comm": CompressedAllGather, "_reduce_scatter_comm": CompressedReduceScatter}
"""The attributes of a parameter group that send."""
PRE_ALL_GATHER = "fsdp_pre_all_gather"
"""The method of a parameter that returns what FSDP2 gathers for it."""
NEEDED = ("fsdp_params", "mesh_info", "modules", "post_forward_mesh_info", *COMMS)
"""The attributes of a parameter group that are read."""


class CompressedFSDP(Integration):
    """The exchanges of a model's FSDP2 units under a policy; ``compress_fsdp`` creates it.

    ``bytes`` are those since ``compress_fsdp`` or ``clear`` was called. Call ``clear`` before a
    step to get the numbers of that step.
    """

    call = "compress_fsdp"

    def __init__(self, exchanges: Exchanges, units: Sequence[Unit], model: nn.Module):
        super().__init__(model, exchanges.backend.policy)
        self.exchanges, self.units, self.name = exchanges, tuple(units), type(model).__name__
        self._unseen: nn.Module | None = model  # until its first exchange
        self._next = dict(zip(self.units, (*self.units[1:], self.units[0]), strict=True))
        for unit in self.units:
            for name, comm in COMMS.items():
                setattr(unit.group, name, comm(self, unit, getattr(unit.group, name)))
            if (plain := replicas.group_of(unit.group)) is not None:
                send = functools.partial(self._sum_over_replicas, unit, plain)
                replicas.set_group(unit.group, replicas.ReplicaGroup(plain, send, _done))
            self.acquire(unit.group, model)

    @property
    def plans(self) -> list[Plan]:
        """The plan of each exchange, in the order in which they first happened."""
        return self.exchanges.plans

    remove = Integration.close

    def _stop(self) -> None:
        for unit in self.units:
            for name in COMMS:
                comm = getattr(unit.group, name)
                if getattr(comm, "integration", None) is self:
                    setattr(unit.group, name, comm.plain)
            group = replicas.group_of(unit.group)
            if isinstance(group, replicas.ReplicaGroup):
                replicas.set_group(unit.group, group.plain)
                group.close()

    def _sum_over_replicas(self, unit: Unit, group: dist.ProcessGroup, x: Tensor, op: Any) -> bool:
        """Sum the gradients of a shard over the replicas of a unit, in place. Return False, and
        send nothing, if the plan leaves it uncompressed."""
        what = _reduced_by(_exchange("all_reduce", "backward", unit, group), op)
        send = self.sender_of(what, x, None, unit)
        if send is not None:
            send(x)
        return send is not None

    def sender_of(self, exchange: Exchange, x: Tensor, out: Tensor | None, unit: Unit) -> Any:
        """Return the function that sends this exchange compressed, or raises why it may not be
        sent. Without ``out`` the result is put into ``x``.

        Return None if its plan leaves it uncompressed.
        """
        self._begin_once(unit)
        exchange = replace(exchange, annotation=unit.annotation, parameters=unit.names)
        if exchange.unsupported_reason is None and self._mixes_values(unit):
            gathers = exchange.kind == "all_gather"
            row = x if out is None or gathers else out
            sent = [each for each in unit.group.fsdp_params if _is_sent(each, gathers)]
            parts = parts_of_row(sent, row.numel())
            unsupported = UNKNOWN_PARTS if parts is None else None
            exchange = replace(exchange, parts=parts or (), unsupported_reason=unsupported)
        compiled = self.exchanges.get(exchange, x, out, unit.parameters)
        if compiled.is_untouched:
            self._record(exchange.kind, compiled)
            return None

        def run(*tensors: Tensor) -> None:
            compiled.run(*tensors)
            self._record(exchange.kind, compiled)

        return run

    def _mixes_values(self, unit: Unit) -> bool:
        return self.exchanges.backend.policy.mixes_values(unit.annotation)

    def sends_narrow(
        self, exchange: Exchange, x: Tensor, out: Tensor, unit: Unit, group: dist.ProcessGroup
    ) -> bool:
        """Send widened gradients as the narrow values that they are.

        Return False, and send nothing, if their values are not narrow or if that is not faster.
        """
        dtype = unit.grad_dtype
        if (
            exchange.unsupported_reason is not None
            or dtype is None
            or (dtype, x.dtype) not in EXACT_WIDENINGS
        ):
            return False
        profile = agreed_profile(self.exchanges.backend.profile, x.device.type)
        if not is_faster(group, x.nbytes, x.numel() * dtype.itemsize, profile):
            return False
        self._begin_once(unit)
        exchange = replace(
            exchange, wide=x.dtype, annotation=unit.annotation, parameters=unit.names
        )
        like = torch.empty_like(x, dtype=dtype)
        if not self.exchanges.narrows(exchange, like, out):
            return False
        compiled = self.exchanges.get(exchange, like, out, unit.parameters)
        if compiled.is_untouched:  # not all ranks plan it so
            return False
        narrow = like if compiled.is_refused else cast_if_exact(x, dtype, group)
        if narrow is not None:
            compiled.run(narrow, out)
            self._record(exchange.kind, compiled)
        self._sent.add(exchange.kind, 0, FLAG.itemsize, calls=0)
        return narrow is not None

    def _record(self, kind: str, compiled: Compiled) -> None:
        """Record an exchange after it was sent, since it may have been planned anew before."""
        self._sent.add(kind, _plain_bytes(compiled.plan), wire_bytes(compiled.plan))

    def _begin_once(self, unit: Unit) -> None:
        """Check a unit, and begin if this is the first exchange."""
        if self._unseen is not None:
            self._begin(self._unseen)
            self._unseen = None
        for each in (unit, self._next[unit]):  # in a step, all units are checked
            self._refuse_if_replaced(each)

    def _begin(self, model: nn.Module) -> None:
        """Read annotations that were added to modules since ``compress_fsdp``.

        Warn about modules that were sharded since.
        """
        now = {id(unit.group): unit for unit in _units(model)}
        for unit in self.units:
            found = now.pop(id(unit.group), None)
            unit.annotation = found.annotation if found is not None else unit.annotation
        if later := [unit.name for unit in now.values()]:
            log.warning(LATER, self.name, ", ".join(name or "the root module" for name in later))

    def _refuse_if_replaced(self, unit: Unit) -> None:
        """Raise PolicyError if FSDP2 was given other calls for a unit than this integration's."""
        for comm in (getattr(unit.group, name) for name in COMMS):
            if getattr(comm, "integration", None) is self:
                continue
            raise PolicyError(
                f"compress_fsdp: {unit.name or 'the root module'} was given"
                f" {type(comm).__name__} after compress_fsdp, by set_custom_all_gather or"
                " set_custom_reduce_scatter, and would no longer be sent by the policy: leave that"
                " call out, or call remove() on what compress_fsdp returned before it"
            )

    @property
    def summary(self) -> str:
        sent = [
            f"{kind}: {each.calls} calls, {each.plain:,} bytes as {each.sent:,}"
            for kind, each in self.bytes.items()
        ]
        return f"{self.name}, {len(self.units)} units; {'; '.join(sent) or super().summary}"


@publishing_refusal
@named_arguments
def compress_fsdp(
    model: nn.Module,
    policy: str | Path | Policy = "lossless",
    *,
    profile: str | Path | Profile | None = None,
    strict: bool = False,
    dump: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> CompressedFSDP:
    """Send all exchanges of FSDP2 for a model under a policy, and return the integration.

    Call it after ``fully_shard``, on all ranks alike, before the first step. The other arguments
    are those of ``commpass.backend``.

    Args:
        model: holds modules that ``torch.distributed.fsdp.fully_shard`` was called on; the root
            need not be one.
        policy: the name of a preset, the path of a TOML file, or a Policy. COMMPASS_POLICY and
            COMMPASS=off override it.
        profile: the links and kernels that the cost model assumes, as in ``commpass.backend``: a
            Profile, a name or a file. If None, COMMPASS_PROFILE, or else the network that is read
            from the system.
        strict: if True, raise when a pass fails. Otherwise log a warning and send uncompressed.
        dump: a folder for plans, for ``commpass explain``. If None, COMMPASS_DUMP.
        timeout: seconds that ranks wait for each other's plans. If None, the time-out of the
            process group.

    In rules an all_gather of parameters has direction "forward". This includes backward's gather,
    since it is the same exchange. A reduce_scatter of gradients has direction "backward".
    On a mesh with replicas (HSDP), so has the all_reduce over the replicas. ``module`` is the name
    of the unit in the model, and ``a+b`` for ``fully_shard([a, b])``. FSDP2 itself sends what a
    plan leaves uncompressed.

    Raise PolicyError if nothing in the model was sharded by FSDP2, or if another integration
    already handles its exchanges. Then nothing is changed.
    """
    units = list(_units(model)) if isinstance(model, nn.Module) else []
    if not units:
        needed = "a module on which torch.distributed.fsdp.fully_shard was called"
        needed += instead(model, "compress_fsdp")
        raise PolicyError(wrong_argument("compress_fsdp", "model", model, needed))
    for unit in units:
        _check(unit)
    made = backend(policy, profile=profile, strict=strict, dump=dump, timeout=timeout)
    return CompressedFSDP(Exchanges(made), units, model)


LATER = (
    "compress_fsdp(%s): fully_shard was called afterwards on %s, whose exchanges stay"
    " uncompressed: call compress_fsdp after the last fully_shard"
)


def _units(model: nn.Module) -> Iterator[Unit]:
    """Yield the parameter groups of a model's FSDP2 modules, outer ones first, each once."""
    named: dict[int, tuple[Any, list[str]]] = {}
    annotations_by_module, modules = annotations_of(model), paths.names(model)
    where = {id(module): path for path, module in reversed(modules)}  # a tied one has its first
    for path, module in modules:
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups_of(module._get_fsdp_state()):
            if module in group.modules:
                _, known = named.setdefault(id(group), (group, []))
                if path not in known:
                    known.append(path)
    for group, names in named.values():
        annotations = {annotations_by_module.get(name) for name in names}
        if len(annotations) > 1:
            raise PolicyError(
                f"compress_fsdp: fully_shard sends {' and '.join(names)} together, but compress or"
                f" keep annotate them differently: {', '.join(map(str, annotations))}"
            )
        infos = [each._module_info for each in group.fsdp_params]
        parameter_names = tuple(
            paths.join(where[id(info.module)], info.param_name) for info in infos
        )
        yield Unit("+".join(names), annotations.pop(), group, parameter_names)


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _check(unit: Unit) -> None:
    """Raise PolicyError if another integration or custom call executes the exchanges of a unit."""
    where = unit.name or "the root module"
    refuse_other_torch("compress_fsdp", unit.group, "the parameter group of fully_shard", NEEDED)
    refuse_if_exchanged(unit.group, where, "compress_fsdp", ("compress_fsdp",))
    for comm in (getattr(unit.group, name) for name in COMMS):
        if not type(comm).__module__.startswith("torch."):
            raise PolicyError(
                f"compress_fsdp: {where} already has {type(comm).__name__} from"
                " set_custom_all_gather or set_custom_reduce_scatter, and only one of the two can"
                " send: leave out one"
            )


def _is_sent(parameter: Any, gathers: bool) -> bool:
    """Whether FSDP2 gathers a parameter, or reduces its gradient."""
    return bool(gathers or parameter.sharded_param.requires_grad)


def _exchange(kind: str, direction: str, unit: Unit, group: dist.ProcessGroup) -> Exchange:
    return Exchange(kind, group.group_name, group.size(), unit.name, direction, "fsdp")


def _reduced_by(exchange: Exchange, op: Any) -> Exchange:
    """Return an exchange with the reduction of ``op``, or with the reason why it is sent
    uncompressed."""
    if op == dist.ReduceOp.AVG:
        return replace(exchange, op="avg")
    if (factor := _factor(op)) is None:
        return replace(exchange, unsupported_reason=OTHER_OP.format(op))
    return replace(exchange, factor=factor)


def _plain_bytes(plan: Plan) -> int:
    """Return the bytes that a rank would hand to a hook's collective if it was uncompressed."""
    saved = sum(step.saved_bytes for step in plan.simplified)
    return sum(site.bytes for site in plan.sites) + saved


def _factor(op: Any) -> float | None:
    """Return the factor of values before they are summed; None if ``op`` is not a sum."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    return None


def _done(result: Tensor) -> dist.Work:
    """Return a handle to wait for while the current stream, if any, is still working."""
    future: Any = torch.futures.Future(devices=[result.device] if result.is_cuda else None)
    future.set_result(result)
    torch_c10d: Any = torch._C._distributed_c10d
    work: dist.Work = torch_c10d._create_work_from_future(future)
    return work
