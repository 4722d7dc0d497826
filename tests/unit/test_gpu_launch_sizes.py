"""Launches of generated kernels for up to 2^33 values and 2^20 rows: the limits of a CUDA grid, and
the integers that kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from exchanging import ALL, exchange_of

from commpass.codecs import SparseCodec, codec
from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.entropy import operators
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.lowering.chain import (
    Add,
    Cast,
    Chain,
    Decode,
    Encode,
    Normalize,
    Scale,
    Step,
    Store,
    Sum,
)

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

import kernel_launches as launches

from commpass.lowering.gpu import (
    entropy,
    exchange_sizes,
    exponent,
    generate,
    launch,
    sparse,
    supported,
)
from commpass.lowering.gpu.call import calls_of
from commpass.lowering.gpu.matmul_sizes import (
    SHARED,
    Matmul,
    Problem,
    configurations,
    shared_bytes,
)
from commpass.lowering.gpu.row_peaks import TILE, row_peaks
from commpass.lowering.matmul import BATCHED, GROUPED, SINGLE
from commpass.lowering.pointwise import VALUE, Epilogue, Operand, Operation

MOST_X, MOST_YZ = 2**31 - 1, 65_535
"""CUDA C++ programming guide, table of technical specifications: dimensions of a grid."""
MOST_VALUES = 2**33
ROWS = (1, 8, 65_535, 65_536, 131_072, 2**20)
NUMELS = (1, 255, 4096, 65_537, 2**20 + 3, 2**27, 2**30, 2**31 - 1, 2**31, 2**33)
SPECS = (
    *("int8", "int8(block=32)", "int4", "int6", "fp8", "rotated", "rotated(bits=4)", "taco"),
    *("table", "sdp4bit", "tahquant", "mxfp4", "nvfp4"),
)


def sizes() -> Iterator[tuple[int, int]]:
    return ((numel, rows) for numel in NUMELS for rows in ROWS if numel * rows <= MOST_VALUES)


def chains(coder: BlockCodec) -> list[Chain]:
    inner, dtype = coder.domain_codec, torch.bfloat16
    assert isinstance(inner, BlockCodec)
    summed = (Decode(inner, dtype), Sum(8))
    return [
        Chain(dtype, (Encode(coder),)),
        Chain(torch.uint8, (Decode(coder, dtype), Cast(dtype))),
        Chain(torch.uint8, (*summed, Cast(dtype))),
        Chain(torch.uint8, (*summed, Encode(inner))),
    ]


@pytest.mark.rest_slow(1)
@pytest.mark.few(3)
@pytest.mark.parametrize("spec", SPECS)
def test_grid_of_a_chain_is_within_the_limits_and_covers_all(spec):
    coder = codec(spec)
    assert isinstance(coder, BlockCodec)
    launched = 0
    for chain in chains(coder):
        for numel, rows in sizes():
            if why := supported.unsupported_reason(chain, numel):
                assert numel >= 2**30 or "row" in why, (spec, numel, why)
                continue
            check_chain(chain, coder, numel, rows)
            launched += 1
    assert launched >= 80


def check_chain(chain: Chain, coder: BlockCodec, numel: int, rows: int) -> None:
    generated = generate.kernel(chain, numel)
    x, y, z = grid = launch.grid(generated, numel, rows)
    check_grid(grid)
    assert rows <= y * z < 2 * rows + MOST_YZ
    assert x * generated.blocks >= coder.layout.blocks(numel) > (x - 1) * generated.blocks


def check_grid(grid: tuple[int, int, int]) -> None:
    x, y, z = grid
    assert 1 <= x <= MOST_X
    assert 1 <= y <= MOST_YZ
    assert 1 <= z <= MOST_YZ


@pytest.mark.parametrize("width", [256, 4096, 5120])
@pytest.mark.parametrize("spec", ["int8", "rotated"])
def test_grid_of_a_norm_is_within_the_limits_and_covers_all(spec, width):
    coder = codec(spec).domain_codec
    assert isinstance(coder, BlockCodec)
    begin: tuple[Step, ...] = (Decode(coder, torch.bfloat16), Sum(8), Cast(torch.bfloat16))
    added = (*begin, Add(torch.bfloat16), Store())
    normed = (*added, Normalize(width, 1e-5, saved=("rsqrt",)), Scale(width, torch.bfloat16))
    launched = 0
    for steps, unit in ((added, 1), (normed, width)):
        chain = Chain(torch.uint8, (*steps, Cast(torch.bfloat16)))
        for values, rows in sizes():
            numel = max(values // unit, 1) * unit
            if why := supported.unsupported_reason(chain, numel):
                assert numel >= 2**30 or "padded" in why, (numel, why)
                continue
            check_chain(chain, coder, numel, rows)
            launched += 1
    assert launched >= 50


SPARSE = (
    *("topk", "topk(indices=bitmap)", "topk(indices=blocks16)", "topk(density=0.5)"),
    *("topk(values=fp16)", "gaussiank", "redsync", "sidco", "dgc", "randomk"),
)


@pytest.mark.rest_slow(2)
@pytest.mark.parametrize("spec", SPARSE)
def test_grids_of_sparse_kernels_are_within_the_limits(spec):
    coder = codec(spec)
    assert isinstance(coder, SparseCodec)
    launched = 0
    for numel, rows in sizes():
        if (why := sparse.unsupported_reason(coder, numel, torch.bfloat16)) is not None:
            assert numel >= 2**30, (numel, why)
            continue
        made = launches.of_sparse(coder, torch.bfloat16, numel, rows)
        assert len(made) >= 3
        for each in made:
            check_grid(each.grid)
        launched += 1
    assert launched >= 25


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("name", ALL)
def test_grid_of_an_exchange_runs_at_once_and_covers_all(name, ranks):
    """As many programs for each wire as ``exchange.workspace`` takes on 132 processors."""
    launched = 0
    for numel in NUMELS:
        whole = -(-numel // ranks) * ranks
        shape = exchange_of(name, codec("int8"), torch.bfloat16, whole, ranks)
        room = 132 * exchange_sizes.RESIDENT // shape.rows
        shape = replace(shape, programs=max(min(shape.tiles, room), 1))
        if why := exchange_sizes.unsupported_reason(shape, processors=132):
            assert numel >= 2**25, (numel, why)
            continue
        one = launches.of_exchange(shape)
        check_grid(one.grid)
        x, y, _ = one.grid
        assert x * y <= 132 * exchange_sizes.RESIDENT
        blocks = shape.block_codec.layout.blocks(shape.length)
        assert shape.tiles * shape.blocks >= blocks > (shape.tiles - 1) * shape.blocks
        assert x <= shape.tiles == one.integers["tiles"]
        assert y * shape.length >= (whole if y > 1 else 1)
        launched += 1
    assert launched >= 4


def test_grid_of_the_peaks_of_rows_is_within_the_limits_and_covers_all():
    for numel, rows in sizes():
        if rows * numel <= MOST_VALUES and numel < 2**31:
            values = torch.empty((rows, numel), dtype=torch.bfloat16, device="meta")
            (call,) = calls_of(lambda values=values: row_peaks(values))
            check_grid((call.programs, 1, 1))
            assert call.programs == rows * call.arguments["tiles"]
            assert call.arguments["tiles"] * TILE >= numel > (call.arguments["tiles"] - 1) * TILE


def test_launches_of_ecq_are_within_the_limits():
    coder = codec("ecq")
    assert isinstance(coder, EntropyCodec)
    for numel, rows in sizes():
        if entropy.unsupported_reason(numel):
            assert numel >= entropy.MOST
            continue
        rows_of = torch.empty((rows, numel), dtype=torch.bfloat16, device="meta")
        code, side = (
            torch.empty((rows, each), dtype=torch.uint8, device="meta")
            for each in operators.sizes(numel, coder.form.nbytes, torch.bfloat16)
        )
        given = (coder.form, True)
        made = calls_of(lambda x=rows_of, given=given: entropy.encode_rows(x, *given))
        made += calls_of(
            lambda wire=(code, side), given=given, numel=numel: entropy.decode_rows(
                *wire, *given, 1e38, numel
            )
        )
        assert len(made) == 4
        for call in made:
            assert 1 <= call.programs <= MOST_X
            numbers = [each for each in call.arguments.values() if isinstance(each, int)]
            assert max(numbers) < 2**31


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", ["exponent", "exponent(planes=3)"])
def test_launches_of_exponent_are_within_the_limits(spec, dtype):
    coder = codec(spec)
    for numel, rows in sizes():
        if exponent.unsupported_reason(numel, dtype):
            assert numel < 1024 or numel >= exponent.MOST
            continue
        values = torch.empty((rows, numel), dtype=dtype, device="meta")
        wire = torch.empty((rows, coder.wire_bytes(numel, dtype)), dtype=torch.uint8, device="meta")
        made = calls_of(lambda values=values: exponent.encode_rows(coder, values))
        made += calls_of(
            lambda wire=wire, numel=numel: exponent.decode_rows(coder, wire, numel, dtype)
        )
        assert len(made) == 4
        for call in made:
            assert 1 <= call.programs <= MOST_X
            numbers = [each for each in call.arguments.values() if isinstance(each, int)]
            assert max(numbers) < 2**31


RESIDUAL = Epilogue(
    (Operand(torch.bfloat16, VALUE),), (Operation("add", ("v0", "v1"), torch.bfloat16),)
)


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("text", ["int8", "fp8", "int4", "rotated", "taco", "table(bits=4)"])
@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("form", [SINGLE, BATCHED, GROUPED])
def test_programs_that_share_a_processor_fit_into_its_memory(form, rows, text, arch):
    coder = codec(text)
    assert isinstance(coder, BlockCodec)
    batches = {BATCHED: 4, GROUPED: 30}.get(form, 1)
    problem = Problem(8 * rows, 4096, 4096, 8, batches)
    for epilogue in (Epilogue(), RESIDUAL):
        matmul = Matmul(torch.bfloat16, b_by_rows=False, form=form, epilogue=epilogue)
        found = configurations(coder, problem, arch, matmul)
        assert found
        for by in found:
            assert by.programs * shared_bytes(by, coder, arch, matmul) <= SHARED[arch]
