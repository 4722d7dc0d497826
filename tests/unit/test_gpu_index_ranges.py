"""No kernel computes an address in 32 bits that may pass 2^31, in launches of up to 2^33 values,
2^20 rows and 32 ranks: proven by intervals over the TTIR of every kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exchanging import ALL, exchange_of
from intervals import Launch, overflows
from tiers import rarely, sampled
from ttir import parse_ttir

from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.codecs.sparse import SparseCodec
from commpass.lowering.chain import Add, Cast, Chain, Decode, Encode, Normalize, Scale, Store, Sum

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

import kernel_launches as launches

from commpass.lowering.gpu import decode_matmul, exchange_sizes, sparse
from commpass.lowering.gpu.matmul_sizes import Matmul, Problem
from commpass.lowering.gpu.matmul_supported import unsupported_reason
from commpass.lowering.gpu.row_peaks import row_peaks
from commpass.lowering.matmul import BATCHED, GROUPED, SINGLE
from commpass.lowering.pointwise import VALUE, Epilogue, Operand, Operation

U8, BF16, F32 = torch.uint8, torch.bfloat16, torch.float32
SPECS = (
    *("int8", "int8(block=32)", "int4", "int6", "fp8", "rotated", "rotated(bits=4)", "taco"),
    *("table", "sdp4bit", "tahquant", "mxfp4", "nvfp4"),
)
CHAINS = ("encode", "decode", "decode_sum", "decode_sum_encode")
NONE = ("nvfp4", "decode_sum_encode")
"""The peak of a row must be known before it is encoded, so there is no such kernel."""
SLOW = ("int8", "decode_sum_encode")
KINDS = [(spec, name) for spec in SPECS for name in CHAINS if (spec, name) not in (NONE, SLOW)]
QUICK = {("int8", "encode"), ("int6", "decode")}


def chain_of(name: str, spec: str) -> Chain:
    coder = codec(spec)
    assert isinstance(coder, BlockCodec)
    inner = coder.domain_codec
    return {
        "encode": Chain(BF16, (Encode(coder),)),
        "decode": Chain(U8, (Decode(coder, BF16), Cast(BF16))),
        "decode_sum": Chain(U8, (Decode(inner, BF16), Sum(32), Cast(BF16))),
        "decode_sum_encode": Chain(U8, (Decode(inner, BF16), Sum(8), Encode(inner))),
    }[name]


def check(several) -> None:
    found = [str(each) for one in several for each in one.overflows()]
    assert not found, "\n".join(found)


# --- every kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "name"),
    [*sampled(KINDS, QUICK), pytest.param(*SLOW, marks=pytest.mark.slow)],
)
def test_chain_counts_in_enough_bits(spec, name):
    some = list(launches.of_chain(chain_of(name, spec)))
    assert len(some) == 2
    assert max(each.integers["rows"] for each in some) >= 2**15
    check(some)


@pytest.mark.parametrize("width", [4096, rarely(8192), rarely(5120)])
def test_norm_counts_in_enough_bits(width):
    steps = (
        *(Decode(codec("int8"), BF16), Sum(8), Cast(BF16), Add(BF16), Store()),
        *(Normalize(width, 1e-5, saved=("rsqrt",)), Scale(width, BF16), Cast(BF16)),
    )
    check(launches.of_chain(Chain(U8, steps)))


@pytest.mark.parametrize("shape", [(4, 2**31 - 64), (2**20, 2**13)])
def test_peaks_of_rows_count_in_enough_bits(shape):
    rows = torch.empty(shape, dtype=BF16, device="meta")
    check(launches.of_calls(lambda: row_peaks(rows)))


@pytest.mark.every
@pytest.mark.parametrize(
    ("rows", "numel"), [(4, 2**31 - 1), (2**20, 2**13), (2**20, 2**13 + 2**10)]
)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("spec", ["exponent", "exponent(planes=3)"])
def test_exponent_counts_in_enough_bits(spec, dtype, rows, numel):
    coder = codec(spec)
    assert isinstance(coder, ExponentCodec)
    some = launches.of_exponent(coder, dtype, numel, rows)
    assert len(some) == 4
    check(some)


@pytest.mark.parametrize(("numel", "rows"), [(2**30 - 1, 4), rarely(1, 2**20)])
def test_ecq_counts_in_enough_bits(numel, rows):
    coder = codec("ecq(bits=12)")
    assert isinstance(coder, EntropyCodec)
    some = launches.of_entropy(coder, BF16, numel, rows)
    assert len(some) == 4
    check(some)


SPARSE = (
    *("topk", "topk(indices=bitmap)", "topk(indices=blocks16)", "topk(density=0.5)"),
    *("topk(values=fp16)", "gaussiank", "redsync", "sidco", "dgc", "randomk"),
)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, rarely(2**20)])
@pytest.mark.parametrize("spec", sampled(SPARSE, {"topk"}))
def test_sparse_kernels_count_in_enough_bits(spec, rows):
    coder = codec(spec)
    assert isinstance(coder, SparseCodec)
    numel = 2**33 // rows
    if rows == 4:
        numel = launches.largest(
            lambda n: n == 0 or sparse.unsupported_reason(coder, n, BF16) is None
        )
    check(launches.of_sparse(coder, BF16, numel, rows))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("spec", "ranks"), [("int8", 8), rarely("int8", 2), rarely("int8", 32), rarely("rotated", 8)]
)
def test_exchange_counts_in_enough_bits(spec, ranks, name):
    smallest = exchange_of(name, codec(spec), BF16, 1, ranks, programs=64)

    def is_possible(numel: int) -> bool:
        return not exchange_sizes.unsupported_reason(replace(smallest, numel=numel))

    largest = replace(smallest, numel=launches.largest(is_possible))
    total = exchange_sizes.memory_of(exchange_sizes.capacity_for([largest])).total
    assert max(total, largest.values) > 2**31 - 2**23
    check([launches.of_exchange(largest)])


@pytest.mark.parametrize(
    "problem",
    [
        Problem(2**15, 2**16 - 256, 2**15, 8),
        rarely(Problem(2**20, 1024, 1024, 32)),
        rarely(Problem(8192, 2**17, 4096, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["sm_90", rarely("sm_80")])
def test_matmul_counts_in_enough_bits(arch, problem):
    coder = codec("int8")
    assert isinstance(coder, BlockCodec)
    check([launches.of_matmul(coder, problem, arch)])


RESIDUAL = Epilogue((Operand(BF16, VALUE),), (Operation("add", ("v0", "v1"), BF16),))


@pytest.mark.parametrize(
    ("form", "problem", "epilogue"),
    [
        (BATCHED, Problem(2**16, 2**14 - 256, 2**13, 8, 8), Epilogue()),
        (GROUPED, Problem(2**15, 2**16 - 256, 2**10, 8, 31), Epilogue()),
        (SINGLE, Problem(2**15, 2**16 - 256, 2**15, 8), RESIDUAL),
        rarely(BATCHED, Problem(2**20, 1024, 1024, 32, 64), RESIDUAL),
        rarely(GROUPED, Problem(2**20, 1024, 1024, 32, 1022), RESIDUAL),
        rarely(GROUPED, Problem(8192, 2**17, 128, 2, 127), Epilogue()),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["sm_90", rarely("sm_80")])
def test_matmul_of_any_form_counts_in_enough_bits(arch, form, problem, epilogue):
    """Nothing is assumed of the offsets of groups."""
    coder = codec("int8")
    assert isinstance(coder, BlockCodec)
    matmul = Matmul(BF16, b_by_rows=False, form=form, epilogue=epilogue)
    assert not unsupported_reason(coder, matmul, problem)
    check([launches.of_matmul(coder, problem, arch, form=form, epilogue=epilogue)])


@pytest.mark.parametrize(
    "problem",
    [
        decode_matmul.Problem(2**19 - 8, 128, 4096, 8),
        rarely(decode_matmul.Problem(2**15, 2**16 - 256, 2**15, 8)),
        rarely(decode_matmul.Problem(2**20, 2**11 - 16, 1024, 32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", ["int8", rarely("int4")])
def test_matmul_that_decodes_counts_in_enough_bits(spec, problem):
    coder = codec(spec)
    assert isinstance(coder, BlockCodec)
    matmul = decode_matmul.Matmul(BF16, b_by_rows=False, bias=BF16)
    assert not decode_matmul.unsupported_reason(coder, matmul, problem, arch="sm_90")
    check([launches.of_decode_matmul(coder, problem)])


# --- the proof finds faults -----------------------------------------------------------------------


def broken(one: launches.KernelLaunch, text: str, by: str) -> list[str]:
    """Return what is found in a kernel if a part of its text is replaced."""
    assert text in one.source.text
    changed = replace(one.source, text=one.source.text.replace(text, by))
    return [str(each) for each in replace(one, source=changed).overflows()]


def test_rows_in_32_bits_are_found():
    *_, many_rows = launches.of_chain(chain_of("encode", "int8"))
    found = broken(many_rows, ".to(tl.int64)", "")
    assert any("arith.muli i32" in each and "row * input_stride" in each for each in found)


def test_strides_in_32_bits_are_found():
    one = launches.chain_launch(chain_of("decode_sum", "int8"), 2**27, 1)
    found = broken(one, "tl.cast(input_stride, tl.int64)", "input_stride")
    assert any("arith.muli i32" in each and "input_stride" in each for each in found)


def test_matrices_of_batches_in_32_bits_are_found():
    coder = codec("int8")
    assert isinstance(coder, BlockCodec)
    one = launches.of_matmul(coder, Problem(2**16, 2**14, 2**14, 8, 8), "sm_80", form=BATCHED)
    found = broken(one, "batch.to(tl.int64) * b_batch", "batch * b_batch.to(tl.int32)")
    assert any("b_batch" in each for each in found)


def test_longer_rows_are_found():
    one = launches.chain_launch(chain_of("encode", "int8"), 2**31 - 1, 1)
    assert any("256" in str(each) for each in one.overflows())


@pytest.mark.every
def test_chunks_of_ecq_in_32_bits_are_found():
    coder = codec("ecq(bits=12)")
    assert isinstance(coder, EntropyCodec)
    found = launches.of_entropy(coder, BF16, 2**30 - 1, 4)
    code = broken(found[1], "number = tl.program_id(0).to(tl.int64)", "number = tl.program_id(0)")
    assert any("BLOCK" in each for each in code)


def test_rows_of_exponent_in_32_bits_are_found():
    coder = codec("exponent")
    assert isinstance(coder, ExponentCodec)
    first, *_ = launches.of_exponent(coder, BF16, 2**31 - 1, 4)
    found = broken(first, "tl.cast(row, tl.int64) * pitch", "row * pitch")
    assert any("row * pitch" in each for each in found)


# --- intervals ------------------------------------------------------------------------------------

LOOP = """module {
  tt.func public @kernel(%p: !tt.ptr<f32> loc("p"(#loc)), %n: i32 loc("n"(#loc))) {
    %c0 = arith.constant 0 : i32 loc(#loc)
    %c1 = arith.constant 1 : i32 loc(#loc)
    %c3 = arith.constant 3 : i32 loc(#loc)
    BODY
    %q = tt.addptr %p, %r : !tt.ptr<f32>, i32 loc(#loc)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""
COUNTED = """%r = scf.for %i = %c0 to %n step %c1 iter_args(%a = %c0) -> (i32)  : i32 {
      %b = arith.addi %a, %c3 : i32 loc(#loc)
      scf.yield %b : i32 loc(#loc)
    } loc(#loc)"""
GUARDED = """%r = scf.while (%a = %c0) : (i32) -> i32 {
      %s = arith.cmpi slt, %a, %n : i32 loc(#loc)
      scf.condition(%s) %a : i32 loc(#loc)
    } do {
    ^bb0(%a: i32 loc(#loc)):
      %b = arith.addi %a, %c3 : i32 loc(#loc)
      scf.yield %b : i32 loc(#loc)
    } loc(#loc)"""
HALVED = """%c32 = arith.constant 32 : i32 loc(#loc)
    %c2 = arith.constant 2 : i32 loc(#loc)
    %r:2 = scf.for %i = %c0 to %c32 step %c1 iter_args(%a = %c0, %b = %n) -> (i32, i32)  : i32 {
      %s = arith.addi %a, %b : i32 loc(#loc)
      %m = arith.divsi %s, %c2 : i32 loc(#loc)
      %l = arith.cmpi slt, %m, %c3 : i32 loc(#loc)
      %x = arith.select %l, %m, %a : i32 loc(#loc)
      %y = arith.select %l, %b, %m : i32 loc(#loc)
      scf.yield %x, %y : i32, i32 loc(#loc)
    } loc(#loc)"""


@pytest.mark.parametrize(
    ("body", "n", "overflow"),
    [
        ("%r = arith.muli %n, %c3 : i32 loc(#loc)", 2**29, False),
        ("%r = arith.muli %n, %c3 : i32 loc(#loc)", 2**30, True),
        ("%t = arith.muli %n, %n : i32 loc(#loc)\n%r = arith.andi %t, %c3 : i32", 2**30, False),
        ("%t = arith.muli %n, %n : i32 loc(#loc)\n%r = arith.minsi %t, %c3 : i32", 2**30, True),
        (COUNTED, 2**29, False),
        (COUNTED, 2**30, True),
        (GUARDED, 2**31 - 8, False),
        (GUARDED, 2**31 - 1, True),
    ],
)
def test_overflow_is_found_where_it_is_possible(body, n, overflow):
    function = parse_ttir(LOOP.replace("BODY", body))
    found = overflows(function, Launch({"n": (0, n)}, (1, 1, 1)))
    assert bool(found) == overflow


def test_search_by_halves_is_bounded():
    text = LOOP.replace("BODY", HALVED).replace("%p, %r ", "%p, %r#1 ")
    assert not overflows(parse_ttir(text), Launch({"n": (0, 2**30 - 1)}, (1, 1, 1)))
    assert overflows(parse_ttir(text), Launch({"n": (0, 2**31 - 1)}, (1, 1, 1)))


def test_address_from_unknown_memory_is_found():
    body = "%w = tt.load %t : !tt.ptr<i32> loc(#loc)\n%r = arith.addi %w, %c1 : i32 loc(#loc)"
    text = LOOP.replace("BODY", body).replace("%n: i32 ", "%t: !tt.ptr<i32> ")
    function = parse_ttir(text)
    assert [each.name for each in overflows(function, Launch({}, (1, 1, 1)))] == ["tt.addptr"]
    assert not overflows(function, Launch({}, (1, 1, 1), {"t": (0, 2**20)}))


def test_wires_of_ranks_in_32_bits_are_found():
    coder = codec("int8")
    assert isinstance(coder, BlockCodec)
    many = decode_matmul.Problem(2**19 - 128, 128, 4096, 128)
    one = launches.of_decode_matmul(coder, many)
    assert not one.overflows()
    found = broken(one, "row = row.to(tl.int64)", "row = row")
    assert any("arith.muli i32" in each and "input_stride" in each for each in found)
