"""Which kernels can be generated for a device, and the functions that call them in a graph.

Triton is imported only where needed, since CPU builds of torch do not include it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx

from commpass.codecs import Codec, operators
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.sparse import SparseCodec
from commpass.lowering import cpu, decode_matmul, entropy, fused, matmul, sparse
from commpass.lowering.chain import Chain, Encode


def unsupported_reason(chain: Chain, numel: int, device: torch.device) -> str:
    """Return why no kernel can be generated for rows of ``numel`` values on a device, or "" if one
    can."""
    if device.type == "cpu":
        return cpu.unsupported_reason(chain)
    if why := _no_triton(device):
        return why
    from commpass.lowering.gpu import supported

    return supported.unsupported_reason(chain, numel)


def slower_reason(chain: Chain, device: torch.device) -> str:
    """Return why the kernel of a chain, which can be generated, takes longer than two, or ""."""
    if device.type == "cpu":
        return ""
    from commpass.lowering.gpu import supported

    return supported.slower_reason(chain)


def has_kernels(codec: Codec, numel: int, device: torch.device) -> bool:
    """Whether a GPU has kernels for a codec, for rows of ``numel`` values."""
    if isinstance(codec, ExponentCodec):
        return has_exponent_kernels(device)
    if isinstance(codec, EntropyCodec):
        return not entropy.unsupported_reason(device, numel)
    if _no_triton(device):
        return False
    if isinstance(codec, SparseCodec):
        each, lengths = codec.segments(numel)
        return not sparse.unsupported_reason(each, max(lengths), torch.float32)
    return not unsupported_reason(Chain(torch.float32, (Encode(codec),)), numel, device)


def has_exponent_kernels(device: torch.device) -> bool:
    """Whether a GPU has kernels for the exponent codec, for rows of any size."""
    return not _no_triton(device)


def unsupported_product_reason(tensors: Sequence[Tensor], product: matmul.Product) -> str:
    """As ``unsupported_reason``, for a matmul whose kernel encodes its result."""
    if why := _no_triton(tensors[0].device):
        return why
    from commpass.lowering.gpu import graph

    return graph.unsupported_product_reason(tensors, product)


def unsupported_decode_reason(tensors: Sequence[Tensor], rows: decode_matmul.DecodedRows) -> str:
    """As ``unsupported_reason``, for a matmul whose kernel decodes its left operand."""
    if why := _no_triton(tensors[0].device):
        return why
    from commpass.lowering.gpu import graph

    return graph.unsupported_decode_reason(tensors, rows)


CODING = tuple(
    getattr(operators.ops, name).default for name in ("encode", "decode", "decode_parts")
)


def caller(node: fx.Node) -> Callable[..., Any] | None:
    """Return a function that computes a coded operator with Triton kernels, to be traced into a
    graph.

    It takes the input nodes of the operator. Return None if there are no kernels, or if they are
    called in another way.
    """
    products = (matmul.MATMUL, decode_matmul.DECODE_MATMUL)
    if node.target not in (*fused.CHAINS, *products, *CODING, *sparse.CODING):
        return None
    if node.target in sparse.CODING and not _no_triton(_device(node)):
        call = sparse.caller(node)
        if call is not None or node.target not in CODING:
            return call
    if node.target not in fused.CHAINS and not isinstance(node.meta["val"], Tensor):
        return None
    if _no_triton(_device(node)):
        return None
    from commpass.lowering.gpu import graph

    if node.target in CODING:
        return graph.exponent_caller(node)
    if node.target is matmul.MATMUL:
        return graph.product_caller(matmul.lookup(str(node.args[1])))
    if node.target is decode_matmul.DECODE_MATMUL:
        return graph.decode_matmul_caller(decode_matmul.lookup(str(node.args[1])))
    chain, numel = fused.lookup(str(node.args[1])), node.args[2]
    return graph.caller(chain, numel) if isinstance(numel, int) else None


def tunable(node: fx.Node) -> Any:
    """Return the call of a coded operator's kernel whose tile sizes can be timed
    (``gpu.tunable.Tunable``).

    Return None if its kernel has no tile sizes to choose from, or if sizes are not fixed.
    """
    if node.target not in (*fused.CHAINS, matmul.MATMUL) or _no_triton(_device(node)):
        return None
    from commpass.lowering.gpu import tunable

    given: list[Tensor] = []
    fx.map_arg((node.args, node.kwargs), lambda each: given.append(each.meta["val"]))
    if not all(isinstance(n, int) for each in given for n in (*each.shape, *each.stride())):
        return None
    return tunable.of_operator(node.target, node.args, given)


def _device(node: fx.Node) -> torch.device:
    value: Tensor = node.all_input_nodes[0].meta["val"]
    return value.device


def _no_triton(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} has no kernel for it"
    return "Triton is not installed" if find_spec("triton") is None else ""
