"""The matmul that encodes its result, compiled for GPUs that need not be present.

The tests check its instructions, and that its tiles fit in the registers and the shared memory of a
program.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
import triton
from tiers import rarely, sampled
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from commpass.codecs import codec
from commpass.lowering.gpu.matmul_launch import Steps, call, run
from commpass.lowering.gpu.matmul_sizes import (
    SHARED,
    Configuration,
    Matmul,
    Problem,
    configuration,
    shared_bytes,
)
from commpass.lowering.gpu.source import load
from commpass.lowering.inspect.lowerable import casts
from commpass.lowering.matmul import BATCHED, GROUPED, Product
from commpass.lowering.pointwise import VALUE, Epilogue, Operand, Operation

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
PROBLEM = Problem(m=4096, n=4096, k=4096, ranks=8)
LINEAR = Matmul(torch.bfloat16, b_by_rows=False)
RELU = Epilogue((), (Operation("relu", ("v0",), torch.bfloat16),))
REGISTERS = 65536
"""Per processor; a program's threads share them."""


@dataclass(frozen=True)
class Compiled:
    by: Configuration
    shared: int
    registers: int
    spilled: int
    instructions: Counter[str]
    order: tuple[str, ...] = ()
    """The instructions in the order of the code, with their operands (NVIDIA)."""

    def some(self, *starts: str) -> bool:
        return any(name.startswith(starts) for name in self.instructions)


def compiled(
    arch: str,
    spec: str,
    matmul: Matmul = LINEAR,
    fused: bool | None = None,
    problem: Problem = PROBLEM,
    **others: Any,
) -> Compiled:
    coder = codec(spec)
    problem = replace(problem, batches=8 if matmul.form else 1)
    by = replace(configuration(coder, problem, arch, matmul), **others)
    b_step = problem.k if not matmul.b_by_rows else problem.n
    steps = Steps(problem.k, b_step, problem.height * problem.k, problem.k * problem.n)
    made = call(coder, matmul, problem, by, steps, casts(arch))
    types = made.kernel.signature
    whole = [
        place
        for place, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or made.numbers[name] % 16 == 0
    ]
    source = ASTSource(
        load(made.kernel.source),
        {**types, **dict.fromkeys(made.constants, "constexpr")},
        made.constants,
        {(place,): [["tt.divisibility", 16]] for place in whole},
    )
    options = {
        "num_warps": by.num_warps,
        "num_stages": by.num_stages,
        "enable_fp_fusion": made.kernel.fuses if fused is None else fused,
    }
    result = triton.compile(source, target=TARGETS[arch], options=options)
    if arch == "gfx942":
        text = result.asm["amdgcn"]
        registers, spilled = (
            int(re.findall(rf"\.{name}:\s*(\d+)", text)[0])
            for name in ("vgpr_count", "vgpr_spill_count")
        )
        found = Counter(re.findall(r"^\s+([a-z]+_\w+)", text, re.MULTILINE))
        return Compiled(by, result.metadata.shared, registers, spilled, found)
    assert shared_bytes(by, coder, arch, matmul) >= result.metadata.shared
    return Compiled(by, result.metadata.shared, *_read(result.asm["cubin"]))


def _read(cubin: bytes) -> tuple[int, int, Counter[str], tuple[str, ...]]:
    """Return registers, bytes of local memory, and instructions of a kernel: their number by name,
    and all in their order."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "kernel.cubin"
        file.write_bytes(cubin)
        sass = _told(triton.knobs.nvidia.nvdisasm.path, "-c", str(file))
        usage = _told(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file))
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    pattern = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*?);"
    found = re.findall(pattern, sass, re.MULTILINE)
    order = tuple(name + operands for name, operands in found)
    return registers, stack, Counter(name for name, _ in found), order


def _told(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def fits(made: Compiled, arch: str) -> None:
    threads = made.by.num_warps * TARGETS[arch].warp_size
    assert made.spilled == 0
    assert not made.some("STL", "LDL", "scratch_")
    assert made.shared * made.by.programs <= SHARED[arch]
    if arch != "gfx942":
        assert made.registers * threads * made.by.programs <= REGISTERS


PRODUCT = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma_f32"}
"""The tensor core instructions of an arch for 16-bit operands."""
LOAD = {"sm_80": "LDGSTS", "sm_90": "UTMALDG", "sm_100": "UTMALDG", "gfx942": "global_load_dwordx4"}

CASES = [
    *((arch, "int8") for arch in TARGETS),
    ("sm_90", "int4"),
    ("sm_90", "fp8"),
    ("sm_80", "rotated"),
    ("sm_90", "rotated"),
    ("sm_100", "rotated"),
    ("gfx942", "rotated"),
    ("sm_90", "taco"),
]


@pytest.mark.rest_slow(1)
@pytest.mark.few(2)
@pytest.mark.parametrize(("arch", "spec"), CASES)
def test_options_given_to_a_card(arch: str, spec: str) -> None:
    made = compiled(arch, spec)
    fits(made, arch)
    assert made.some(PRODUCT[arch])
    assert made.some(LOAD[arch])
    if arch != "gfx942":
        assert made.some("STG.E.128")


@pytest.mark.slow
@pytest.mark.parametrize(
    "matmul",
    [
        replace(LINEAR, b_by_rows=True, bias=torch.bfloat16, epilogue=RELU),
        replace(LINEAR, a_by_rows=False, dtype=torch.float16),
    ],
)
def test_other_operands_and_an_activation(matmul: Matmul) -> None:
    made = compiled("sm_90", "int8", matmul)
    fits(made, "sm_90")
    assert made.some("HGMMA")


RESIDUAL = Operand(torch.bfloat16, VALUE)
GATED = Epilogue(
    (RESIDUAL,),
    (
        Operation("neg", ("v0",), torch.float32),
        Operation("exp", ("v2",), torch.float32),
        Operation("add", ("v3", "1.0"), torch.float32),
        Operation("div", ("v0", "v4"), torch.bfloat16),
        Operation("mul", ("v5", "v1"), torch.bfloat16),
    ),
)
GELU = Epilogue(
    (),
    (
        Operation("mul", ("v0", "0.5"), torch.float32),
        Operation("mul", ("v0", "0.7071067811865476"), torch.float32),
        Operation("erf", ("v2",), torch.float32),
        Operation("add", ("v3", "1.0"), torch.float32),
        Operation("mul", ("v1", "v4"), torch.bfloat16),
    ),
)
OTHERS = {
    "batched": replace(LINEAR, form=BATCHED),
    "grouped": replace(LINEAR, form=GROUPED),
    "gated": replace(LINEAR, epilogue=GATED),
    "gelu": replace(LINEAR, epilogue=GELU),
    "gated groups": replace(LINEAR, form=GROUPED, epilogue=GATED),
    "columns": replace(LINEAR, a_by_rows=False, b_by_rows=True),
    "biased": replace(LINEAR, bias=torch.bfloat16),
    "biased columns": replace(
        LINEAR, dtype=torch.float16, a_by_rows=False, bias=torch.float32, epilogue=RELU
    ),
    "gelu of biased batches": replace(
        LINEAR, form=BATCHED, epilogue=GELU, bias=torch.bfloat16, b_by_rows=True
    ),
}


@pytest.mark.parametrize("name", [name if name == "grouped" else rarely(name) for name in OTHERS])
@pytest.mark.parametrize("spec", ["int8", *map(rarely, ("fp8", "int4", "rotated"))])
@pytest.mark.parametrize("arch", ["sm_90", *map(rarely, ("sm_80", "sm_100", "gfx942"))])
def test_no_form_spills(arch: str, spec: str, name: str) -> None:
    made = compiled(arch, spec, OTHERS[name])
    fits(made, arch)
    assert made.some(PRODUCT[arch])
    if arch != "sm_80" or name != "columns":  # loaded into registers there
        assert made.some(LOAD[arch])


NOISY, SCALES = "int8(rounding=stochastic)", "fp8(block=32)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "spec", "name", "rows", "depth"),
    sampled(
        [
            ("sm_100", "int8", "biased", 64, 4096),
            ("sm_90", "int6", "gelu of biased batches", 512, 4096),
            ("sm_90", SCALES, "biased", 512, 384),
            ("sm_90", NOISY, "columns", 512, 384),
            *(
                (arch, spec, name, rows, depth)
                for arch in ("sm_90", "sm_100")
                for spec in (NOISY, SCALES, "int6", "tahquant")
                for name in ("columns", "biased", "biased columns", "gelu of biased batches")
                for rows, depth in ((64, 4096), (512, 640))
            ),
        ],
        [("sm_100", "int8", "biased", 64, 4096), ("sm_90", NOISY, "columns", 512, 384)],
    ),
)
def test_parts_of_any_size_do_not_spill_beside_a_bias_or_transposed_operands(
    arch: str, spec: str, name: str, rows: int, depth: int
) -> None:
    """The fewer steps a tile has, the larger its parts are."""
    problem = replace(PROBLEM, m=8 * rows, k=depth)
    fits(compiled(arch, spec, OTHERS[name], problem=problem), arch)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mxfp8", rarely("int4(scale=rms)")])
def test_narrow_tiles_need_no_more_shared_memory_than_is_counted(spec: str) -> None:
    made = compiled("sm_90", spec, problem=replace(PROBLEM, n=384, k=640))
    assert made.by.deferred
    assert made.by.block_n == 128
    fits(made, "sm_90")


HEAVY = ("rotated", "rotated(bits=4)", "table(bits=4)", "taco", "sdp4bit", "tahquant")
FORMS = {"single": LINEAR, "batched": OTHERS["batched"], "grouped": OTHERS["grouped"]}
TIGHT = [
    *(("sm_80", spec, "grouped") for spec in ("rotated(bits=4)", "table(bits=4)", "tahquant")),
    *((arch, "table(bits=4)", name) for arch in ("sm_90", "sm_100") for name in FORMS),
    ("sm_90", "table(scale=lsq)", "batched"),
    *(("sm_100", spec, name) for spec in ("table(bits=6)", "table(scale=lsq)") for name in FORMS),
]
"""Those that need the most registers."""


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("arch", "spec", "name"),
    sampled(
        [
            *TIGHT,
            *(
                (arch, spec, name)
                for arch in ("sm_80", "sm_90")
                for spec in HEAVY
                for name in FORMS
                if (arch, spec, name) not in TIGHT
            ),
        ],
        TIGHT,
    ),
)
def test_codecs_that_need_many_registers_do_not_spill(
    arch: str, spec: str, name: str, fused: bool
) -> None:
    """Products and sums are rounded once in graphs, and apart in other calls."""
    made = compiled(arch, spec, FORMS[name], fused=fused)
    fits(made, arch)
    assert made.some(PRODUCT[arch])


@pytest.mark.slow
def test_operands_without_descriptors_come_by_asynchronous_copies() -> None:
    made = compiled("sm_90", "int8", descriptors=False, deferred=0)
    fits(made, "sm_90")
    assert made.some("LDGSTS.E.BYPASS.128")
    assert not made.some("UTMALDG")


def places(made: Compiled, start: str, operands: str = "") -> list[int]:
    return [
        place
        for place, each in enumerate(made.order)
        if each.startswith(start) and operands in each
    ]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("spec", ["int8", "rotated", "int4", "taco", "table(bits=6)"])
def test_tile_is_encoded_while_the_tensor_cores_multiply_the_next(spec: str) -> None:
    """The loop of the machine code: it waits for the stores of the tile before, or encodes a part
    of it, while a step is multiplied. It starts the next step, and only then waits for the step
    before. Behind it are loads, and at the end of a tile its stores."""
    made = compiled("sm_90", spec)
    fits(made, "sm_90")
    wait, *_ = places(made, "ATOMG.E.ADD")
    products = places(made, "HGMMA")
    (behind,) = (at for at in places(made, "WARPGROUP.DEPBAR", "0x1") if at > products[-1])
    end, *_ = (at for at in places(made, "WARPGROUP.DEPBAR", "0x0") if at > behind)
    barriers, stores = places(made, "BAR.SYNC"), places(made, "STG")
    parts = [at for at in stores if wait < at < products[0]]
    tiles = [at for at in stores if end < at and "STG.E.128" in made.order[at]]
    tiles = tiles[: made.by.block_m * made.by.block_n // (made.by.num_warps * 32 * 8)]
    assert len(products) == 4  # of the loop: no other code multiplies
    assert products[-1] < behind < min(at for at in places(made, "UTMALDG") if at > behind) < end
    assert parts
    # All threads have stored a tile before one of them waits, and read it after.
    before = max(at for at in barriers if at < wait)
    assert not [each for each in made.order[before:wait] if each.startswith(("STG", "LDG"))]
    assert wait < min(at for at in barriers if at > wait) < parts[0]
    assert tiles[-1] - end < 400  # instructions beside which nothing is multiplied


def test_two_programs_share_a_processor_where_tiles_are_small() -> None:
    made = compiled("sm_90", "int4", block_n=128, num_warps=4, programs=2)
    fits(made, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", [False, True])
def test_inductor_sees_the_kernel_in_a_graph(descriptors: bool) -> None:
    """It appears as a call with its constants, between the producers of its operands and the users
    of the wire."""

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        coder, problem = codec("int8"), Problem(2048, 4096, 1024, 8)
        by = configuration(coder, problem, "sm_90", aligned=descriptors)
        fused = partial(run, product=Product(coder, 8), by=by, graph=True)
        wire = torch.func.functionalize(fused)((x.relu(), weight.t()))
        return (wire + 1,)

    x = torch.empty(2048, 1024, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    with fake_cuda.a_card():
        graph, inputs = fake_cuda.trace(function, x, weight)
    code = fake_cuda.code_of(graph, inputs)
    assert code.count("matmul_encode_0.run(") == 1
    assert "extern_kernels.mm" not in code
    kernel = code.split("def matmul_encode")[1]
    assert ("make_tensor_descriptor(" in kernel) == descriptors
    assert ("part_of_held(" in kernel) == descriptors
