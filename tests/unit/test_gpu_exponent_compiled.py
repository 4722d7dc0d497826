"""The kernels of the lossless codec, compiled for GPUs that need not be present.

Nothing spills, streams are loaded and stored 16 bytes at a time, and a value costs few
instructions.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch

from commpass.codecs.exponent import ExponentCodec, exponent
from commpass.lowering.gpu import tiles
from commpass.lowering.gpu.call import Call, calls_of, divisible, signature
from commpass.lowering.gpu.exponent import Tiling, decode_rows, encode_rows
from commpass.lowering.gpu.source import Source, load, without_rare

triton = pytest.importorskip("triton")

NUMEL = 1 << 26


@dataclass(frozen=True)
class Machine:
    """The report of ptxas and nvdisasm on a kernel."""

    registers: int
    spilled: int
    opcodes: Counter[str]

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values()) - self.opcodes["NOP"]


def launches_of(
    planes: int,
    dtype: torch.dtype,
    tiling: Tiling,
    numel: int = NUMEL,
) -> dict[str, Call]:
    """Return all kernels of both directions, by name."""
    coder = exponent(f"exponent(planes={planes})", planes=planes)
    assert isinstance(coder, ExponentCodec)
    rows = torch.empty((1, numel), dtype=dtype, device="meta")
    wire = torch.empty((1, coder.wire_bytes(numel, dtype)), dtype=torch.uint8, device="meta")
    made = calls_of(lambda: encode_rows(coder, rows, tiling))
    made += calls_of(lambda: decode_rows(coder, wire, numel, dtype, tiling))
    return {call.source.entry: call for call in made}


def compiled(launch: Call, backend: str, arch: int | str, text: Source | None = None) -> object:
    """Compile as for a launch, or another text in its place: pointers and numbers are marked as
    multiples of 16 if they are, and ones are constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sixteen = [["tt.divisibility", 16]]
    names = list(launch.arguments)
    known = {(names.index(name),): sixteen for name in divisible(launch)}
    ones = {
        name: 1 for name, value in launch.arguments.items() if isinstance(value, int) and value == 1
    }
    types = {**signature(launch), **dict.fromkeys(ones, "constexpr")}
    source = ASTSource(load(text or launch.source), types, {**launch.constants, **ones}, known)
    target = GPUTarget(backend, arch, 32 if backend == "cuda" else 64)
    return triton.compile(source, target=target, options={"num_warps": launch.warps})


def machine_code(kernel: object, arch: int, folder: Path) -> Machine:
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    text, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    text.write_text(kernel.asm["ptx"])
    name = f"--gpu-name={sm_arch_from_capability(arch)}"
    said = subprocess.run(
        [get_ptxas(arch).path, "-v", name, str(text), "-o", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    disassembler = triton.knobs.nvidia.nvdisasm.path
    lines = subprocess.run(
        [disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    codes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", lines)
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    assert registers, said
    assert spilled, said
    return Machine(int(registers[1]), sum(map(int, spilled)), Counter(codes))


def check(planes: int, dtype: torch.dtype, arch: int, folder: Path) -> dict[str, Machine]:
    """Check that no kernel spills, and that streams use 16 bytes at a time; return the reports."""
    found = {}
    for name, launch in launches_of(planes, dtype, Tiling()).items():
        found[name] = machine_code(compiled(launch, "cuda", arch), arch, folder)
        assert found[name].spilled == 0, name
        assert found[name].registers <= 168, name
    width = dtype.itemsize
    split, join = found["exponent_split"].opcodes, found["exponent_join"].opcodes
    rest = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype]
    # Once for whole tiles, and once for the last one.
    assert wide(split, "LDG") == 2 * 8 * width
    assert narrow(split, "LDG") == 0
    # The static part only: the room of the dynamic one is not filled.
    assert wide(split, "STG") == rest + planes
    assert wide(join, "LDG") >= rest + planes
    # 16-bit floats as above. And one for values that are in no line of 128.
    assert wide(join, "STG") == (32 if width == 2 else 8 * width) + 1
    assert narrow(join, "STG") == 0
    return found


def wide(opcodes: Counter[str], kind: str) -> int:
    return sum(n for code, n in opcodes.items() if code.startswith(kind) and ".128" in code)


def narrow(opcodes: Counter[str], kind: str) -> int:
    return sum(n for code, n in opcodes.items() if code.startswith(kind) and ".128" not in code)


def usual(planes: int, folder: Path) -> dict[str, float]:
    """Return the instructions per bf16 value of each kernel on Hopper, with loops counted once, and
    without rare suites."""
    found = {}
    for name, launch in launches_of(planes, torch.bfloat16, Tiling()).items():
        kernel = compiled(launch, "cuda", 90, without_rare(launch.source))
        issued = launch.programs * 32 * machine_code(kernel, 90, folder).instructions
        found[name] = issued / NUMEL
    return found


@pytest.mark.every
def test_quick_code_of_hopper(tmp_path: Path) -> None:
    """At 26 issue slots per bf16 value, the copy bandwidth of an H100 is reached."""
    check(3, torch.bfloat16, 90, tmp_path)
    found = usual(3, tmp_path)
    assert found["exponent_split"] < 15
    assert found["exponent_place"] < 2.5
    assert found["exponent_join"] < 13
    assert found["exponent_count"] < 0.1


@pytest.mark.every
def test_dense_code_of_hopper(tmp_path: Path) -> None:
    check(2, torch.bfloat16, 90, tmp_path)
    found = usual(2, tmp_path)
    assert found["exponent_split"] < 23
    assert found["exponent_join"] < 18


@pytest.mark.slow
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.every), 100])
def test_other_cards(arch: int, tmp_path: Path) -> None:
    check(3, torch.bfloat16, arch, tmp_path)


@pytest.mark.every
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    check(3, dtype, 90, tmp_path)


@pytest.mark.every
@pytest.mark.parametrize("numel", [128, 129, 1 << 30])
def test_least_and_the_most(numel: int, tmp_path: Path) -> None:
    """Numbers that are one, halves of words, and sums of 64 bits."""
    for name, launch in launches_of(3, torch.bfloat16, Tiling(), numel).items():
        assert machine_code(compiled(launch, "cuda", 90), 90, tmp_path).spilled == 0, name


@pytest.mark.every
def test_mi300() -> None:
    for name, launch in launches_of(3, torch.bfloat16, Tiling(columns=256)).items():
        text = compiled(launch, "hip", "gfx942").asm["amdgcn"]
        spilled = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text)
        assert spilled, name
        assert set(spilled) == {"0"}, name
    assert "global_load_dwordx4" in text
    assert "global_store_dwordx4" in text


def tile_functions() -> dict[str, Callable[..., object]]:
    modules = [
        import_module(f"{tiles.__name__}.{m.name}") for m in pkgutil.iter_modules(tiles.__path__)
    ]
    each = {name: value for module in modules for name, value in vars(module).items()}
    return {name: value for name, value in each.items() if getattr(value, "is_tile", False)}


def calls_in(node: ast.AST, names: object) -> Iterator[ast.Call]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in names:
            yield each


def test_no_tile_function_returns_a_compile_time_argument() -> None:
    """Up to Triton 3.6, what a function returns is a value of the program, even if it computes with
    constants alone."""
    known = tile_functions()
    found = []
    for name, function in known.items():
        for call in calls_in(ast.parse(inspect.getsource(function)), known):
            parameters = inspect.signature(known[call.func.id]).parameters.values()
            constants = {each.name for each in parameters if "constexpr" in str(each.annotation)}
            given = dict(zip((each.name for each in parameters), call.args, strict=False))
            given |= {each.arg: each.value for each in call.keywords}
            inner = [g for key, g in given.items() if key in constants and any(calls_in(g, known))]
            found += [(name, ast.unparse(each)) for each in inner]
    assert len(known) > 100
    assert found == []
