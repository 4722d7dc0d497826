"""Compile a kernel for an architecture that need not be present, and extract data from the result.

Triton includes all tools: LLVM for AMD, and NVIDIA's ptxas, cuobjdump and nvdisasm.
"""

from __future__ import annotations

import linecache
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from commpass.errors import KernelError
from commpass.lowering.inspect import amdgcn
from commpass.lowering.inspect.architectures import (
    ARCHITECTURES,
    Architecture,
    Residence,
    architecture,
    residence,
)
from commpass.lowering.inspect.sass import Sass, count_instructions, parse_sass

DIVISIBLE = 16


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled kernel. ``source`` is its text in Triton's language, ``assembly`` the PTX or
    amdgcn, ``sass`` NVIDIA's machine code as text.

    ``registers`` and ``scalars`` are those of a thread and, on AMD, of its wave. ``spills`` is the
    number of bytes that a thread stores and loads for lack of registers (each instruction counted
    once). ``local`` and ``shared`` memory are in bytes of a thread and of a program. ``loads`` and
    ``stores`` are accesses of global memory by bytes per thread, and ``matmuls`` instructions of
    tensor cores; both are static counts.
    """

    arch: str
    source: str
    assembly: str
    sass: str = ""
    registers: int
    scalars: int = 0
    spills: int
    local: int
    shared: int
    num_warps: int
    loads: Mapping[int, float] = field(default_factory=dict)
    stores: Mapping[int, float] = field(default_factory=dict)
    matmuls: Mapping[str, float] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        return self.num_warps * ARCHITECTURES[self.arch].warp

    @property
    def residence(self) -> Residence:
        """The number of its programs on a multiprocessor at a time."""
        return residence(ARCHITECTURES[self.arch], self.registers, self.shared, self.num_warps)

    @property
    def occupancy(self) -> float:
        return self.residence.occupancy

    @cached_property
    def code(self) -> Sass:
        """The parsed machine code. Raises KernelError for AMD, whose instructions are not
        counted."""
        if not self.sass:
            raise KernelError(f"{self.arch}: instructions are not counted")
        return parse_sass(self.sass)


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: str,
    num_warps: int = 4,
    num_stages: int = 3,
    hints: Mapping[str, int] | None = None,
    **options: Any,
) -> Compiled:
    """Compile a kernel (of ``gpu.source.load``) for one of ``ARCHITECTURES``.

    ``signature`` holds Triton's types of its arguments (``*bf16``, ``i32``) and ``constants`` the
    values of the others. Pointers are assumed to be multiples of 16 bytes, as torch's are.
    ``hints`` gives divisors of integers (``{"numel": 16}``), or of a pointer with less alignment
    (``{"x": 1}``). Products and sums are not fused unless ``enable_fp_fusion=True``. Raises
    KernelError for an unknown architecture, and if the compilation fails.
    """
    target = architecture(arch)
    result = _compile(
        kernel,
        _source(kernel, signature, constants, hints or {}),
        target,
        {"enable_fp_fusion": False} | options | {"num_warps": num_warps, "num_stages": num_stages},
    )
    nvidia = target.backend == "cuda"
    return Compiled(
        arch=arch,
        source=_text(kernel),
        assembly=result.asm["ptx" if nvidia else "amdgcn"],
        shared=result.metadata.shared,
        num_warps=result.metadata.num_warps,
        **(_resources(result.asm["cubin"]) if nvidia else amdgcn.resources(result.asm["amdgcn"])),
    )


def _source(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    hints: Mapping[str, int],
) -> Any:
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        raise KernelError(
            f"{type(kernel).__name__} is no kernel that can be compiled; with TRITON_INTERPRET=1"
            " kernels are interpreted"
        )
    names = list(kernel.arg_names)
    if unknown := (set(signature) | set(constants) | set(hints)) - set(names):
        raise KernelError(f"{kernel.__name__} has no argument {', '.join(sorted(unknown))}")
    if missing := [name for name in names if name not in signature and name not in constants]:
        raise KernelError(f"{kernel.__name__}: nothing given for {', '.join(missing)}")
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    attributes = {}
    for place, name in enumerate(names):
        known = hints.get(name, DIVISIBLE if types[name].startswith("*") else 1)
        # Triton only uses multiples of 16.
        if types[name] != "constexpr" and known % DIVISIBLE == 0:
            attributes[(place,)] = [["tt.divisibility", DIVISIBLE]]
    return ASTSource(kernel, types, dict(constants), attributes)


def _compile(kernel: Any, source: Any, target: Architecture, options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    at = GPUTarget(target.backend, target.number, target.warp)
    try:
        return triton.compile(source, target=at, options=options)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise KernelError(
            f"{kernel.__name__} cannot be compiled for {target.name}:"
            f" {lines[-1] if lines else type(error).__name__}"
        ) from error


def _resources(cubin: bytes) -> dict[str, Any]:
    """Return fields of ``Compiled``: the machine code, what cuobjdump says of a thread's registers,
    stack and local memory, and what the machine code loads and stores."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output([knobs.nvidia.nvdisasm.path, "-c", file.name])
        usage = _output([knobs.nvidia.cuobjdump.path, "-res-usage", file.name])
    found = re.search(r"REG:\d+.*", usage)
    if found is None:
        raise KernelError(f"no registers in what cuobjdump says: {usage.strip()!r}")
    each = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", found[0])}
    counts = count_instructions(parse_sass(text))
    return {
        "sass": text,
        "registers": each["REG"],
        "spills": int(counts.bytes("local load", "local store")),
        "local": each["STACK"] + each["LOCAL"],
        "loads": counts.widths("global load", "async copy"),
        "stores": counts.widths("global store"),
        "matmuls": counts.matmuls(),
    }


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{command[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _text(kernel: Any) -> str:
    """Return the text that a kernel was loaded from, including the tile functions that it calls."""
    return "".join(linecache.getlines(kernel.fn.__code__.co_filename)) or kernel.src
