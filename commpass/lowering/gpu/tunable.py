"""Kernel calls of a graph whose tile sizes can be timed: their choices, and calls on random values.

A *choice* is a ``Tile`` of a chain, or a ``Configuration`` of a matmul that encodes its result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from commpass.codecs.block.codec import BlockCodec
from commpass.lowering import fused, matmul
from commpass.lowering.chain import Chain, encoded_dtype, output_dtype
from commpass.lowering.gpu import graph, launch, matmul_launch, matmul_sizes, tile_sizes
from commpass.lowering.gpu.generate import kernel
from commpass.lowering.gpu.matmul_encode import kernel as product_kernel
from commpass.lowering.gpu.matmul_sizes import Configuration, Matmul, Problem
from commpass.lowering.gpu.tile_sizes import Tile
from commpass.lowering.kernel import Form, form_of
from commpass.lowering.matmul import Product

Choice = Tile | Configuration
FLOPS_PER_BYTE = 300
"""Operations of tensor cores in the time of one byte of memory, of an H100. Only the order in which
kernels are timed depends on it."""


@dataclass(frozen=True)
class TunableChain:
    """A call of the kernel of a chain, for rows of ``numel`` values. ``inputs`` are its rows, then
    its further inputs."""

    chain: Chain
    numel: int
    inputs: tuple[Form, ...]

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @cached_property
    def choices(self) -> tuple[Tile, ...]:
        """The choices worth timing on this rank's GPU, the static one first."""
        lanes = launch.lanes(self.device)
        return tuple(tile_sizes.tiles(self.chain, self.numel, lanes))

    @cached_property
    def identity(self) -> str:
        """A digest of the kernel's text and of its inputs, equal on ranks with other GPUs."""
        made = kernel(self.chain, self.numel)
        return _digest(made.source.text, made.signature, self.numel, self.inputs)

    @property
    def cost(self) -> float:
        """The bytes that the kernel reads and writes, about."""
        rows, width = self.inputs[0].shape[0] // self.chain.ranks, self.numel
        if self.chain.encodes is not None:
            codec = self.chain.encodes.codec
            width = codec.wire_bytes(self.numel, encoded_dtype(self.chain))
        return _nbytes(self.inputs) + rows * width * output_dtype(self.chain).itemsize

    def caller(self, choice: Choice) -> Callable[..., Any]:
        """Return a function that calls the kernel, to be traced into a graph."""
        assert isinstance(choice, Tile)
        return graph.caller(self.chain, self.numel, choice)

    def examples(self) -> list[Tensor]:
        """Return random inputs. Rows of wires are the codes of random values."""
        found = [_random(form, seed) for seed, form in enumerate(self.inputs)]
        if (decodes := self.chain.decodes) is not None:
            form = Form(decodes.dtype, self.device, (1, self.numel), (self.numel, 1))
            wire = decodes.codec.encode_rows(_random(form, 0))
            found[0].copy_(wire.expand(found[0].shape))
        return found

    def run(self, choice: Choice, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call the kernel as a graph does, and return its results."""
        assert isinstance(choice, Tile)
        made = kernel(self.chain, self.numel, launch.lanes(self.device), choice)
        rows = inputs[0].shape[0] // self.chain.ranks
        output = launch.empty(made, rows, self.numel, self.device)
        further = launch.empty_further(made, rows, self.numel, self.device)
        launch.launch(made, inputs, output, self.numel, further, as_in_graph=True)
        return [output, *further]


@dataclass(frozen=True)
class TunableProduct:
    """A call of a matmul that encodes its result. ``inputs`` are its operands in the order of the
    operator. ``aligned`` says whether descriptors can load the first two."""

    product: Product
    inputs: tuple[Form, ...]
    aligned: bool

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def codec(self) -> BlockCodec:
        assert isinstance(self.product.codec, BlockCodec)
        return self.product.codec

    @property
    def problem(self) -> Problem:
        return matmul_launch.problem_of(self._operands(), self.product)

    @cached_property
    def choices(self) -> tuple[Configuration, ...]:
        """As those of ``TunableChain``."""
        arch = matmul_launch.arch_here(self.device)
        codec, problem, matmul = self.codec, self.problem, self._matmul()
        return tuple(
            matmul_sizes.configurations(codec, problem, arch, matmul, aligned=self.aligned)
        )

    @cached_property
    def identity(self) -> str:
        matmul_of_inputs = self._matmul()
        by = matmul_sizes.configuration(self.codec, self.problem, "sm_80", matmul_of_inputs)
        made = product_kernel(self.codec, matmul_of_inputs, by)
        return _digest(made.source.text, made.signature, self.product.rows, self.inputs)

    @property
    def cost(self) -> float:
        """The bytes that the kernel reads, or its operations in bytes, if they take longer."""
        sizes = self.problem
        return max(_nbytes(self.inputs), 2 * sizes.m * sizes.n * sizes.k / FLOPS_PER_BYTE)

    def caller(self, choice: Choice) -> Callable[..., Any]:
        assert isinstance(choice, Configuration)
        return graph.product_caller(self.product, choice)

    def examples(self) -> list[Tensor]:
        """Return random operands. Groups have equal numbers of rows."""
        tensors = [_random(form, seed) for seed, form in enumerate(self.inputs)]
        offsets = matmul.operands_of(self.product, tensors).offsets
        if offsets is not None:
            ends = torch.arange(1, len(offsets) + 1, device=offsets.device)
            offsets.copy_(ends * self.problem.m // len(offsets))
        return tensors

    def run(self, choice: Choice, inputs: Sequence[Tensor]) -> list[Tensor]:
        assert isinstance(choice, Configuration)
        return [matmul_launch.run(inputs, self.product, by=choice, as_in_graph=True)]

    def _operands(self) -> matmul.Operands:
        tensors = [
            torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="meta")
            for each in self.inputs
        ]
        return matmul.operands_of(self.product, tensors)

    def _matmul(self) -> Matmul:
        return matmul_launch.matmul_of(self._operands(), self.product)


Tunable = TunableChain | TunableProduct


def of_operator(target: Any, args: Sequence[Any], inputs: Sequence[Tensor]) -> Tunable | None:
    """Return the call of the kernel of a fused operator, or of a matmul that encodes its result,
    with its arguments and fake inputs of fixed sizes. Return None if there is one choice only."""
    call: Tunable
    forms = tuple(map(form_of, inputs))
    if target is matmul.MATMUL:
        aligned = matmul_launch.are_aligned(*inputs[:2])
        call = TunableProduct(matmul.lookup(str(args[1])), forms, aligned)
    else:
        call = TunableChain(fused.lookup(str(args[1])), args[2], forms)
    return call if len(call.choices) > 1 else None


def values_of(choice: Choice) -> dict[str, int | bool]:
    """Return a choice as plain data."""
    return dataclasses.asdict(choice)


def find_choice(call: Tunable, values: dict[str, int | bool]) -> Choice | None:
    """Return the choice with these values, or None if it is not among those of this rank's GPU."""
    return next((each for each in call.choices if values_of(each) == values), None)


def describe(choice: Choice) -> str:
    """Return a choice in words."""
    if isinstance(choice, Tile):
        return f"{choice.blocks} blocks in {choice.num_warps} warps"
    return f"{choice.block_m} x {choice.block_n} in {choice.num_stages} stages"


def _digest(text: str, signature: dict[str, str], number: int, inputs: Sequence[Form]) -> str:
    forms = [(str(each.dtype), each.shape, each.stride) for each in inputs]
    return hashlib.sha256(f"{text}\n{signature}\n{number}\n{forms}".encode()).hexdigest()[:24]


def _nbytes(inputs: Sequence[Form]) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in inputs)


def _random(form: Form, seed: int) -> Tensor:
    """Return a tensor of normally distributed values; zeros for whole numbers."""
    steps = zip(form.shape, form.stride, strict=True)
    length = 1 + sum((size - 1) * step for size, step in steps) if 0 not in form.shape else 0
    memory = torch.zeros(length, dtype=form.dtype, device=form.device)
    if form.dtype.is_floating_point:
        memory.normal_(generator=torch.Generator(form.device).manual_seed(seed))
    return memory.as_strided(form.shape, form.stride)
