"""``commpass.all_reduce`` and its kin: compressed collectives to call by hand, eagerly or inside a compiled function.

Gradients pass straight through the rounding: the backward of each is the compressed collective that torch's own
functional collective has there (all_reduce for all_reduce; all_gather and reduce_scatter for each other).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from commpass.codecs import FLOATS, Codec
from commpass.codecs import codec as codec_named
from commpass.collectives.algorithms import REDUCE_OPS, algorithm_named, algorithms_of
from commpass.errors import PolicyError, nearest


def all_reduce(x: Tensor, op: str = "sum", group: Any = None, *, codec: str | Codec = "int8",
               algorithm: str = "two_shot") -> Tensor:  # fmt: skip
    """The sum (or ``op="avg"``) of ``x`` over the ranks of ``group``, with the same bits on every rank.

    ``x`` is a float tensor of any shape; ``group`` as in torch's functional collectives, the default group if None;
    ``algorithm`` is ``one_shot`` or ``two_shot``. Raises PolicyError for a codec, algorithm, op or dtype that cannot be.
    """
    return _run("all_reduce", x, op, group, codec, algorithm)


def all_gather(x: Tensor, group: Any = None, *, codec: str | Codec = "int8") -> Tensor:
    """``[n, ...]`` of every rank, joined along the first dimension in rank order: ``[ranks * n, ...]`` on each."""
    return _run("all_gather", x, "sum", group, codec, "direct")


def reduce_scatter(x: Tensor, op: str = "sum", group: Any = None, *, codec: str | Codec = "int8") -> Tensor:
    """The sum (or mean) over the ranks of ``[ranks * n, ...]``, of which rank r gets part r: ``[n, ...]``."""
    return _run("reduce_scatter", x, op, group, codec, "direct")


def _run(kind: str, x: Tensor, op: str, group: Any, codec: str | Codec, algorithm: str) -> Tensor:
    resolve: Any = functional._resolve_group_name
    name = resolve(dist.group.WORLD if group is None else group)
    ranks = _size(name)
    _check(kind, x, op, ranks, algorithm)
    return torch.ops.commpass.collective(x, kind, op, ranks, name, _spec(codec), algorithm)


# Dynamo takes the results of these two as constants: neither the size of a group nor a codec's name ever changes.
@torch.compiler.assume_constant_result
def _size(name: str) -> int:
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name).size()


@torch.compiler.assume_constant_result
def _spec(codec: str | Codec) -> str:
    coder = codec_named(codec)
    if coder.state is not None:
        raise PolicyError(f"codec {coder.spec!r} needs {coder.state}, which a call by hand does not keep")
    return coder.spec


def _check(kind: str, x: Tensor, op: str, ranks: int, algorithm: str) -> None:
    names = [a.name for a in algorithms_of(kind)]
    if algorithm not in names:
        raise PolicyError(f"{kind} has no algorithm {algorithm!r}{nearest(algorithm, names)}")
    if op not in REDUCE_OPS:
        raise PolicyError(f"{kind}: op {op!r} cannot be compressed{nearest(op, REDUCE_OPS)}")
    if x.dtype not in FLOATS:
        raise PolicyError(f"{kind}: {x.dtype} cannot be compressed; cast to float32, bfloat16 or float16 first")
    if kind != "all_reduce" and x.dim() == 0:
        raise PolicyError(f"{kind}: a scalar has no first dimension; use x.reshape(1)")
    if kind == "reduce_scatter" and x.shape[0] % ranks:
        raise PolicyError(f"reduce_scatter: the first dimension, {x.shape[0]}, must be a multiple of {ranks} ranks")


MIRROR = {"all_reduce": "all_reduce", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
"""The collective that carries the gradient of each."""


class _Straight(torch.autograd.Function):
    """The collective with the gradient of the exact one: rounding is taken for the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, op: str, ranks: int, group: str, codec: str, algorithm: str) -> Tensor:
        ctx.call = (kind, op, ranks, group, codec, algorithm)
        return algorithm_named(kind, algorithm).run(x, op, ranks, group, codec_named(codec))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kind, op, ranks, group, codec, algorithm = ctx.call
        mirror = algorithm_named(MIRROR[kind], algorithm)
        gradient = mirror.run(gradients[0].contiguous(), op, ranks, group, codec_named(codec))
        if kind == "reduce_scatter" and op == "avg":
            gradient = gradient / ranks
        return gradient, None, None, None, None, None, None


# One operator for all: Dynamo keeps it as it is, AOTAutograd traces through it to plain operators and functional collectives.
_library = torch.library.Library("commpass", "DEF")
_library.define("collective(Tensor x, str kind, str op, int ranks, str group, str codec, str algorithm) -> Tensor")
_library.impl("collective", _Straight.apply, "CompositeImplicitAutograd")
