"""How the probe compiles the codecs that it times."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

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
    measured, slow = KernelRate(1.0, 2.0), KernelRate(9.0, 8.0)
    calls = dict(
        zip((*kernels.CODECS, "ecq"), (3.0, 3.0, 900.0, 4.0, 5.0, 2.0, 700.0), strict=True)
    )
    seen = []
    monkeypatch.setattr(
        kernels, "_rate", lambda name, *_: (slow if name == "ecq" else measured, calls[name])
    )
    monkeypatch.setattr(kernels, "slowest", lambda *_, **__: 1.0)
    monkeypatch.setattr(kernels.torch, "randn", lambda *_, device: torch.ones(2, 2))
    found = kernels.measure(None, torch.device(device), known, seen.append)
    assert seen == [*kernels.CODECS, "ecq"]
    assert found.call_us == 3.5, "one call that took long counts little"
    # Others over the slowest: on a GPU, exponent is slower than others are assumed to be.
    stated = {"cuda": max(1.0, (3.0 / 0.5) / (3.34 / 0.40)), "cpu": 3.0 / 1.55}
    assert found.other.encode_ns == pytest.approx(stated[device], rel=1e-3)
    assert found.rates["ecq"] == dataclasses.replace(slow, call_us=700.0)
    assert found.rates["int8"] == measured


@pytest.mark.parametrize("name", ["int8", "rotated", "exponent"])
def test_a_cpu_is_timed_with_the_code_that_graphs_call(name, monkeypatch):
    """Inductor's own code of ``rotated`` takes four times as long."""
    monkeypatch.setattr(kernels, "LARGE", 1 << 12)
    monkeypatch.setattr(kernels, "_inline", None)
    timed, x = [], torch.randn(1, 1 << 12)
    monkeypatch.setattr(kernels.torch, "randn", lambda *_, device: x)
    monkeypatch.setattr(kernels, "_call_us", lambda *_: 5.0)

    def clock(run):
        timed.append(run())
        return 1.0

    group = SimpleNamespace(size=lambda: 1)
    rate, call_us = kernels._rate(name, group, torch.device("cpu"), clock)
    wire, rows = timed
    coder = codec(name)
    # A rotation adds up in another order than the plain form.
    torch.testing.assert_close(rows, coder.decode_rows(wire, x.numel(), torch.float32))
    assert (rate.encode_ns, call_us) == (round(1e9 / 4096, 4), 5.0)


@pytest.mark.parametrize(("name", "device"), [("ecq", "cpu"), ("int8", "cuda"), ("cast", "cpu")])
def test_what_has_no_cpp_is_timed_as_inductor_compiles_it(name, device):
    made = kernels._by_kernel(codec(name), torch.device(device))
    assert made is None


def test_a_wrapper_is_not_faster_than_its_inner_codecs():
    """ecq codes one number after the other, and the wrapper has no rate of its own."""
    alone = GPU.time_us("int8", "encode", 1e3)
    assert GPU.time_us("dgc(values=ecq)", "encode", 1e3) > GPU.time_us("dgc", "encode", 1e3)
    assert GPU.time_us("dgc(values=ecq)", "encode", 1e6) >= GPU.time_us("ecq", "encode", 1e6)
    for text in ("outlier(inner=ecq, width=8)", "segments(inner=randomk(values=ecq(bits=2)))"):
        assert GPU.time_us(text, "encode", 1e3) == GPU.time_us("ecq", "encode", 1e3) > 20 * alone
        assert CPU.values_us(text, "decode", 1e3) == CPU.values_us("ecq", "decode", 1e3)
    plain = CPU.time_us("outlier", "encode", 1e3)
    assert CPU.time_us("outlier(inner=int8)", "encode", 1e3) == plain
    assert CPU.time_us("taco(form=int8)", "encode", 1e3) == CPU.time_us("taco", "encode", 1e3)
