"""The device on which kernels are launched."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import fake_cuda
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.lowering.chain import Chain, Encode

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

from commpass.lowering.decode_matmul import DecodedRows
from commpass.lowering.gpu import (
    call,
    decode_matmul_launch,
    exchange,
    exponent,
    launch,
    matmul_launch,
)
from commpass.lowering.matmul import Product

BFLOAT16 = torch.bfloat16


def by_chain(x: torch.Tensor) -> None:
    launch.run(Chain(BFLOAT16, (Encode(codec("int8")),)), x, x.shape[1])


def by_call(x: torch.Tensor) -> None:
    exponent.encode_rows(codec("exponent"), x)


def by_matmul(x: torch.Tensor) -> None:
    matmul_launch.run([x, x.t().contiguous()], Product(codec("int8"), 1))


def by_decode_matmul(x: torch.Tensor) -> None:
    coder = codec("int8")
    wire = x.new_empty((2, coder.wire_bytes(x.numel(), BFLOAT16)), dtype=torch.uint8)
    decode_matmul_launch.run([wire, x], DecodedRows(coder, x.numel(), BFLOAT16, False))


def by_exchange(x: torch.Tensor) -> None:
    what = exchange.Exchange("one_shot", codec("int8"), BFLOAT16, x.numel(), 2)
    peers = torch.empty(2, dtype=torch.int64, device=x.device)
    exchange.run(exchange.Workspace(exchange.capacity_for([what]), 2, 0, peers, x), what, x)


LAUNCHES = [by_chain, by_call, by_matmul, by_decode_matmul, by_exchange]


class Cards:
    """The current device, and the one of each launch."""

    def __init__(self) -> None:
        self.now, self.launched = 0, []

    def exchange(self, device: int) -> int:
        before, self.now = self.now, device
        return before

    def load(self, source: object) -> Cards:
        return self

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **kwargs: self.launched.append(self.now)


@pytest.mark.parametrize("launches", LAUNCHES)
def test_kernels_are_launched_on_the_device_of_their_tensors(launches):
    cards = Cards()
    with fake_cuda.a_card(), FakeTensorMode(), ExitStack() as stack:
        for name in ("_exchange_device", "_maybe_exchange_device"):
            stack.enter_context(patch.object(torch.cuda, name, cards.exchange))
        for module in (launch, call, exchange, matmul_launch, decode_matmul_launch):
            stack.enter_context(patch.object(module, "load", cards.load))
        launches(torch.empty((1024, 1024), dtype=BFLOAT16, device="cuda:1"))
    assert cards.launched
    assert set(cards.launched) == {1}
    assert cards.now == 0


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_second_call_of_an_exchange_hashes_no_codec_and_generates_nothing(algorithm, fake_group):
    """Both would take longer than the kernel."""
    fake_group(2)
    cards, hashed, made = Cards(), [], []
    plain_hash, generated = BlockCodec.__hash__, exchange.kernel

    def counted(self: BlockCodec) -> int:
        hashed.append(self.spec)
        return plain_hash(self)

    def workspace(what: exchange.Exchange, *others: object):
        made.append("workspace")
        memory = torch.empty(2, dtype=torch.int64, device="cuda:0")
        return exchange.Workspace(exchange.capacity_for([what]), 2, 0, memory, memory), what

    def kernel(what: exchange.Exchange):
        made.append("kernel")
        return generated(what)

    with fake_cuda.a_card(), FakeTensorMode(), ExitStack() as stack:
        stack.enter_context(patch.object(BlockCodec, "__hash__", counted))
        for name, by in (("load", cards.load), ("workspace", workspace), ("kernel", kernel)):
            stack.enter_context(patch.object(exchange, name, by))
        x = torch.empty(1024, dtype=BFLOAT16, device="cuda:0")
        exchange.all_reduce(x, None, "int8", algorithm)
        assert made == ["workspace", "kernel"]
        hash(codec("int8"))
        assert hashed, "the hash is not counted"
        hashed.clear()
        exchange.all_reduce(x, None, "int8", algorithm)
    assert not hashed
    assert made == ["workspace", "kernel"]
    assert len(cards.launched) == 2
