"""Launches of every generated kernel at its largest sizes, without a GPU: their types, integers and
grids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from intervals import Interval, Launch, Overflow, overflows
from torch import Tensor
from ttir import compile_to_ttir

from commpass.codecs import SparseCodec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.entropy.coder import CHUNK, COARSEST
from commpass.codecs.entropy.operators import sizes
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.lowering.chain import Chain
from commpass.lowering.gpu import (
    decode_matmul,
    decode_matmul_launch,
    entropy,
    exchange,
    exchange_kernel,
    exponent,
    generate,
    launch,
    sparse,
    supported,
)
from commpass.lowering.gpu.call import Call, calls_of, signature
from commpass.lowering.gpu.exchange_sizes import Exchange
from commpass.lowering.gpu.matmul_launch import Steps
from commpass.lowering.gpu.matmul_launch import call as matmul_call
from commpass.lowering.gpu.matmul_sizes import Matmul, Problem, configuration
from commpass.lowering.gpu.source import Source, load
from commpass.lowering.inspect.kernels import row_bytes

MOST_VALUES = 2**33
INFINITY = 0x7F80_0000
"""The bits of the largest threshold of a float32."""


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of a kernel, with what is ``assumed`` of data (as in ``Launch``).

    ``types`` are those of its arguments as Triton takes them for these numbers: one below 2^31 is
    passed in 32 bits, whatever the kernel computes with it.
    """

    source: Source
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    integers: Mapping[str, int]
    grid: tuple[int, int, int]
    warps: int
    assumed: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)

    def overflows(self) -> list[Overflow]:
        """Return the indices and sizes that may leave their width."""
        function = compile_to_ttir(load(self.source), self.types, self.constants, self.warps)
        integers = {name: (number, number) for name, number in self.integers.items()}
        return overflows(function, Launch(integers, self.grid, **self.assumed))


def types_of(declared: Mapping[str, str], integers: Mapping[str, int]) -> dict[str, str]:
    """Return the types of arguments in a launch: integers have the width of their number."""
    small = {name: "i32" if abs(each) < 2**31 else "i64" for name, each in integers.items()}
    return {name: small.get(name, kind) for name, kind in declared.items()}


def largest(is_possible: Callable[[int], bool], most: int = 2**33) -> int:
    """Return the largest number up to ``most`` that is possible, if all smaller ones are."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return low


# --- chains ---------------------------------------------------------------------------------------


def of_chain(chain: Chain) -> Iterator[KernelLaunch]:
    """Yield launches of a chain: the longest rows, and the most rows."""
    unit = max(chain.width, 1)
    most = unit * largest(
        lambda n: not supported.unsupported_reason(chain, n * unit), 2**33 // unit
    )
    for numel in {most, min(most, unit * max(1, 2**13 // unit))} - {0}:
        rows = min(2**20, max(1, MOST_VALUES // numel // chain.ranks))
        yield chain_launch(chain, numel, rows)


def chain_launch(chain: Chain, numel: int, rows: int) -> KernelLaunch:
    generated = generate.kernel(chain, numel)
    read, written = row_bytes(chain, numel)
    stride = read if chain.decodes else numel
    integers = launch.scalars(generated, numel, rows, stride, written if chain.encodes else numel)
    return KernelLaunch(
        generated.source,
        types_of(generated.signature, integers),
        generated.constants,
        integers,
        launch.grid(generated, numel, rows),
        generated.num_warps,
    )


# --- kernels that are written as functions --------------------------------------------------------


def of_calls(
    run: Callable[[], object], assumed: Mapping[str, Mapping[str, Interval]] | None = None
) -> list[KernelLaunch]:
    return [_call_launch(each, assumed or {}) for each in calls_of(run)]


def _call_launch(call: Call, assumed: Mapping[str, Mapping[str, Interval]]) -> KernelLaunch:
    integers = {
        name: int(value) for name, value in call.arguments.items() if not isinstance(value, Tensor)
    }
    declared = {name: kind for name, kind in signature(call).items() if kind != "constexpr"}
    types = types_of(declared, integers)
    grid = (call.programs, 1, 1)
    return KernelLaunch(call.source, types, call.constants, integers, grid, call.warps, assumed)


def of_exponent(codec: ExponentCodec, dtype: torch.dtype, numel: int, rows: int):
    """Return the launches of encode and decode."""
    x = _meta(dtype, rows, numel)
    wire = _meta(torch.uint8, rows, codec.wire_bytes(numel, dtype))
    return [
        *of_calls(lambda: exponent.encode_rows(codec, x)),
        *of_calls(lambda: exponent.decode_rows(codec, wire, numel, dtype)),
    ]


def of_entropy(codec: EntropyCodec, dtype: torch.dtype, numel: int, rows: int):
    """Return the launches of encode and decode."""
    x = _meta(dtype, rows, numel)
    code, side = (_meta(torch.uint8, rows, each) for each in sizes(numel, codec.form.nbytes, dtype))
    given = codec.form, codec.rotated
    words = (0, 2 * CHUNK)  # two of each number at most
    steps = dict.fromkeys(("finest", "coarsest", "first"), (-COARSEST, COARSEST))
    assumed = {"variables": {"written": words, "read": words, "attempt": (0, 20), **steps}}
    return [
        *of_calls(lambda: entropy.encode_rows(x, *given), assumed),
        *of_calls(lambda: entropy.decode_rows(code, side, *given, 1e38, numel), assumed),
    ]


def of_sparse(codec: SparseCodec, dtype: torch.dtype, numel: int, rows: int):
    """Return the launches of encode, decode and the sum."""
    x, residual = _meta(dtype, rows, numel), _meta(torch.float32, rows, numel)
    wires = _meta(torch.uint8, rows, codec.wire_bytes(numel, dtype))
    sizes = sparse.Sizes()
    blocks, slots = -(-numel // sizes.block), codec.slots(numel)
    memory = {"indices": (0, numel), "starts": (0, slots), "used": (0, slots), "ends": (0, slots)}
    assumed = {
        "memory": memory | {"bounds": (0, INFINITY)},
        "counters": {"state": (0, rows * blocks - 1)},  # the order in which programs begin
        "variables": {"sures": (0, numel), "maybes": (0, numel), "room": (0, slots)},
    }
    return [
        *of_calls(lambda: sparse.encode(codec, x, residual, sizes), assumed),
        *of_calls(lambda: sparse.decode(codec, wires, numel, dtype, sizes), assumed),
        *of_calls(lambda: sparse.sum_rows(codec, wires, numel, dtype, sizes), assumed),
    ]


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- exchange and matmul --------------------------------------------------------------------------


def of_exchange(shape: Exchange) -> KernelLaunch:
    made = exchange_kernel.kernel(shape)
    integers = exchange.numbers(shape, shape.ranks - 1, exchange.capacity_for([shape]))
    return KernelLaunch(
        made.source,
        types_of(made.signature, integers),
        made.constants,
        integers,
        (shape.programs, shape.rows, 1),
        made.num_warps,
    )


def of_matmul(
    codec: BlockCodec, problem: Problem, arch: str = "sm_90", **more: Any
) -> KernelLaunch:
    """Return a launch with operands as far apart in memory as kernels take them."""
    matmul = Matmul(torch.bfloat16, b_by_rows=False, **more)
    by = configuration(codec, problem, arch, matmul)
    casts = {"CASTS": True, "FP8": arch == "sm_90"}
    steps = Steps(problem.k, problem.k, 2**40, 2**40)
    made = matmul_call(codec, matmul, problem, by, steps, casts)
    grid = (*made.grid(132), 1, 1)
    types = types_of(made.kernel.signature, made.numbers)
    source = made.kernel.source
    return KernelLaunch(source, types, made.constants, made.numbers, grid, by.num_warps)


def of_decode_matmul(
    codec: BlockCodec, problem: decode_matmul.Problem, arch: str = "sm_90"
) -> KernelLaunch:
    """Return a launch of a matmul that decodes its left operand."""
    matmul = decode_matmul.Matmul(torch.bfloat16, b_by_rows=False, bias=torch.bfloat16)
    by = decode_matmul.tile_of(codec, problem, arch)
    casts = {"CASTS": True, "FP8": arch == "sm_90"}
    stride = codec.wire_bytes(problem.numel, torch.bfloat16)
    made = decode_matmul_launch.call(codec, matmul, problem, by, stride, problem.k, casts)
    types = types_of(made.kernel.signature, made.numbers)
    grid = (made.programs, 1, 1)
    return KernelLaunch(made.kernel.source, types, made.constants, made.numbers, grid, by.num_warps)
