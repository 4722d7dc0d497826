"""Compile and call the C++ of chains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from commpass.errors import CommpassError
from commpass.lowering.chain import (
    Chain,
    Decode,
    Encode,
    further_inputs,
    further_results,
    output_dtype,
)
from commpass.lowering.cpu.chains import source, unsupported_reason

LEAST = 1 << 15
"""The fewest values per thread."""


@dataclass(frozen=True)
class Compiled:
    """A chain as a function.

    ``inputs[0]`` holds the input rows: values ``[rows * ranks, n]`` or wires ``[rows * ranks,
    wire_bytes]``. The others are its ``further_inputs``: ``[rows, n]``, or ``[1, width]`` for a
    weight or bias. ``output`` is ``[rows, n]`` or ``[rows, wire_bytes]``. ``further`` are its
    ``further_results``: ``[rows, n]``, or ``[rows, n / width]`` for a statistic. The last stride of
    each is 1; the first stride and the storage offset are arbitrary. ``numel`` is n.
    """

    chain: Chain
    entry: Callable[..., object]

    def __call__(
        self,
        inputs: Sequence[Tensor],
        output: Tensor,
        numel: int,
        further: Sequence[Tensor] = (),
    ) -> None:
        rows, tensors = output.shape[0], [*inputs, output, *further]
        self._check(tensors, rows, numel)
        if not rows or not numel:
            return
        threads = min(torch.get_num_threads(), rows * numel // LEAST)
        arguments: list[Any] = [threads, rows, numel]
        for each in tensors:
            arguments += [each, each.stride(0) * each.itemsize]
        self.entry(*arguments)

    def _check(self, tensors: Sequence[Tensor], rows: int, numel: int) -> None:
        """Raise CommpassError if a tensor does not have the shape, dtype or layout that the C++
        expects."""
        chain = self.chain
        input_width = numel if chain.decodes is None else _wire(chain.decodes, numel, chain)
        output_width = numel if chain.encodes is None else _wire(chain.encodes, numel, chain)
        operands, results = further_inputs(chain), further_results(chain)
        shapes = [
            (rows * chain.ranks, input_width),
            *((rows, numel) if each.width is None else (1, each.width) for each in operands),
            (rows, output_width),
            *((rows, numel // each.per) for each in results),
        ]
        dtypes = [chain.input_dtype, *(each.dtype for each in operands)]
        dtypes += [output_dtype(chain), *(each.dtype for each in results)]
        if chain.width and numel % chain.width:
            raise CommpassError(f"rows of {numel} values for norms of {chain.width}")
        if len(tensors) != len(shapes):
            raise CommpassError(f"{len(tensors)} tensors for a chain of {len(shapes)}")
        for value, shape, dtype in zip(tensors, shapes, dtypes, strict=True):
            fits = tuple(value.shape) == shape and value.dtype == dtype
            if not fits or value.device.type != "cpu" or (shape[1] > 1 and value.stride(1) != 1):
                raise CommpassError(
                    f"a kernel was called with {list(value.shape)} {value.dtype}, strides"
                    f" {value.stride()}, on {value.device}; it needs {list(shape)} {dtype} with"
                    " contiguous rows, on the CPU"
                )


def _wire(step: Decode | Encode, numel: int, chain: Chain) -> int:
    dtype = step.dtype if isinstance(step, Decode) else chain.input_dtype
    return step.codec.wire_bytes(numel, dtype)


@cache
def compile_chain(chain: Chain) -> Compiled:
    """Return the function of a chain, built by Inductor's builder with its flags.

    The result is in Inductor's cache, also for later processes. Raises CommpassError for a chain
    without C++.
    """
    if reason := unsupported_reason(chain):
        raise CommpassError(f"no C++ kernel: {reason}")
    load = _started.pop(chain, None) or _loader(chain, None)
    made = Compiled(chain, load())
    _compiled.add(chain)
    return made


def start_compiling(chains: Iterable[Chain]) -> None:
    """Start the C++ compiler for several chains at once. ``compile_chain`` waits for each, and
    raises its errors."""
    known = _compiled.union(_started)
    new = [chain for chain in chains if chain not in known and not unsupported_reason(chain)]
    if len(new) < 2:
        return
    pool = ThreadPoolExecutor(max_workers=len(new))  # ends with its work: a fork must not copy it
    for chain in new:
        with suppress(Exception):  # compile_chain tries again, and raises it for the sites
            _started[chain] = _loader(chain, pool.submit)
    pool.shutdown(wait=False)


@cache
def precompile_headers() -> None:
    """Start to precompile torch's headers for C++, once a process, in a thread.

    It also finds the machine's vector instructions. Inductor and kernels need both. On a new
    machine that takes 7 s of a core, later 1 s in each process. In the meantime Python traces the
    graph.
    """
    import torch._inductor.codecache  # not in two threads at once

    assert torch._inductor.codecache
    threading.Thread(target=_with_headers, name="commpass headers", daemon=True).start()


def _with_headers() -> None:
    """Compile a function that does nothing, with the headers of all kernels."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    with suppress(Exception):  # the first kernel tries again, and raises what is wrong
        CppPythonBindingsCodeCache.load_pybinding(["int64_t"], NOTHING)


NOTHING = """\
#include "torch/csrc/inductor/cpp_prefix.h"
extern "C" void kernel(int64_t) {}
"""

_started: dict[Chain, Callable[[], Callable[..., object]]] = {}
"""Chains whose compilation has started, and what waits for it and loads the result."""
_compiled: set[Chain] = set()
"""Chains that were compiled: ``compile_chain`` has them, or Inductor's cache."""


def _loader(chain: Chain, submit: Any) -> Callable[[], Callable[..., object]]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    tensor = ["const unsigned char*", "int64_t"]
    types = ["int64_t"] * 3 + tensor * (1 + len(further_inputs(chain)))
    types += ["unsigned char*", "int64_t"] * (1 + len(further_results(chain)))
    load: Callable[[], Callable[..., object]] = CppPythonBindingsCodeCache.load_pybinding_async(
        types, source(chain), submit_fn=submit
    )
    return load
