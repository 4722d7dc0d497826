"""State with which ranks of tests are forked, since creating it takes seconds per rank.

It has loaded modules, and what torch determines once in a process (``processes.Ranks``).
"""

from __future__ import annotations

import gc
import importlib

import torch

MODULES = (
    "pytest",
    "hypothesis",
    "commpass.backend",
    "commpass.parallel",
    "commpass.cli",
    "torch.export._trace",
    *(
        f"torch.distributed.{name}"
        for name in ("checkpoint", "fsdp", "optim", "pipelining", "tensor.experimental")
    ),
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils.cpp_extension",
    *(f"torch._inductor.{name}" for name in ("compile_fx", "codegen.cuda_combined_scheduling")),
    *(f"torch._dynamo.backends.{name}" for name in ("inductor", "distributed")),
)


def _compile() -> None:
    """Compile a step in this process, so that torch initializes its compiler.

    torch then has read its patterns, queried the processor and searched for its compiler. It must
    not start a pool of processes, which could not be forked.
    """
    from torch._inductor import config

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu().sum()

    with config.patch(compile_threads=1):
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            torch.compile(step, backend=backend)(torch.ones(8, 8, requires_grad=True)).backward()
    torch._dynamo.reset()


for name in MODULES:
    importlib.import_module(name)
torch.set_num_threads(1)
if not torch.backends.cuda.is_built():
    # Such a torch starts threads for backward, also without a GPU, and refuses backward in a
    # process that was forked from one that has them.
    _compile()
gc.collect()
gc.freeze()  # the garbage collector skips it, and pages stay shared
