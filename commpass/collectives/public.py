"""``commpass.all_reduce`` and the other compressed collectives to call directly, eagerly or inside
a compiled function.

Gradients ignore the rounding. The backward of each is the compressed form of the collective that
torch's functional collective uses there. For all_reduce it is all_reduce, for all_gather
reduce_scatter and vice versa (also ``_v``), for all_to_all all_to_all with the splits exchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from commpass.codecs import Codec, accumulation_dtype
from commpass.codecs import codec as codec_named
from commpass.collectives.algorithm import Algorithm
from commpass.collectives.arguments import (
    check_input,
    check_splits,
    checked_algorithm,
    group_name,
    selects_values,
    size_and_rank,
    spec_of,
    splits_of,
    whole_lengths,
)
from commpass.collectives.data_sized import sizes_of_data
from commpass.collectives.handle import Handle
from commpass.collectives.keywords import named_arguments
from commpass.collectives.request import Request
from commpass.collectives.steps import run
from commpass.collectives.table import algorithm, find_algorithm
from commpass.errors import PolicyError
from commpass.groups import sends_messages
from commpass.plan.kinds import KINDS
from commpass.utils.ambient import ambient_free, without_ambient_state
from commpass.utils.version import own_version

_named = algorithm


@named_arguments
def all_reduce(
    x: Tensor,
    op: str = "sum",
    group: Any = None,
    *,
    codec: str | Codec = "int8",
    algorithm: str | None = None,
    async_op: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """Return the sum or mean of ``x`` over the ranks of a group, with the same bits on every rank.

    Args:
        x: a float tensor of any shape; it may be changed immediately after the call.
        op: ``"sum"`` or ``"avg"``, the mean over the ranks.
        group: the ranks, as in torch's functional collectives: a process group, a mesh, or None for
            the default group.
        codec: the codec of the values, by name or as a Codec.
        algorithm: ``two_shot`` if None, or ``one_shot``, ``ring``, ``semi_ring``,
            ``hierarchical(node=8)``, each with parameters such as ``two_shot(stage=ag)``.
            ``native`` is the library's own sum of values cast to 16 bits (codecs ``bf16`` and
            ``fp16``). A sparse codec (``topk``) uses ``sparse``.
        async_op: return a ``Handle`` at once, whose ``wait()`` returns the result, without a
            gradient.
        residual: the error feedback of a sparse codec, which needs one. It is initially zeros of
            the shape of ``x`` in the accumulation dtype; the caller keeps it and it is changed in
            place.

    Raises PolicyError for invalid arguments.
    """
    spec = spec_of(codec)
    if residual is not None or selects_values(spec):
        return _sparse(x, op, group, spec, algorithm or "sparse", async_op, residual)
    return _collective("all_reduce", x, op, group, spec, algorithm or "two_shot", async_op)


@named_arguments
def all_gather(
    x: Tensor,
    group: Any = None,
    *,
    codec: str | Codec = "int8",
    algorithm: str | None = None,
    async_op: bool = False,
) -> Any:
    """Concatenate ``[n, ...]`` of every rank along the first dimension in rank order: ``[ranks * n,
    ...]`` on each.

    Args:
        x: ``[n, ...]``, of the same shape on every rank.
        group: the ranks, as in torch's functional collectives: a process group, a mesh, or None for
            the default group.
        codec: the codec of the values, by name or as a Codec.
        algorithm: how codes are exchanged, by name; None for the default of this collective
            (docs/collectives.md).
        async_op: return a ``Handle`` at once, whose ``wait()`` returns the result, without a
            gradient.

    Raises PolicyError for invalid arguments.
    """
    return _collective(
        "all_gather", x, "sum", group, spec_of(codec), algorithm or "direct", async_op
    )


@named_arguments
def reduce_scatter(
    x: Tensor,
    op: str = "sum",
    group: Any = None,
    *,
    codec: str | Codec = "int8",
    algorithm: str | None = None,
    async_op: bool = False,
) -> Any:
    """Return part r of the sum or mean of ``[ranks * n, ...]`` on rank r: ``[n, ...]``.

    Args:
        x: ``[ranks * n, ...]``, of the same shape on every rank.
        op: ``"sum"`` or ``"avg"``, the mean over the ranks.
        group: the ranks, as in torch's functional collectives: a process group, a mesh, or None for
            the default group.
        codec: the codec of the values, by name or as a Codec.
        algorithm: how codes are exchanged, by name; None for the default of this collective
            (docs/collectives.md).
        async_op: return a ``Handle`` at once, whose ``wait()`` returns the result, without a
            gradient.

    Raises PolicyError for invalid arguments.
    """
    return _collective(
        "reduce_scatter", x, op, group, spec_of(codec), algorithm or "direct", async_op
    )


@named_arguments
def all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    *,
    codec: str | Codec = "int8",
    algorithm: str | None = None,
    async_op: bool = False,
) -> Any:
    """Send parts of ``[n, ...]`` to all ranks, and concatenate the received parts in rank order.

    Args:
        x: ``[n, ...]``, whose parts along the first dimension go to the ranks in their order.
        output_split_sizes: the lengths of the parts received from each rank; even if None.
        input_split_sizes: the lengths of the parts sent to each rank; even if None.
        group: the ranks, as in torch's functional collectives: a process group, a mesh, or None for
            the default group.
        codec: the codec of the values, by name or as a Codec.
        algorithm: how codes are exchanged, by name; None for the default of this collective
            (docs/collectives.md).
        async_op: return a ``Handle`` at once, whose ``wait()`` returns the result, without a
            gradient.

    Raises PolicyError for invalid arguments.
    """
    splits = (output_split_sizes, input_split_sizes)
    return _collective(
        "all_to_all", x, "sum", group, spec_of(codec), algorithm or "direct", async_op, splits
    )


@named_arguments
def all_gather_v(
    x: Tensor,
    splits: Sequence[int],
    group: Any = None,
    *,
    codec: str | Codec = "int8",
    algorithm: str | None = None,
    async_op: bool = False,
) -> Any:
    """Concatenate ``[splits[r], ...]`` of every rank r along the first dimension: ``[sum(splits),
    ...]`` on each, with the same bits on every rank.

    Args:
        x: ``[splits[r], ...]`` on rank r.
        splits: the length of each rank's part, equal on all ranks.
        group: the ranks, as in torch's functional collectives: a process group, a mesh, or None for
            the default group.
        codec: the codec of the values, by name or as a Codec.
        algorithm: how codes are exchanged, by name; None for the default of this collective
            (docs/collectives.md).
        async_op: return a ``Handle`` at once, whose ``wait()`` returns the result, without a
            gradient.

    Raises PolicyError for invalid arguments.
    """
    name, parts = algorithm or "direct", whole_lengths("all_gather_v", "splits", splits)
    return _collective("all_gather_v", x, "sum", group, spec_of(codec), name, async_op, parts=parts)


@named_arguments
def reduce_scatter_v(
    x: Tensor,
    splits: Sequence[int],
    op: str = "sum",
    group: Any = None,
    *,
    codec: str | Codec = "int8",
    algorithm: str | None = None,
    async_op: bool = False,
) -> Any:
    """Return part r of the sum or mean of ``[sum(splits), ...]`` over the ranks on rank r:
    ``[splits[r], ...]``.

    Args:
        x: ``[sum(splits), ...]``, of the same shape on every rank.
        splits: the length of each rank's part, equal on all ranks.
        op: ``"sum"`` or ``"avg"``, the mean over the ranks.
        group: the ranks, as in torch's functional collectives: a process group, a mesh, or None for
            the default group.
        codec: the codec of the values, by name or as a Codec.
        algorithm: how codes are exchanged, by name; None for the default of this collective
            (docs/collectives.md).
        async_op: return a ``Handle`` at once, whose ``wait()`` returns the result, without a
            gradient.

    Raises PolicyError for invalid arguments.
    """
    name, parts = algorithm or "direct", whole_lengths("reduce_scatter_v", "splits", splits)
    return _collective(
        "reduce_scatter_v", x, op, group, spec_of(codec), name, async_op, parts=parts
    )


def _collective(
    kind: str,
    x: Tensor,
    op: str,
    group: Any,
    codec: str,
    name: str,
    async_op: bool,
    splits: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    parts: list[int] | None = None,
) -> Any:
    where = group_name(kind, group)
    ranks, rank = size_and_rank(where)
    named = zip(("output_split_sizes", "input_split_sizes"), splits, strict=True)
    received, sent = (
        None if some is None else whole_lengths(kind, what, some) for what, some in named
    )
    check_input(kind, x, op, ranks, sent is None and received is None and parts is None)
    if parts is None:
        check_splits(x, sent, received, ranks)
    else:
        sent, received = splits_of(kind, x, parts, ranks, rank)
    spec = checked_algorithm(kind, codec, name, ranks)
    if not async_op:
        return torch.ops.commpass.collective(
            x, kind, op, where, ranks, rank, sent, received, codec, spec, SOURCES
        )
    if torch.compiler.is_compiling():
        raise PolicyError(
            "async_op=True: a compiled function needs none, the compiler orders exchanges; leave"
            " it out"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise PolicyError("async_op=True has no gradient: give x.detach(), or leave async_op out")
    chosen, coder = _named(kind, spec), codec_named(codec)
    with without_ambient_state():
        own = x.clone() if chosen.keeps_input(coder) else x
    return Handle(chosen.run(own, _request(x, op, where, ranks, rank, sent, received), coder))


def _sparse(
    x: Tensor, op: str, group: Any, codec: str, name: str, async_op: bool, residual: Tensor | None
) -> Tensor:
    where = group_name("all_reduce", group)
    ranks, rank = size_and_rank(where)
    check_input("all_reduce", x, op, ranks)
    if residual is None:
        wide = accumulation_dtype(x.dtype)
        zeros = f"torch.zeros(x.shape, dtype={wide}, device=x.device)"
        if wide == x.dtype:
            zeros = "torch.zeros_like(x)"
        why = f"codec {codec!r} needs error feedback"
        raise PolicyError(f"{why}: give residual={zeros}, and the same tensor in every call")
    if residual.shape != x.shape or residual.dtype != accumulation_dtype(x.dtype):
        raise PolicyError(
            f"residual is {list(residual.shape)} of {residual.dtype}, but for x, {list(x.shape)} of"
            f" {x.dtype}, it must be {list(x.shape)} of {accumulation_dtype(x.dtype)}"
        )
    if async_op:
        raise PolicyError(
            "async_op=True: an all_reduce with a residual has no handle; leave it out"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise PolicyError(f"codec {codec!r} is for gradients and has none itself: give x.detach()")
    spec = checked_algorithm("all_reduce", codec, name, ranks)
    result, left = torch.ops.commpass.sparse_all_reduce(
        x, residual, op, where, ranks, rank, codec, spec, SOURCES
    )
    with without_ambient_state():
        residual.copy_(left)
    return result


def _request(
    x: Tensor, op: str, group: str, ranks: int, rank: int, sent: Any = None, received: Any = None
) -> Request:
    sent, received = (None if sizes is None else tuple(sizes) for sizes in (sent, received))
    by_messages = sends_messages(group, x.device.type)
    return Request(group, ranks, rank, op, sent=sent, received=received, by_messages=by_messages)


def _sources() -> str:
    """Return a hash of the version and of the files that determine the result of a collective."""
    package = Path(__file__).parent.parent
    parts = [(package / part).rglob("*.py") for part in ("codecs", "collectives")]
    alone = [package / "utils" / "ambient.py", package / "utils" / "spec.py"]
    files = sorted([*alone, *parts[0], *parts[1]])
    return hashlib.sha256(
        b"".join([own_version().encode(), *(file.read_bytes() for file in files)])
    ).hexdigest()[:16]


SOURCES = _sources()
"""An argument of every call. AOTAutograd's cache identifies a graph only by its operators and
their arguments. Without this one, it could load from disk what an older commpass made of the
same call."""


class _Straight(torch.autograd.Function):
    """The collective with the gradient of the exact one: rounding is treated as the identity."""

    @staticmethod
    @ambient_free
    def forward(
        ctx: Any,
        x: Tensor,
        kind: str,
        op: str,
        group: str,
        ranks: int,
        rank: int,
        sent: Any,
        received: Any,
        codec: str,
        name: str,
        sources: str,
    ) -> Tensor:
        ctx.call = (kind, op, group, ranks, rank, sent, received, codec, name)
        return _run(
            _named(kind, name), x, _request(x, op, group, ranks, rank, sent, received), codec
        )

    @staticmethod
    @ambient_free
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kind, op, group, ranks, rank, sent, received, codec, name = ctx.call
        request = _request(gradients[0], op, group, ranks, rank, received, sent)
        back = KINDS[kind].backward
        mirror = find_algorithm(back, name) or _named(back, "direct")
        gradient = _run(mirror, gradients[0].contiguous(), request, codec)
        if op == "avg" and KINDS[kind].sums and not KINDS[back].sums:
            gradient = gradient / ranks
        return gradient, *[None] * 10


def _run(algorithm: Algorithm, x: Tensor, request: Request, codec: str) -> Tensor:
    coder = codec_named(codec)
    with sizes_of_data(coder, x, traced=get_proxy_mode() is not None):
        return run(algorithm.run(x, request, coder))


@ambient_free
def _sparse_run(
    x: Tensor,
    residual: Tensor,
    op: str,
    group: str,
    ranks: int,
    rank: int,
    codec: str,
    name: str,
    sources: str,
) -> tuple[Tensor, Tensor]:
    return run(
        _named("all_reduce", name).run(
            x, _request(x, op, group, ranks, rank), codec_named(codec), residual
        )
    )


# One operator for all kinds: Dynamo keeps it as is, AOTAutograd traces through it to plain
# operators and functional collectives.
_library = torch.library.Library("commpass", "DEF")
_library.define(
    "collective(Tensor x, str kind, str op, str group, int ranks, int rank, SymInt[]? sent,"
    " SymInt[]? received, str codec, str algorithm, str sources) -> Tensor"
)
_library.impl("collective", _Straight.apply, "CompositeImplicitAutograd")
_library.define(
    "sparse_all_reduce(Tensor x, Tensor residual, str op, str group, int ranks, int rank, str"
    " codec, str algorithm, str sources) -> (Tensor, Tensor)"
)
_library.impl("sparse_all_reduce", _sparse_run, "CompositeImplicitAutograd")
