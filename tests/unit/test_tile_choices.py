"""All tile sizes that may be timed give the same bytes, and fit in registers and shared memory.

The kernels run in Triton's interpreter, on the random values of the timing itself. Compiled, no
kernel with several choices adds floats of different threads, so threads may share a tile in any
way.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from tiers import sampled
from torch import Tensor

from commpass.codecs import codec
from commpass.lowering.chain import Add, Cast, Chain, Decode, Encode, Normalize, Sum
from commpass.lowering.kernel import Form
from commpass.lowering.matmul import GROUPED, Product
from commpass.lowering.pointwise import Epilogue, Operation

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

BF16 = torch.bfloat16
CPU = torch.device("cpu")
RANKS = 3
KINDS = ("encode", "decode", "decode_sum", "decode_sum_encode", "decode_add")
SPECS = ("int8", "int4", "int6", "fp8", "rotated", "mxfp4", "nvfp4", "int8(rounding=stochastic)")
FITTING = ("int8", "int4", "int6", "fp8", "rotated", "taco", "mxfp4")
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


def chain_of(spec: str, kind: str) -> Chain:
    coder = codec(spec)
    inner = coder.domain_codec
    return {
        "encode": Chain(BF16, (Encode(coder),)),
        "decode": Chain(torch.uint8, (Decode(coder, BF16), Cast(BF16))),
        "decode_sum": Chain(torch.uint8, (Decode(inner, BF16), Sum(RANKS), Cast(BF16))),
        "decode_sum_encode": Chain(torch.uint8, (Decode(inner, BF16), Sum(RANKS), Encode(inner))),
        "decode_add": Chain(torch.uint8, (Decode(coder, BF16), Cast(BF16), Add(BF16))),
    }[kind]


def call_of(chain: Chain, numel: int, rows: int = 1):
    """Return the call of a chain on a CPU; the first input has rows with a gap between them."""
    from commpass.lowering.gpu.tunable import TunableChain

    width = numel
    if chain.decodes is not None:
        width = chain.decodes.codec.wire_bytes(numel, chain.decodes.dtype)
    count = rows * chain.ranks
    inputs = [Form(chain.input_dtype, CPU, (count, width), (width + 16, 1))]
    added = sum(isinstance(step, Add) for step in chain.steps)
    inputs += [Form(BF16, CPU, (rows, numel), (numel, 1))] * added
    return TunableChain(chain, numel, tuple(inputs))


def results_of_chain(chain: Chain, numel: int) -> list[list[Tensor]]:
    """Return the results of each choice. Called in the interpreter."""
    call = call_of(chain, numel)
    inputs = call.examples()
    return [call.run(choice, inputs) for choice in call.choices]


def check_equal(results: list[list[Tensor]]) -> None:
    first, *others = ([each.view(torch.uint8) for each in some] for some in results)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert any(each.any() for each in first)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_choices_of_a_chain_give_the_same_bytes(spec, kind):
    if spec == "nvfp4" and kind == "decode_sum_encode":
        pytest.skip("its kernel must know the peak of a row first")
    results = interpreted(results_of_chain, chain_of(spec, kind), 4096 + 51)
    assert len(results) >= 3
    check_equal(results)


def results_of_product(spec: str) -> list[list[Tensor]]:
    from commpass.lowering.gpu.tunable import TunableProduct

    forms = Form(BF16, CPU, (64, 96), (96, 1)), Form(BF16, CPU, (96, 512), (1, 96))
    bias = Form(BF16, CPU, (512,), (1,))
    relu = Epilogue((), (Operation("relu", ("v0",), BF16),))
    product = Product(codec(spec), 2, bias=True, epilogue=relu)
    call = TunableProduct(product, (*forms, bias), aligned=True)
    inputs = call.examples()
    inputs = [each.mul_(4).round_() for each in inputs]  # sums are exact in any order
    return [call.run(choice, inputs) for choice in call.choices]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["int8", "fp8", "int4", "rotated"])
def test_choices_of_a_matmul_that_encodes_give_the_same_bytes(spec):
    results = interpreted(results_of_product, spec)
    assert len(results) >= 3
    check_equal(results)


def test_random_groups_have_rows():
    from commpass.lowering.gpu.tunable import TunableProduct

    forms = Form(BF16, CPU, (64, 96), (96, 1)), Form(BF16, CPU, (4, 96, 512), (49152, 1, 96))
    offsets = Form(torch.int32, CPU, (4,), (1,))
    product = Product(codec("int8"), 2, GROUPED)
    call = TunableProduct(product, (*forms, offsets), aligned=True)
    assert call.examples()[2].tolist() == [16, 32, 48, 64]
    assert (call.problem.m, call.problem.batches) == (64, 4)


# --- which choices there are ----------------------------------------------------------------------


def tiles_of(chain: Chain, numel: int = 1 << 20, lanes: int = 32):
    from commpass.lowering.gpu.tile_sizes import tiles

    return tiles(chain, numel, lanes)


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_choices_begin_with_the_static_one_and_differ(spec, kind, lanes):
    from commpass.lowering.gpu.tile_sizes import LEAST, TILE, static_tile, tile_values

    chain = chain_of(spec, kind)
    found = tiles_of(chain, lanes=lanes)
    assert found[0] == static_tile(chain, 1 << 20, lanes)
    assert len(set(found)) == len(found) >= 3
    size = codec(spec).layout.size(1 << 20)
    for each in found:
        of_warp = each.blocks * size / each.num_warps
        assert LEAST <= of_warp <= max(TILE, tile_values(chain, 1 << 20, lanes))


@pytest.mark.parametrize("spec", ["taco", "table", "int4(scale=lsq)", "sdp4bit", "tahquant"])
def test_sum_over_a_block_is_not_divided_otherwise(spec):
    """Where a scale is such a sum, its bits depend on the tile: only the static choice is used."""
    sums = type(codec(spec).scale).__name__ in ("Rms", "Dual", "LeastSquares")
    assert (len(tiles_of(chain_of(spec, "encode"))) == 1) == sums
    assert len(tiles_of(chain_of(spec, "decode"))) > 1


def test_norm_is_not_divided_otherwise():
    norm = Normalize(4096, 1e-6, centered=False)
    chain = Chain(torch.uint8, (Decode(codec("int8"), BF16), Sum(4), norm, Cast(BF16)))
    assert len(tiles_of(chain)) == 1


def test_row_of_few_blocks_has_no_larger_tiles():
    found = tiles_of(chain_of("int8", "decode"), numel=1024)
    assert all(each.blocks <= 4 for each in found)


ONE_VALUE = ("(%chosen", "(%first")
"""Sums of one value and zeros, by which a pivot is selected: they are exact in any order."""


def float_sums(chain: Chain) -> list[str]:
    """Return the reductions of a kernel that add several floats, in TTIR."""
    from ttir import compile_to_ttir

    from commpass.lowering.gpu import generate
    from commpass.lowering.gpu.source import load

    made = generate.kernel(chain, 1 << 20)
    function = compile_to_ttir(load(made.source), made.signature, made.constants, made.num_warps)
    found, blocks = [], [function.body]
    while blocks:
        for each in blocks.pop().operations:
            inside = [one.name for block in each.blocks for one in block.operations]
            adds = each.name in ("tt.reduce", "tt.scan") and "arith.addf" in inside
            if adds and not each.text.startswith(ONE_VALUE):
                found.append(each.text)
            blocks += each.blocks
    return found


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [*SPECS, "taco", "table", "sdp4bit", "tahquant", "mxfp8"])
def test_no_float_sum_of_several_threads_where_there_are_choices(spec, kind):
    chain = chain_of(spec, kind)
    if spec == "nvfp4" and kind == "decode_sum_encode":
        pytest.skip("its kernel must know the peak of a row first")
    assert not float_sums(chain) or len(tiles_of(chain)) == 1


def test_float_sum_is_found_in_a_kernel_that_has_one():
    assert float_sums(chain_of("taco", "encode"))


# --- compiled for GPUs that need not be present ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spec", "kind", "arch"),
    sampled(
        [(spec, kind, arch) for spec in FITTING for kind in KINDS[:4] for arch in ARCHS],
        lambda case: case[0] in ("int8", "rotated") and case[2] == "sm_90",
    ),
)
def test_choices_of_a_chain_fit_in_registers(spec, kind, arch):
    from commpass.lowering.inspect.architectures import architecture
    from commpass.lowering.inspect.chains import CHAINS
    from commpass.lowering.inspect.kernels import of_chain
    from commpass.lowering.inspect.lowerable import lower

    chain = CHAINS[kind](codec(spec), BF16, 8)
    for tile in tiles_of(chain, lanes=architecture(arch).warp):
        found = lower(of_chain(chain, arch, tile=tile), arch).compiled
        assert found.spills == 0, tile
        assert found.residence.programs > 0, tile
