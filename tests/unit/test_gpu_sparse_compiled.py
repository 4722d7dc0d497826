"""The kernels of the sparse codecs, compiled for GPUs that need not be present: no spills, loads
and stores of 16 bytes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from commpass.codecs import codec
from commpass.codecs.sparse import SparseCodec
from commpass.lowering.gpu import sparse
from commpass.lowering.gpu.call import Call, calls_of, divisible, signature
from commpass.lowering.gpu.source import load
from commpass.lowering.gpu.sparse_measure import KernelStatistics
from commpass.lowering.gpu.tiles import sparse_measure

AMD = "gfx942"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    AMD: GPUTarget("hip", AMD, 64),
}
LONG = 1 << 24


def compiled(call: Call, target: str) -> dict[str, str | bytes]:
    types = signature(call)
    names = list(types)
    constants = {(names.index(name),): value for name, value in call.constants.items()}
    known = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible(call)}
    source = ASTSource(load(call.source), types, constants, known)
    options = {"num_warps": call.warps, **call.options}
    return triton.compile(source, target=TARGETS[target], options=options).asm


def ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def calls(spec: str, dtype: torch.dtype, target: str, n: int = LONG) -> dict[str, Call]:
    """Return all kernels of a codec for a row of ``n``, with tensors without values."""
    coder = codec(spec)
    assert isinstance(coder, SparseCodec)
    sizes = sparse.Sizes(warp=TARGETS[target].warp_size)
    x, residual = torch.empty(1, n, dtype=dtype, device="meta"), torch.empty(1, n, device="meta")
    wires = torch.empty(8, coder.wire_bytes(n, dtype), dtype=torch.uint8, device="meta")
    made = calls_of(lambda: sparse.encode(coder, x, residual, sizes))
    made += calls_of(lambda: sparse.sum_rows(coder, wires, n, dtype, sizes))
    measures = sparse_measure.__name__
    return {
        call.source.entry.removeprefix("sparse_"): call
        for call in made
        if call.entry.__module__ != measures
    }


def assembled(call: Call, target: str, folder: Path) -> tuple[str, int, int]:
    """Return the machine code, its registers per thread and its spilled bytes."""
    asm = compiled(call, target)
    if target == AMD:
        text = asm["amdgcn"]
        assert isinstance(text, str)
        read = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)$", text, re.M)}
        spilled = read["vgpr_spill_count"] + read["sgpr_spill_count"]
        return text, read["vgpr_count"], spilled + read["private_segment_fixed_size"]
    written, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    written.write_text(str(asm["ptx"]))
    arch = re.search(r"^\.target (\w+)", str(asm["ptx"]), re.M)
    assert arch is not None
    ptxas = Path(get_ptxas(TARGETS[target].arch).path)
    said = subprocess.run(
        [ptxas, "-v", f"--gpu-name={arch[1]}", written, "-o", cubin],
        check=True,
        capture_output=True,
        text=True,
    ).stderr
    used = re.search(r"Used (\d+) registers", said)
    assert used is not None
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))
    assert len(re.findall(r"bytes spill", said)) >= 2
    shown = subprocess.run(
        [ptxas.parent / "nvdisasm", cubin], check=True, capture_output=True, text=True
    ).stdout
    return shown, int(used[1]), spilled


def operations(text: str) -> list[str]:
    """Return the operations of NVIDIA machine code, one for each line that has one."""
    return re.findall(r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]+)", text, re.M)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_selection_loads_and_stores_16_bytes_and_spills_nothing(dtype, target, tmp_path):
    """This holds for any length of the row: here it is not a multiple of anything."""
    call = calls("gaussiank", dtype, target, LONG - 3)["select"]
    text, registers, spilled = assembled(call, target, tmp_path)
    assert spilled == 0
    if target == AMD:
        assert registers <= 128
        # Of 4096 entries each of 256 threads has 16.
        loads = 4 + (4 if dtype == torch.float32 else 2)
        assert len(re.findall("global_load_dwordx4", text)) == loads
        assert len(re.findall("global_store_dwordx4", text)) == 4
        return
    assert registers <= 128, "fewer than 4 programs of 128 threads on a multiprocessor"
    found = operations(text)
    # Of 4096 entries each of 128 threads has 32; the last, partial block is accessed one by one.
    loads = 8 + (8 if dtype == torch.float32 else 4)
    assert sum(name.startswith("LDG.E.128") for name in found) == loads
    assert sum(name.startswith("STG.E.128") for name in found) == 8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_selection_issues_less_than_memory_leaves_time_for(dtype, tmp_path):
    """An H200 issues 29.6e12 operations of threads per second (132 multiprocessors, 4 x 32, 1.75
    GHz), and moves 4.8e12 bytes.

    That is 61 operations for each entry of 10 bytes, and 74 for each of 12. What only a partial
    block needs is counted as well.
    """
    call = calls("gaussiank", dtype, "sm_90")["select"]
    text, *_ = assembled(call, "sm_90", tmp_path)
    assert len(operations(text)) / 32 <= 40


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_look_back_keeps_all_warps_together(target, tmp_path):
    """The word that other programs change is read once per thread, and its use follows a barrier:
    otherwise a warp could see another word."""
    text, *_ = assembled(calls("gaussiank", torch.bfloat16, target)["select"], target, tmp_path)
    found = operations(text)
    [read] = [place for place, name in enumerate(found) if name.startswith("LDG.E.64.STRONG")]
    back = next(place for place in range(read, len(found)) if found[place] == "BRA")
    assert any(name.startswith("BAR.SYNC") for name in found[read:back])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "spec", "dtype"),
    [
        *((target, "topk", torch.bfloat16) for target in TARGETS),
        ("sm_90", "dgc(density=0.3, values=bf16)", torch.float32),
        ("sm_90", "topk(density=0.3, values=bf16)", torch.float32),
        (AMD, "redsync(indices=blocks16, values=int8)", torch.float16),
        (AMD, "topk(indices=blocks16, values=int8)", torch.float16),
    ],
)
def test_all_kernels_compile_and_spill_nothing(target, spec, dtype, tmp_path):
    for name, call in calls(spec, dtype, target).items():
        _, _, spilled = assembled(call, target, tmp_path)
        assert spilled == 0, name


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["sm_90", AMD])
def test_statistics_compile_and_spill_nothing(target, tmp_path):
    x = torch.empty(1, LONG, dtype=torch.bfloat16, device="meta")
    statistics = KernelStatistics(x, torch.empty(1, LONG, device="meta"), ints(2, 1), 2048, 8)
    sums = torch.empty(1, 2, dtype=torch.int64, device="meta")
    made = [
        statistics.peak_call(),
        statistics.counts_call(ints(1, 17), None, ints(1, 17)),
        statistics.moments_call(ints(1, 1), sums),
        statistics.above_call(ints(1, 1), torch.empty(1, 1, device="meta"), sums),
    ]
    for call in made:
        text, _, spilled = assembled(call, target, tmp_path)
        assert spilled == 0, call.source.entry
        assert "LDG.E.128" in text or "global_load_dwordx4" in text
