"""Generated kernels in a graph, as calls that Inductor schedules and plans memory for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch._higher_order_ops import triton_kernel_wrap

import commpass.lowering.exponent  # noqa: F401  its operators are called here
from commpass.codecs import operators
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.lowering.chain import Chain
from commpass.lowering.decode_matmul import DecodedRows
from commpass.lowering.gpu import decode_matmul_launch, exponent, launch, matmul_launch
from commpass.lowering.gpu.generate import kernel
from commpass.lowering.gpu.matmul_sizes import Configuration
from commpass.lowering.gpu.matmul_supported import unsupported_reason
from commpass.lowering.gpu.tile_sizes import Tile
from commpass.lowering.matmul import Product, operands_of

FOLLOWS_ALL_PATHS = hasattr(triton_kernel_wrap, "identify_accessed_tensors")
"""Whether torch follows every path from the loads and stores of a kernel to its arguments, as 2.13
does and 2.11 does not (pytorch#193703). Codec ``exponent`` has too many: compiling would hang."""


def caller(
    chain: Chain, numel: int, tile: Tile | None = None
) -> Callable[..., Tensor | list[Tensor]]:
    """Return a function that calls the kernel of a chain, for rows of ``numel`` values, with the
    static tile or another one. Traced, it leaves buffers and a call that writes them and returns
    nothing. A chain with further results returns a list, its result first."""

    def call(*inputs: Tensor) -> Tensor | list[Tensor]:
        rows, device = inputs[0].shape[0] // chain.ranks, inputs[0].device
        generated = kernel(chain, numel, launch.lanes(device), tile)
        output = launch.empty(generated, rows, numel, device)
        further = launch.empty_further(generated, rows, numel, device)
        launch.launch(generated, inputs, output, numel, further, graph=True)
        return [output, *further] if further else output

    return torch.func.functionalize(call)


def exponent_caller(node: fx.Node) -> Callable[..., Tensor] | None:
    """Return a function that encodes or decodes losslessly, for a coded operator of fixed sizes;
    None for others. If torch cannot analyze the kernels, an operator of commpass launches them."""
    codec = operators.lookup(str(node.args[1]))
    value = node.meta["val"]
    if not isinstance(codec, ExponentCodec) or not isinstance(value, Tensor):
        return None
    encodes = node.target is operators.ops.encode.default
    rows: Tensor = node.all_input_nodes[0].meta["val"] if encodes else value
    fixed = all(isinstance(n, int) for n in (*rows.shape, *rows.stride(), *value.shape))
    if not fixed or exponent.unsupported_reason(rows.shape[1], rows.dtype) is not None:
        return None

    def call(*inputs: Tensor) -> Tensor:
        ours = torch.ops.commpass
        if encodes and FOLLOWS_ALL_PATHS:
            return ours.exponent_encode(inputs[0], codec.spec, True)
        if encodes:
            return exponent.encode_rows(codec, inputs[0], graph=True)
        wire = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
        if FOLLOWS_ALL_PATHS:
            return ours.exponent_decode(wire, codec.spec, rows.shape[1], rows.dtype, True)
        return exponent.decode_rows(codec, wire, rows.shape[1], rows.dtype, graph=True)

    return torch.func.functionalize(call)


def unsupported_product_reason(tensors: Sequence[Tensor], product: Product) -> str:
    """Return why no kernel can encode the result of a matmul, or "" if one can."""
    given = operands_of(product, tensors)
    if why := matmul_launch.unsupported_layout(given):
        return why
    matmul = matmul_launch.matmul_of(given, product)
    problem = matmul_launch.problem_of(given, product)
    arch = matmul_launch.arch_of(given.a.device)
    return unsupported_reason(product.codec, matmul, problem, arch=arch)


def product_caller(product: Product, by: Configuration | None = None) -> Callable[..., Tensor]:
    """As ``caller``, for the operands of a product."""

    def call(*tensors: Tensor) -> Tensor:
        return matmul_launch.run(tensors, product, by=by, graph=True)

    return torch.func.functionalize(call)


def unsupported_decode_reason(tensors: Sequence[Tensor], rows: DecodedRows) -> str:
    """Return why no kernel can decode the left operand of a matmul, or "" if one can."""
    arch = matmul_launch.arch_of(tensors[0].device)
    return decode_matmul_launch.unsupported_call(tensors, rows, arch)


def decode_matmul_caller(rows: DecodedRows) -> Callable[..., Tensor]:
    """As ``caller``, for the operands of a matmul that decodes its left one."""

    def call(*tensors: Tensor) -> Tensor:
        return decode_matmul_launch.run(tensors, rows, graph=True)

    return torch.func.functionalize(call)
