"""A collective in a single kernel over symmetric memory, as operators of a graph.

The kernel encodes, signals the other ranks, waits for their signals, reads what they have encoded,
and sums or stores it (docs/exchange.md). ``EXCHANGE`` runs it in the stream of the computation.
``START`` runs it in a separate stream, and ``WAIT`` lets the computation wait for its result.
Triton is imported only where needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from commpass.codecs import codec as codec_of
from commpass.errors import CommpassError
from commpass.utils.ambient import ambient_free

if TYPE_CHECKING:
    from commpass.lowering.gpu.exchange_sizes import Exchange

_library = torch.library.Library("commpass", "FRAGMENT")
_WHAT = "str group, str kind, str codec, str algorithm, str op, int ranks, int programs, int lanes"
_library.define(f"single_kernel_exchange(Tensor x, {_WHAT}) -> Tensor")
_library.define(
    f"single_kernel_exchange_start(Tensor(a) x, {_WHAT}, int number) -> Tensor(a)",
)
_library.define(
    "single_kernel_exchange_wait(Tensor started, str kind, int ranks, int number) -> Tensor"
)
EXCHANGE = torch.ops.commpass.single_kernel_exchange.default
START = torch.ops.commpass.single_kernel_exchange_start.default
"""Starts a kernel. The result shares the memory of ``x``, and only ``WAIT`` takes it.

So whoever knows the graph, like Inductor, keeps the memory of ``x`` until the wait, and does not
write to it. That is also true of a copy that Inductor makes of ``x`` for this operator. ``number``
is that of the start in its graph.
"""
WAIT = torch.ops.commpass.single_kernel_exchange_wait.default
"""Returns the result of the start of the same number: memory that nobody could read before."""

RESERVED = 64
"""Processors of a GPU that programs of a graph's exchanges leave free, for two kernels of NCCL with
at most 32 programs each.

An exchange waits for other ranks, and so do kernels of NCCL in flight. If one had no room beside
the other, both would wait without end.
"""


# --- what the ranks of a group have in common -----------------------------------------------------


@dataclass(frozen=True)
class PeerCard:
    """The GPU of one rank, as it tells the others.

    ``host`` is equal for ranks of one host, ``name`` for ranks that share a GPU. ``processors`` are
    its SMs or CUs, ``lanes`` those of a warp, and ``capability`` is NVIDIA's, or None.
    ``unsupported_reason`` is why this rank has no symmetric memory, or "".
    """

    host: str = ""
    name: str = ""
    processors: int = 0
    lanes: int = 32
    capability: tuple[int, int] | None = None
    unsupported_reason: str = ""


@dataclass(frozen=True)
class PeerMemory:
    """The symmetric memory of a group, equal on all of its ranks.

    A rank may run ``programs`` programs at once, with warps of ``lanes`` lanes. Without such
    memory, ``unsupported_reason`` says why.
    """

    programs: int = 0
    lanes: int = 32
    capability: tuple[int, int] | None = None
    unsupported_reason: str = ""


def common_memory(cards: Sequence[PeerCard]) -> PeerMemory:
    """Return what the ranks of a group have in common, from their GPUs in rank order."""
    for rank, card in enumerate(cards):
        if card.unsupported_reason:
            return PeerMemory(unsupported_reason=f"rank {rank}: {card.unsupported_reason}")
    if (hosts := len({card.host for card in cards})) > 1:
        return PeerMemory(unsupported_reason=f"its ranks are on {hosts} hosts")
    if len(kinds := {(card.lanes, card.capability) for card in cards}) > 1:
        return PeerMemory(unsupported_reason="its ranks have GPUs of different kinds")
    sharing = Counter(card.name for card in cards)
    programs = min((card.processors - RESERVED) // sharing[card.name] for card in cards)
    if programs < 1:
        why = f"of the processors of a GPU, {RESERVED} are left to other exchanges in flight"
        return PeerMemory(unsupported_reason=f"{why}: none remains")
    lanes, capability = kinds.pop()
    return PeerMemory(programs, lanes, capability)


# --- the exchange of a site -----------------------------------------------------------------------


@lru_cache(maxsize=1024)
def exchange_of(
    kind: str,
    codec: str,
    algorithm: str,
    dtype: torch.dtype,
    numel: int,
    ranks: int,
    op: str,
    lanes: int,
    programs: int = 1,
) -> Exchange:
    """Return an exchange. The same arguments give the same object."""
    from commpass.lowering.gpu.exchange_sizes import Exchange

    return Exchange(algorithm, codec_of(codec), dtype, numel, ranks, op, programs, lanes, kind)


def unsupported_reason(exchange: Exchange, memory: PeerMemory) -> str:
    """Return why a single kernel cannot carry out an exchange in symmetric memory, or ""."""
    from commpass.lowering.gpu import exchange_sizes

    if why := exchange_sizes.unsupported_reason(exchange, card=memory.capability):
        return why
    if exchange.rows > memory.programs:
        return f"{exchange.rows} shards need more programs than the {memory.programs} that fit"
    return ""


def programs_of(exchange: Exchange, memory: PeerMemory) -> int:
    """Return the programs for each wire of an exchange."""
    return max(min(exchange.tiles, memory.programs // exchange.rows), 1)


def sent_nbytes(node: fx.Node) -> int:
    """Return the bytes that a rank writes for the others, at a node of a graph."""
    exchange = _exchange_at(node)
    return exchange.wire_bytes * (exchange.rows + exchange.phases - 1)


def share_of_processors(node: fx.Node, memory: PeerMemory) -> float:
    """Return the largest share of a GPU's processors that a kernel of a graph may occupy."""
    given: Any = node.args
    return share_of(_exchange_at(node), given[7], memory)


def share_of(exchange: Exchange, programs: int, memory: PeerMemory) -> float:
    """Return the largest share of a GPU's processors that an exchange may occupy with this number
    of programs for each wire: each is on a processor of its own."""
    return min(programs * exchange.rows / (memory.programs + RESERVED), 1.0)


def _exchange_at(node: fx.Node) -> Exchange:
    given: Any = node.args
    x, _, kind, codec, algorithm, op, ranks, _, lanes, *_ = given
    value: Tensor = x.meta["val"]
    return exchange_of(kind, codec, algorithm, value.dtype, value.numel(), ranks, op, lanes)


# --- the operators --------------------------------------------------------------------------------


def result_shape(kind: str, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the shape of the result of a collective. Raises CommpassError if a reduce_scatter
    cannot divide its first dimension."""
    if kind == "all_reduce":
        return tuple(shape)
    if not shape:
        raise CommpassError(f"{kind} of a tensor without dimensions")
    first, *others = shape
    if kind == "all_gather":
        return (ranks * first, *others)
    if first % ranks:
        raise CommpassError(f"{kind} of {first} entries: they are no multiple of {ranks} ranks")
    return (first // ranks, *others)


def _exchange(
    x: Tensor,
    group: str,
    kind: str,
    codec: str,
    algorithm: str,
    op: str,
    ranks: int,
    programs: int,
    lanes: int,
) -> Tensor:
    from commpass.lowering.gpu import exchange

    found = exchange_of(kind, codec, algorithm, x.dtype, x.numel(), ranks, op, lanes, programs)
    return exchange.run_in_group(found, group, x)


def _start(
    x: Tensor,
    group: str,
    kind: str,
    codec: str,
    algorithm: str,
    op: str,
    ranks: int,
    programs: int,
    lanes: int,
    number: int,
) -> Tensor:
    from commpass.lowering.gpu import exchange

    found = exchange_of(kind, codec, algorithm, x.dtype, x.numel(), ranks, op, lanes, programs)
    exchange.start_in_group(found, group, x, number)
    return torch.ops.aten.alias.default(x)


def _wait(started: Tensor, kind: str, ranks: int, number: int) -> Tensor:
    from commpass.lowering.gpu import side_stream

    return side_stream.wait(started.device, number)


def _fake(
    x: Tensor, group: str, kind: str, codec: str, algorithm: str, op: str, ranks: int, *_: Any
) -> Tensor:
    return x.new_empty(result_shape(kind, x.shape, ranks))


def _fake_start(x: Tensor, *_: Any) -> Tensor:
    return torch.ops.aten.alias.default(x)


def _fake_wait(started: Tensor, kind: str, ranks: int, number: int) -> Tensor:
    return started.new_empty(result_shape(kind, started.shape, ranks))


for _name, _run, _like in (
    ("single_kernel_exchange", _exchange, _fake),
    ("single_kernel_exchange_start", _start, _fake_start),
    ("single_kernel_exchange_wait", _wait, _fake_wait),
):
    _library.impl(_name, ambient_free(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"commpass::{_name}", _like, lib=_library)
