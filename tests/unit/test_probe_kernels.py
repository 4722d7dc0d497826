"""How the probe compiles the codecs that it times."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from commpass.codecs import codec
from commpass.costmodel import KernelRate
from commpass.costmodel.cards import GPU
from commpass.costmodel.kernels import CPU
from commpass.probe import kernels

CODECS = ("int8", "int4", "fp8")
"""Of one class."""


@pytest.mark.parametrize("role", ["encode", "decode"])
def test_codecs_of_one_class_are_all_compiled(role, monkeypatch):
    """Codecs share their functions, and Dynamo limits the number of compilations of one."""
    compiled = []

    def backend(gm, inputs):
        compiled.append(gm)
        return gm.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in CODECS:
            coder, rows = codec(name), torch.ones(1, 4096)
            function = coder.encode_rows
            if role == "decode":
                rows, function = (
                    coder.encode_rows(rows),
                    lambda wire, coder=coder: coder.decode_rows(wire, 4096, torch.float32),
                )
            found = kernels._compiled(function, rows)(rows)
            assert torch.equal(found, function(rows))
    assert len(compiled) == len(CODECS)


@pytest.mark.parametrize(("known", "device"), [(GPU, "cuda"), (CPU, "cpu")])
def test_every_codec_is_measured_and_serial_ones_represent_no_others(known, device, monkeypatch):
    measured, slow = KernelRate(1.0, 2.0, call_us=3.0), KernelRate(9.0, 8.0, call_us=7.0)
    seen = []
    monkeypatch.setattr(kernels, "_rate", lambda name, *_: slow if name == "ecq" else measured)
    monkeypatch.setattr(kernels, "slowest", lambda *_, **__: 1.0)
    monkeypatch.setattr(kernels.torch, "randn", lambda *_, device: torch.ones(2, 2))
    found = kernels.measure(None, torch.device(device), known, seen.append)
    assert seen == [*kernels.CODECS, "ecq"]
    assert (found.call_us, found.other) == (3.0, KernelRate(1.0, 2.0))
    assert (found.rates["ecq"], found.rates["int8"]) == (slow, measured)


def test_a_wrapper_is_not_faster_than_its_inner_codecs():
    """ecq codes one number after the other, and the wrapper has no rate of its own."""
    alone = GPU.time_us("int8", "encode", 1e3)
    for text in ("outlier(inner=ecq, width=8)", "segments(inner=dgc(values=ecq(bits=2)))"):
        assert GPU.time_us(text, "encode", 1e3) == GPU.time_us("ecq", "encode", 1e3) > 20 * alone
        assert CPU.values_us(text, "decode", 1e3) == CPU.values_us("ecq", "decode", 1e3)
    plain = CPU.time_us("outlier", "encode", 1e3)
    assert CPU.time_us("outlier(inner=int8)", "encode", 1e3) == plain
    assert CPU.time_us("taco(form=int8)", "encode", 1e3) == CPU.time_us("taco", "encode", 1e3)
