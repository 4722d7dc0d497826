"""Predictions for kernels whose work depends on the values: what is assumed of typical values
agrees with encoded ones, and loops in the machine code are those that are weighted."""

from __future__ import annotations

import math

import pytest
import torch

from commpass.codecs import codec
from commpass.codecs.exponent.floats import CHUNK, FORMS
from commpass.lowering.gpu.source import Source, without_rare
from commpass.lowering.inspect.architectures import ARCHITECTURES
from commpass.lowering.inspect.kernels import kernels_named
from commpass.lowering.inspect.lowerable import lower, together
from commpass.lowering.inspect.one_warp import clocks_of_one_warp, registers
from commpass.lowering.inspect.roofline import predict
from commpass.lowering.inspect.sass import Instruction, count_instructions, parse_sass
from commpass.lowering.inspect.typical import WORD, exponents, mean_maximum
from tests.unit.test_inspect import H100, listing

NUMEL = 1 << 20
SM_90 = ARCHITECTURES["sm_90"]

# Typical values


@pytest.mark.parametrize("spec", ["exponent", "exponent(planes=3)"])
@pytest.mark.parametrize("dtype", FORMS)
def test_bits_are_those_of_encoded_normal_numbers(spec, dtype):
    coder = codec(spec)
    x = torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(0)).to(dtype)
    used = int(coder.used_bytes(coder.encode_rows(x), x.shape[1], dtype))
    dynamic = used - coder.static_bytes(x.shape[1], dtype)
    words = exponents(coder.ladder, FORMS[dtype]).words(CHUNK)
    # A window is the best one of its own 1,024 values, not of all: slightly fewer bits.
    assert dynamic == pytest.approx(2 * words * x.shape[1] / CHUNK, rel=0.02)


@pytest.mark.parametrize(("share", "words"), [(0.05, 128), (0.0016, 128), (0.01, 32), (0.9, 4)])
def test_mean_of_the_largest_is_that_of_drawn_words(share, words):
    drawn = torch.rand(2000, words, WORD, generator=torch.Generator().manual_seed(1)) < share
    found = drawn.sum(2).amax(1).double()
    error = float(found.std()) / math.sqrt(2000)
    assert mean_maximum(share, words) == pytest.approx(float(found.mean()), abs=4 * error)


def test_fullest_of_words_without_ones_or_with_only_ones():
    assert mean_maximum(0.0, 100) == 0
    assert mean_maximum(1.0, 100) == WORD


# Rare suites


def test_rare_suites_do_nothing():
    text = (
        "def f(x):\n"
        "    y = 1\n"
        "    if x > 3:\n"
        "        y = 2\n"
        "    else:  # rare\n"
        "        y = 3\n"
        "\n"
        "        y = 4\n"
        "    if x == 0:  # rare\n"
        "        if y:\n"
        "            y = 7\n"
        "    return y\n"
    )
    made = without_rare(Source("f", text))
    space: dict = {}
    exec(made.text, space)
    assert [space["f"](x) for x in (0, 1, 4)] == [1, 1, 2]
    plain = Source("f", "def f(x):\n    return x\n")
    assert without_rare(plain) == plain


# One warp alone


def test_each_instruction_waits_for_its_operands():
    chain = parse_sass(listing("LDG.E R2, desc[UR4][R4.64]", "IADD3 R3, R2, 0x1, RZ", "EXIT"))
    free = parse_sass(listing("LDG.E R2, desc[UR4][R4.64]", "IADD3 R3, R6, 0x1, RZ", "EXIT"))
    assert clocks_of_one_warp(chain, (), SM_90) == 1 + SM_90.latency + 1
    assert clocks_of_one_warp(free, (), SM_90) == 3


def test_a_pipe_takes_a_warp_in_several_clocks():
    """The ALU of a quarter has 16 lanes; instructions of other pipes issue in between."""
    ints = ["LOP3.LUT R2, R4, R5, R6, 0x96, !PT"] * 4
    assert clocks_of_one_warp(parse_sass(listing(*ints)), (), SM_90) == 1 + 3 * 2
    mixed = [ints[0], "FADD R3, R4, R5"] * 4
    assert clocks_of_one_warp(parse_sass(listing(*mixed)), (), SM_90) == 8


def test_a_loop_takes_as_many_times_as_long():
    code = parse_sass(
        listing(".L_0:", "IADD3 R2, R2, 0x1, RZ", "@P0 BRA `(.L_0)", "FADD R1, R2, R2", "EXIT")
    )
    once, often = (clocks_of_one_warp(code, (trips,), SM_90) for trips in (1, 11))
    assert often - once == 10 * 2


@pytest.mark.parametrize(
    ("name", "operands", "predicate", "written", "read"),
    [
        ("IADD3", "R2, R3, R4, RZ", "", ["R2"], ["R3", "R4"]),
        ("IADD3", "R2, P1, R3, R4, RZ", "P0", ["R2"], ["P1", "R3", "R4", "P0"]),
        ("ISETP.GT.U32.AND", "P1, PT, R5, R0, PT", "", ["P1"], ["R5", "R0"]),
        ("LDG.E.128", "R8, desc[UR4][R2.64]", "", ["R8", "R9", "R10", "R11"], ["UR4", "R2", "R3"]),
        ("STS.64", "[R2], R4", "", [], ["R2", "R4", "R5"]),
        ("IMAD.WIDE.U32", "R2, R3, R4, R6", "", ["R2", "R3"], ["R3", "R4", "R6"]),
        ("SEL", "R4, R2, RZ, !P0", "", ["R4"], ["R2", "P0"]),
    ],
)
def test_registers_of_an_instruction(name, operands, predicate, written, read):
    assert registers(Instruction(0, name, operands, predicate)) == (written, read)


def test_low_share_is_that_of_programs_that_wait_together():
    counts = count_instructions(parse_sass(listing(*["IADD3 R2, R3, R4, RZ"] * 100)))
    many, few = (predict(counts, 1, n, 1e4, H100, warp_clocks=1e4) for n in (16, 2))
    assert few.low < many.low < many.share == pytest.approx(few.share, rel=0.5)
    assert predict(counts, 1, 16, 1e4, H100).low is None
    busy = predict(counts, 1, 16, 1.0, H100, warp_clocks=4 * 100 * 32 / 64)
    assert busy.low == busy.share


# Kernels


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("spec", ["exponent", "exponent(planes=3)", "topk", "gaussiank"])
def test_loops_of_the_machine_code_are_those_of_the_text(spec, arch):
    for name in ("encode", "decode"):
        found = [
            lower(each, arch) for each in kernels_named(name, codec(spec), torch.bfloat16, 8, arch)
        ]
        for each in found:
            assert each.compiled.spills == 0
            assert each.counts.loops == 0, each.kernel.name
            assert each.predictions
        for share in together(found):
            assert 0 < share.low <= share.share <= 1


def test_bytes_of_a_direction():
    """Values once, the wire once; kernels in between move more."""
    coder = codec("exponent")
    made = kernels_named("encode", coder, torch.bfloat16, 8, "sm_90")
    moved = sum(each.moved * each.launched for each in made)
    (whole,) = {each.whole for each in made}
    assert whole == pytest.approx((2 + 10.69 / 8) * NUMEL, rel=0.005)
    # The strings of 0.65 bits a value are written and read once more.
    assert moved - whole == pytest.approx(2 * 0.65 / 8 * NUMEL, rel=0.1)
    assert kernels_named("encode", codec("ecq"), torch.bfloat16, 8, "sm_90")[0].moved is None
