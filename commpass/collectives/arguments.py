"""Checks of the arguments of explicit calls: group, codec, algorithm, tensor, lengths of parts."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from commpass.codecs import FLOATS, Codec, DifferenceCodec, SparseCodec
from commpass.codecs import codec as codec_named
from commpass.collectives.table import REDUCE_OPS, algorithm
from commpass.errors import PolicyError, nearest
from commpass.groups import group_named, need_group
from commpass.plan.kinds import KINDS


def group_name(kind: str, group: Any) -> str:
    _check_ready(kind)
    if isinstance(group, str):
        return group
    resolve: Any = functional._resolve_group_name
    try:
        return resolve(dist.group.WORLD if group is None else group)
    except (ValueError, IndexError, AssertionError) as error:
        raise PolicyError(_no_group(group, error)) from error


def _no_group(group: Any, error: Exception) -> str:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return (
            "group: this rank is not in it (torch.distributed.new_group gives such ranks none); "
            "make this call on the ranks of the group alone"
        )
    return (
        f"group={group!r} is no process group: give a group, a mesh of one dimension or "
        f"(mesh, number of the dimension); torch says: {error}"
    )


# Dynamo treats the results of these as constants: a group, a codec and an algorithm never change.
@torch.compiler.assume_constant_result
def _check_ready(kind: str) -> None:
    need_group(f"commpass.{kind}")


@torch.compiler.assume_constant_result
def size_and_rank(name: str) -> tuple[int, int]:
    group = group_named(name)
    if group is None:
        raise PolicyError(
            f"group={name!r}: no process group has this name, which is torch's own and not that "
            f"of a mesh's dimension; give the group itself, e.g. mesh.get_group({name!r})"
        )
    return group.size(), group.rank()


@torch.compiler.assume_constant_result
def spec_of(codec: str | Codec) -> str:
    return codec_named(codec).spec


@torch.compiler.assume_constant_result
def selects_values(spec: str) -> bool:
    return isinstance(codec_named(spec), SparseCodec)


@torch.compiler.assume_constant_result
def checked_algorithm(kind: str, codec: str, name: str, ranks: int) -> str:
    """Return the algorithm's full name. Raises PolicyError if it cannot run this kind of collective
    with this codec on ``ranks`` ranks."""
    chosen = algorithm(kind, name)
    if isinstance(codec_named(codec), DifferenceCodec):
        raise PolicyError(
            f"{kind}: codec {codec!r} needs what the receivers hold, which graphs and the"
            " integrations of commpass.parallel keep for parameters; give a codec without"
            " state, or encode and decode with commpass.codec(...).against(reference)"
        )
    if reason := chosen.unsupported_reason(codec_named(codec), ranks):
        raise PolicyError(f"{kind} by {chosen.spec}: {reason}")
    return chosen.spec


def check_input(kind: str, x: Tensor, op: str, ranks: int, even: bool = True) -> None:
    if op not in REDUCE_OPS:
        raise PolicyError(f"{kind}: op {op!r} cannot be compressed{nearest(op, REDUCE_OPS)}")
    if x.dtype not in FLOATS:
        raise PolicyError(
            f"{kind}: {x.dtype} cannot be compressed; cast to float32, bfloat16 or float16 first"
        )
    facts = KINDS[kind]
    if (facts.scatters or facts.gathers) and x.dim() == 0:
        raise PolicyError(f"{kind}: a scalar has no first dimension; use x.reshape(1)")
    if facts.scatters and even and x.shape[0] % ranks:
        must = f"must be a multiple of {ranks} ranks"
        if facts.splits:
            must = f"is no multiple of {ranks} ranks: give input_split_sizes and output_split_sizes"
        raise PolicyError(f"{kind}: the first dimension, {x.shape[0]}, {must}")


def whole_lengths(kind: str, argument: str, sizes: Any) -> list[int]:
    """Return lengths of parts as ints; symbolic ones stay. Raises PolicyError for other values.

    Whole numbers of NumPy and of int tensors become ints, so that their values are checked too.
    """
    if sizes is not None and torch.compiler.is_compiling():  # Dynamo tells which are symbolic
        return list(sizes)
    try:
        lengths: list[Any] = [
            s if isinstance(s, (int, torch.SymInt)) else operator.index(s) for s in sizes
        ]
    except TypeError as error:
        must = "must be a sequence of whole numbers, one for each rank"
        raise PolicyError(f"{kind}: {argument}={sizes!r} {must}") from error
    return lengths


def check_splits(x: Tensor, sent: list[int] | None, received: list[int] | None, ranks: int) -> None:
    if sent is None and received is None:
        return
    if sent is None or received is None:
        raise PolicyError(
            "all_to_all: give both input_split_sizes and output_split_sizes, or neither for even"
            " parts"
        )
    for what, sizes in (("input_split_sizes", sent), ("output_split_sizes", received)):
        if len(sizes) != ranks:
            raise PolicyError(f"all_to_all: {what} has {len(sizes)} numbers for {ranks} ranks")
        if all(isinstance(size, int) for size in sizes) and min(sizes) < 0:
            raise PolicyError(f"all_to_all: {what} {sizes} has a negative number")
    if all(isinstance(size, int) for size in (*sent, x.shape[0])) and sum(sent) != x.shape[0]:
        raise PolicyError(
            f"all_to_all: input_split_sizes {sent} add up to {sum(sent)}, but the first dimension"
            f" of x is {x.shape[0]}"
        )


def splits_of(
    kind: str, x: Tensor, parts: list[int], ranks: int, rank: int
) -> tuple[list[int], list[int]]:
    """Return the lengths that a rank sends and receives if ``parts`` are those of all ranks."""
    if len(parts) != ranks:
        raise PolicyError(f"{kind}: splits has {len(parts)} numbers for {ranks} ranks")
    fixed = all(isinstance(size, int) for size in (*parts, x.shape[0]))
    if fixed and min(parts) < 0:
        raise PolicyError(f"{kind}: splits {parts} has a negative number")
    scatters = KINDS[kind].scatters
    length = sum(parts) if scatters else parts[rank]
    if fixed and length != x.shape[0]:
        what = f"add up to {length}" if scatters else f"has {length} for rank {rank}"
        raise PolicyError(
            f"{kind}: splits {parts} {what}, but the first dimension of x is {x.shape[0]}"
        )
    own = [parts[rank]] * ranks
    return (parts, own) if scatters else (own, parts)
