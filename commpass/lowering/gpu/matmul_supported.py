"""Which matmuls can encode their own result."""

from __future__ import annotations

import torch

from commpass.codecs import Codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.layouts import Flat
from commpass.lowering.chain import Chain, Encode
from commpass.lowering.gpu import supported
from commpass.lowering.gpu.matmul_sizes import SHARED, WIDEST, Matmul, Problem
from commpass.lowering.matmul import BATCHED, GROUPED

OPERANDS = (torch.bfloat16, torch.float16)
TOO_MANY = 2**31
"""The number of values of one tensor must be below this."""
SMALLEST_SEGMENT = 64
"""The fewest rows of a part of a batch that lies in one shard: tiles have no fewer."""
MOST_GROUPS = 1022
"""The most groups: each program compares its tile with where each of them begins."""


def unsupported_reason(
    codec: Codec, matmul: Matmul, problem: Problem, *, arch: str = "sm_90"
) -> str:
    """Return why a matmul cannot encode its own result, or "" if it can."""
    if not isinstance(codec, BlockCodec):
        return f"{codec.spec}: no block codec, and kernels are made of the parts of one"
    if not isinstance(codec.layout, Flat):
        return f"{codec.spec}: its blocks are not consecutive values"
    if why := _unsupported_dtypes(matmul, arch):
        return why
    block, n = codec.block, problem.n
    if why := supported.unsupported_reason(_chain(codec), problem.rows * n):
        return why
    if supported.needs_row_peaks(_chain(codec)):
        return f"{codec.spec}: the peak of a row must be known before it is encoded"
    if block > WIDEST:
        return f"{codec.spec}: blocks of {block} values, wider than a tile of {WIDEST} columns"
    if n % block:
        return f"{n} columns are no multiple of {codec.spec}'s blocks of {block}: blocks cross rows"
    if problem.m % problem.ranks:
        return f"{problem.m} rows for {problem.ranks} ranks: shards begin inside a row"
    if min(problem.m, n, problem.k, problem.batches) < 1:
        return "nothing to multiply"
    if why := _unsupported_batches(matmul, problem):
        return why
    largest = max(problem.m * problem.k, problem.batches * problem.k * n, problem.m * n)
    return f"{largest:,} values in a tensor: kernels count to 2^31" if largest >= TOO_MANY else ""


def _unsupported_dtypes(matmul: Matmul, arch: str) -> str:
    if arch not in SHARED:
        return f"{arch}: no kernels for it"
    if matmul.dtype not in OPERANDS:
        return f"{_name(matmul.dtype)} operands: tensor cores take bfloat16, float16 and e4m3"
    if matmul.bias is not None and matmul.bias not in supported.TYPES:
        return f"a bias in {_name(matmul.bias)}"
    return ""


def _unsupported_batches(matmul: Matmul, problem: Problem) -> str:
    segment = problem.segment(matmul.form)
    if matmul.form == BATCHED and segment < SMALLEST_SEGMENT:
        return (
            f"batches of {problem.height} rows in shards of {problem.rows}: parts of both have "
            f"{segment}, and tiles {SMALLEST_SEGMENT} or more"
        )
    if matmul.form == GROUPED and problem.batches > MOST_GROUPS:
        return f"{problem.batches} groups: more than {MOST_GROUPS}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _chain(codec: Codec) -> Chain:
    return Chain(torch.float32, (Encode(codec),))
