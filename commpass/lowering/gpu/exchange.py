"""A compressed all_reduce, all_gather or reduce_scatter of a small tensor in one kernel over
symmetric memory: its memory and its launch.

It runs on GPUs that can access each other's memory, or in Triton's interpreter.

    y = exchange.all_reduce(x, group, "int8", "one_shot")

All ranks of a group must make the same calls in the same order. In the first call for a size, a
codec and an algorithm, the ranks compare what they call. They create a workspace if the group has
none with room for it. Later calls are one kernel each, which may be part of a CUDA graph. Calls
with one workspace must be ordered: on one stream, or on several that wait for each other.

Compiled graphs call ``run_in_group``, or ``start_in_group`` for a kernel beside computation. Their
workspace is created when they are compiled, for the largest exchange (``allocate``).
"""

from __future__ import annotations

import socket
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from commpass.codecs import Codec
from commpass.codecs import codec as codec_of
from commpass.codecs.block.noise import Stochastic
from commpass.collectives.reductions import LAST
from commpass.errors import CommpassError
from commpass.groups import group_named
from commpass.lowering.exchange import result_shape
from commpass.lowering.gpu import side_stream
from commpass.lowering.gpu.current import on_device
from commpass.lowering.gpu.exchange_kernel import kernel
from commpass.lowering.gpu.exchange_sizes import (
    ALGORITHMS,
    RESIDENT,
    Capacity,
    Exchange,
    Memory,
    capacity_for,
    memory_of,
    rounded_up,
    unsupported_reason,
)
from commpass.lowering.gpu.launch import casts, interpreting, key_argument, offsets
from commpass.lowering.gpu.source import load
from commpass.utils.ambient import making_lasting_tensors

__all__ = [
    "Capacity",
    "Exchange",
    "Memory",
    "Workspace",
    "all_gather",
    "all_reduce",
    "allocate",
    "capacity_for",
    "memory_of",
    "reduce_scatter",
    "run",
    "run_in_group",
    "start_in_group",
    "trial",
    "unsupported_reason",
]


@dataclass(frozen=True)
class Launch:
    """What a launch of an exchange in a workspace needs, apart from its tensors."""

    function: Any
    names: tuple[str, ...]
    grid: tuple[int, int]
    numbers: dict[str, int]
    options: dict[str, Any]


@dataclass(frozen=True)
class Workspace:
    """The memory of one rank of ``ranks`` for all exchanges that fit into its ``capacity``.

    ``peers`` are the addresses, int64 ``[ranks]``, at which this rank accesses every rank's memory.
    ``memory`` is its own, uint8 ``[total]``, initially zeros; ``peer_memory`` keeps the memory of
    the others accessible. ``spins``, if not None, replaces ``exchange_kernel.SPINS``.
    """

    capacity: Capacity
    ranks: int
    rank: int
    peers: Tensor
    memory: Tensor
    peer_memory: Any = None
    spins: int | None = None
    launches: dict[Exchange, Launch] = field(default_factory=dict, repr=False, compare=False)

    def missing(self) -> list[int]:
        """Return the ranks for which a program timed out: those that never arrived, and those that
        gave up waiting for others.

        Waits for the GPU. After a timeout the workspace returns only NaN and cannot be repaired.
        """
        late = memory_of(self.capacity).late
        bits = int(self.memory[late : late + 4].view(torch.int32).item())
        return [rank for rank in range(self.ranks) if bits >> rank & 1]


def all_reduce(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    codec: str | Codec = "int8",
    algorithm: str = "one_shot",
    op: str = "sum",
) -> Tensor:
    """Return the sum, or with ``op="avg"`` the mean, of ``x`` over a group, with the same bits on
    all ranks.

    The bits are those of ``commpass.all_reduce`` with that codec and algorithm, if rotations are
    computed as butterflies (docs/exchange.md). Raises CommpassError with the reason if no kernel
    supports it.
    """
    return _run("all_reduce", x, group, codec, algorithm, op)


def all_gather(
    x: Tensor, group: dist.ProcessGroup | None = None, codec: str | Codec = "int8"
) -> Tensor:
    """Return ``[n, ...]`` of every rank of a group as ``[ranks * n, ...]``, as
    ``commpass.all_gather`` does. Raises CommpassError as ``all_reduce`` does, and for a tensor
    without dimensions."""
    return _run("all_gather", x, group, codec, "direct", "sum")


def reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    codec: str | Codec = "int8",
    op: str = "sum",
) -> Tensor:
    """Return part r of the sum or mean of ``[ranks * n, ...]`` on rank r of a group: ``[n, ...]``,
    as ``commpass.reduce_scatter`` does. Raises CommpassError as ``all_reduce`` does, and if the
    first dimension is no multiple of the number of ranks."""
    return _run("reduce_scatter", x, group, codec, "direct", op)


def _run(
    kind: str,
    x: Tensor,
    group: dist.ProcessGroup | None,
    codec: str | Codec,
    algorithm: str,
    op: str,
) -> Tensor:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise CommpassError("no process group: call torch.distributed.init_process_group first")
    ranks = dist.get_world_size(group)
    if x.numel() == 0:
        return x.new_empty(result_shape(kind, x.shape, ranks))
    known = _known.setdefault(group, {})
    # A name, and not the codec: it is hashed at each call.
    what = (kind, codec, algorithm, x.dtype, x.shape, op, x.device)
    if (found := known.get(what)) is None:
        exchange = Exchange(algorithm, codec_of(codec), x.dtype, x.numel(), ranks, op, kind=kind)
        why = _wrong_shape(kind, x.shape, ranks)
        found = known[what] = workspace(exchange, group, x.device, why)
    return run(*found, x)


def _wrong_shape(kind: str, shape: Sequence[int], ranks: int) -> str:
    """Return why a collective has no result for a tensor of this shape, or ""."""
    try:
        result_shape(kind, shape, ranks)
    except CommpassError as error:  # not raised yet: the other ranks wait for the comparison
        return str(error)
    return ""


def run(workspace: Workspace, exchange: Exchange, x: Tensor) -> Tensor:
    """Run one exchange: return ``x`` summed over the ranks with the same shape, this rank's part of
    that sum, or the tensors of all ranks."""
    output, launch = _prepare(workspace, exchange, x)
    side_stream.join(x.device)
    launch()
    return output


def _prepare(
    workspace: Workspace, exchange: Exchange, x: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """Return the memory of a result, and what launches the kernel that writes it in the current
    stream. The launch keeps all tensors that the kernel reads."""
    if x.numel() != exchange.numel or x.dtype != exchange.dtype:
        raise CommpassError(
            f"an exchange of {exchange.numel} values of {exchange.dtype} was called with"
            f" {x.numel()} of {x.dtype}"
        )
    shape = result_shape(exchange.kind, x.shape, exchange.ranks)
    if (launch := workspace.launches.get(exchange)) is None:
        launch = workspace.launches[exchange] = _launch_of(workspace, exchange)
    output = x.new_empty(shape)
    tensors = {"peers": workspace.peers, "input": x.contiguous(), "output": output}
    given = tensors | launch.numbers

    def run() -> None:
        with on_device(x.device):
            launch.function[launch.grid](*(given[name] for name in launch.names), **launch.options)

    return output, run


def _launch_of(workspace: Workspace, exchange: Exchange) -> Launch:
    if not workspace.capacity.holds(capacity := capacity_for([exchange])):
        raise CommpassError(f"a workspace of {workspace.capacity} is too small for {capacity}")
    generated = kernel(exchange)
    compiled = {"enable_fp_fusion": generated.fuses, **exchange.options}
    options = {
        **(generated.constants | casts(workspace.memory.device)),
        **({} if workspace.spins is None else {"SPINS": workspace.spins}),
        **({"STORES": False} if interpreting() else compiled),
        "num_warps": generated.num_warps,
    }
    return Launch(
        load(generated.source),
        tuple(generated.signature),
        (exchange.programs, exchange.rows),
        numbers(exchange, workspace.rank, workspace.capacity),
        options,
    )


def numbers(exchange: Exchange, rank: int, capacity: Capacity) -> dict[str, int]:
    """Return the integer arguments of a kernel by name, in a memory of this ``capacity``."""
    codec, memory = exchange.block_codec, memory_of(capacity)
    found = {
        "rank": rank,
        "count": exchange.count,
        "numel": exchange.length,
        "blocks": codec.layout.blocks(exchange.length),
        "tiles": exchange.tiles,
        "slots": capacity.programs,
        "counters_at": memory.counters,
        "late_at": memory.late,
        "wires_at": memory.wires,
        "sums_at": memory.wires + exchange.rows * exchange.wire_bytes,
        "wire_bytes": exchange.wire_bytes,
        "buffer_bytes": capacity.buffer_bytes,
    }
    found |= offsets("output", codec, exchange.length, torch.float32)
    if isinstance(codec.rounding, Stochastic):
        for name, hop in (("key", 0), ("sum_key", LAST)):
            found[name] = key_argument(codec.rounding, (rank, hop))
    return found


# --- memory ---------------------------------------------------------------------------------------

_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, list[Workspace]]]
_workspaces = weakref.WeakKeyDictionary()
"""Workspaces by group and device, with the lifetime of the group, the oldest first.

An exchange uses the first one with room for it. So its memory never changes, and is the same on all
ranks, also in CUDA graphs.
"""
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, tuple[Workspace, Exchange]]]
_known = weakref.WeakKeyDictionary()
"""Workspaces and exchanges by the arguments of a call."""


def workspace(
    exchange: Exchange, group: dist.ProcessGroup, device: torch.device, why: str = ""
) -> tuple[Workspace, Exchange]:
    """Return the workspace of a group for an exchange, and the exchange with its programs.

    It is collective: the ranks exchange what they are about to do and any reasons against it, also
    this rank's ``why``. If no workspace has room for the exchange, they create one.
    """
    exchange, programs = _agreed(exchange, group, device, why)
    if why := allocate([exchange], programs, group, device):
        raise CommpassError(why)
    found = _first_large_enough(exchange, group, device)
    assert found is not None
    return found, exchange


def _first_large_enough(
    exchange: Exchange, group: dist.ProcessGroup, device: torch.device
) -> Workspace | None:
    capacity = capacity_for([exchange])
    known = _workspaces.get(group, {}).get(device, ())
    return next((each for each in known if each.capacity.holds(capacity)), None)


def _agreed(
    exchange: Exchange, group: dist.ProcessGroup, device: torch.device, why: str
) -> tuple[Exchange, int]:
    """Return the exchange with its programs, and how many can run at once on all ranks, after these
    have agreed on it."""
    card, no_kernel = _card(exchange, device)
    what = (
        f"{exchange.kind} ({exchange.op}) of {exchange.numel} values of {exchange.dtype} by"
        f" {exchange.algorithm} with {exchange.codec.spec} on cards with warps of {card.lanes}"
    )
    requests: list[Any] = [None] * exchange.ranks
    dist.all_gather_object(requests, (what, why or no_kernel, card), group)
    for rank, (_, why, _) in enumerate(requests):
        if why:
            raise CommpassError(f"no kernel: rank {rank}: {why}")
    for rank, (other, _, _) in enumerate(requests):
        if other != what:
            raise CommpassError(f"this rank makes the {what}, but rank {rank} the {other}")
    cards = [card for *_, card in requests]
    shared = Counter(each.name for each in cards)
    most = min(each.processors * RESIDENT // shared[each.name] for each in cards)
    exchange = replace(exchange, lanes=card.lanes)
    programs = max(min(exchange.tiles, most // exchange.rows), 1)
    return replace(exchange, programs=programs), most


@dataclass(frozen=True)
class Card:
    """The GPU of one rank: its name, unique among all ranks, its processors, the lanes of a
    warp."""

    name: str = ""
    processors: int = 0
    lanes: int = 0


def _card(exchange: Exchange, device: torch.device) -> tuple[Card, str]:
    """Return a rank's GPU, and why it cannot run an exchange, or ""."""
    if device.type != "cuda":
        return Card(), f"tensors on {device.type}: ranks access the memory of GPUs"
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor) if torch.version.hip is None else None
    name = f"{socket.gethostname()} {properties.uuid}"
    card = Card(name, properties.multi_processor_count, properties.warp_size)
    return card, unsupported_reason(exchange, processors=card.processors, card=capability)


# --- exchanges of graphs --------------------------------------------------------------------------


def run_in_group(exchange: Exchange, group_name: str, x: Tensor) -> Tensor:
    """Run an exchange of a graph in the workspace that was created for it. Raises CommpassError if
    there is none."""
    return run(_workspace_of(exchange, group_name, x.device), exchange, x)


def start_in_group(exchange: Exchange, group_name: str, x: Tensor, number: int) -> None:
    """Start an exchange of a graph beside computation. ``side_stream.wait`` returns its result, by
    the ``number`` of the start. Raises CommpassError as ``run_in_group`` does."""
    output, launch = _prepare(_workspace_of(exchange, group_name, x.device), exchange, x)
    side_stream.start(x.device, number, launch, output)


def _workspace_of(exchange: Exchange, group_name: str, device: torch.device) -> Workspace:
    group = group_named(group_name)
    if group is None or (found := _first_large_enough(exchange, group, device)) is None:
        raise CommpassError(
            f"no memory for the {exchange.name} of {exchange.numel} values over group"
            f" {group_name!r}: it was compiled for other process groups. Call"
            " torch._dynamo.reset() on all ranks to compile it again"
        )
    return found


def allocate(
    exchanges: Sequence[Exchange], programs: int, group: dist.ProcessGroup, device: torch.device
) -> str:
    """Create a workspace for the largest of some exchanges of a group, and at least so many
    programs of a rank, unless each of them has one with room for it. Return "", or on all ranks the
    reason why one of them could not.

    All ranks of the group must call it for the same exchanges.
    """
    if all(_first_large_enough(each, group, device) is not None for each in exchanges):
        return ""
    found, why = _symmetric(rounded_up(capacity_for(exchanges, programs)), group, device)
    if found is not None:
        _workspaces.setdefault(group, {}).setdefault(device, []).append(found)
    return why


TRIAL_VALUES = 1000
TRIAL_CALLS = 3
"""Each buffer is used, and one of them again."""
TRIAL_SPINS = 1 << 26
"""Polls of the signals in a trial: half a minute at half a microsecond each. Another rank may still
compile the kernel."""
TRIAL_ERROR = 0.05
"""The accepted error of a trial, as a share of the largest result. That of int8 is below 2 %."""


def trial(group: dist.ProcessGroup, device: torch.device, lanes: int) -> str:
    """Run some exchanges in one workspace, and return "" if they are right on all ranks of a group,
    or on all ranks why one of them failed. All of them must call it."""
    ranks = dist.get_world_size(group)
    numel, coder = TRIAL_VALUES // ranks * ranks, codec_of("int8")
    every = [
        Exchange(algorithm, coder, torch.bfloat16, numel, ranks, lanes=lanes, kind=kind)
        for kind, names in ALGORITHMS.items()
        for algorithm in names
    ]
    found, why = _symmetric(capacity_for(every), group, device)
    if found is None:
        return why
    space = replace(found, spins=TRIAL_SPINS)
    whys = (_first_error(partial(_check, space, each), group) for each in every)
    return next(filter(None, whys), "")


def _check(workspace: Workspace, exchange: Exchange) -> None:
    """Raise CommpassError if results of known values are wrong, or ranks do not arrive.

    Results are checked after all calls, since the other ranks wait for this one in each.
    """
    ranks = torch.arange(exchange.ranks, dtype=torch.float64, device="cpu")[:, None]
    places = torch.arange(exchange.numel, dtype=torch.float64, device="cpu")
    wrong = False
    for call in range(TRIAL_CALLS):
        values = torch.sin(places * (1 + call) + ranks)
        x = values[workspace.rank].to(workspace.memory.device, torch.bfloat16)
        made, exact = run(workspace, exchange, x).cpu().double(), values.sum(0)
        if exchange.kind == "all_gather":
            exact = values.flatten()
        elif exchange.kind == "reduce_scatter":
            exact = exact.reshape(exchange.ranks, -1)[workspace.rank]
        wrong |= not bool((made - exact).abs().max() <= TRIAL_ERROR * exact.abs().max())
    if late := workspace.missing():
        raise CommpassError(f"its kernel did not see signals of ranks {late}")
    if wrong:
        what = "moved" if exchange.kind == "all_gather" else "summed"
        raise CommpassError(f"its kernel {what} known values wrongly")


def _symmetric(
    capacity: Capacity, group: dist.ProcessGroup, device: torch.device
) -> tuple[Workspace | None, str]:
    """Create a workspace on all ranks, also while a graph is traced. Return it, or None and the
    reason of the first rank that could not."""
    with making_lasting_tensors():
        return _create(capacity, group, device)


def _create(
    capacity: Capacity, group: dist.ProcessGroup, device: torch.device
) -> tuple[Workspace | None, str]:
    import torch.distributed._symmetric_memory as symmetric

    total, rank, ranks = memory_of(capacity).total, dist.get_rank(group), dist.get_world_size(group)
    made: list[Any] = []

    def empty() -> None:
        made.append(symmetric.empty((total,), dtype=torch.uint8, device=device))
        made[0].zero_()
        torch.cuda.synchronize(device)

    def open_all() -> None:
        handle = symmetric.rendezvous(made[0], group)
        # Older versions of torch have no get_remote_tensor; there a tensor begins at its
        # allocation.
        reach = getattr(handle, "get_remote_tensor", handle.get_buffer)
        memories = [reach(peer, (total,), torch.uint8) for peer in range(ranks)]
        memories[rank] = made[0]
        made.append((handle, memories))

    # The second comparison also ensures that all memory is zero before any rank signals.
    for step in (empty, open_all):
        if why := _first_error(step, group):
            return None, why
    memory, (handle, memories) = made
    addresses = [each.data_ptr() for each in memories]
    peers = torch.tensor(addresses, dtype=torch.int64, device=device)
    return Workspace(capacity, ranks, rank, peers, memory, (handle, memories)), ""


def _first_error(step: Callable[[], None], group: dist.ProcessGroup) -> str:
    """Run a step on all ranks of a group, also while a graph is traced. Return the first rank's
    error on all of them, or ""."""
    why = ""
    # Storages, which objects are sent in, are fake unless the mode is unset.
    with making_lasting_tensors(), unset_fake_temporarily():
        try:
            step()
        except Exception as error:  # any: the other ranks wait for the comparison
            first_line = str(error).strip().partition("\n")[0]
            why = f"{type(error).__name__}: {first_line}"
        whys: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(whys, why, group)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(whys) if each), "")
