"""Trace and generate code for a GPU on a machine without one.

torch sees a fake GPU, and Triton its target, while a graph is traced and Inductor generates its
code. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from commpass.costmodel import default_profile
from commpass.passes import GraphInput, PassContext, manager
from commpass.policy import Policy
from commpass.policy.rules import Rule

CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="",
)
"""The properties that the generated code depends on."""


def _contiguous(x: torch.Tensor, **how: Any) -> torch.Tensor:
    """Avoid the method itself, which switches to the device of its tensor; a CPU build cannot do
    that."""
    return torch.ops.aten.contiguous.default(x, **how)


GETITEM = torch.Tensor.__getitem__


def _getitem(x: torch.Tensor, index: Any) -> torch.Tensor:
    """As ``_contiguous``: indexing by a tensor switches devices too."""
    if isinstance(index, torch.Tensor):
        return torch.ops.aten.index.Tensor(x, [index])
    return GETITEM(x, index)


ON_CUDA: dict[str, Any] = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.get_device_properties": lambda *device: CARD,
    "torch.cuda.get_device_capability": lambda *device: (CARD.major, CARD.minor),
    "torch.cuda.get_rng_state": lambda *device: torch.empty(16, dtype=torch.uint8, device="cpu"),
    "torch.cuda.set_rng_state": lambda *state: None,
    "torch.cuda._exchange_device": lambda device: 0,
    "torch.cuda._maybe_exchange_device": lambda device: 0,
    "torch.Tensor.contiguous": _contiguous,
    "torch.Tensor.__getitem__": _getitem,
    "torch._subclasses.fake_tensor.init_gpu_context": lambda *device: None,
}
OF_INTERFACE: dict[str, Any] = {
    "get_device_properties": staticmethod(lambda *device: CARD),
    "get_compute_capability": staticmethod(lambda *device: 90),
}


class _Driver:
    """The driver properties that Triton reads while nothing is launched."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0


@contextmanager
def a_card() -> Iterator[None]:
    """Simulate one H100 in this context."""
    from torch._dynamo.device_interface import CudaInterface
    from triton.runtime import driver

    before = driver._active
    with ExitStack() as stack:
        for name, value in ON_CUDA.items():
            stack.enter_context(patch(name, value))
        for name, value in OF_INTERFACE.items():
            stack.enter_context(patch.object(CudaInterface, name, value))
            if hasattr(CudaInterface.Worker, name):
                stack.enter_context(patch.object(CudaInterface.Worker, name, value))
        driver.set_active(_Driver())
        _forget()
        try:
            yield
        finally:
            driver._active = before
            _forget()


def _forget() -> None:
    """Let torch check again whether there is a GPU that Triton can use."""
    from torch.utils import _triton

    for value in vars(_triton).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def trace(function: Callable[..., Any], *like: torch.Tensor) -> tuple[Any, list[Any]]:
    """Return a graph of fake GPU tensors with the operators that Inductor gets, and its inputs.

    Their shapes, strides and dtypes are those of ``like``.
    """
    from torch._inductor.decomposition import select_decomp_table

    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in like
        ]
        made = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    return made, inputs


class _Written(Exception):
    def __init__(self, code: str) -> None:
        super().__init__("code was written")
        self.code = code


def code_of(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return the code that Inductor generates for a graph of ``trace``.

    The output of the graph must be a tuple or a list.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    return _written_by(lambda: compile_fx_inner(gm, list(inputs)), inputs[0].fake_mode)


def code_by(backend: Callable[..., Any], gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return the code that Inductor generates for a graph of ``trace`` that a backend compiles, as
    Dynamo calls it.

    Without a card torch can't trace the patterns of attention that it looks for, so it has none.
    """
    passes = "torch._inductor.fx_passes"
    with (
        patch(f"{passes}.joint_graph.lazy_init", lambda *device: None),
        patch(f"{passes}.post_grad.lazy_init", lambda *device: None),
        patch("commpass.passes.lower.make", lambda sources: None),
    ):
        return _written_by(lambda: backend(gm, list(inputs)), inputs[0].fake_mode)


def _written_by(compiles: Callable[[], Any], mode: FakeTensorMode) -> str:
    """Return the code of the graph that a function compiles, before anything is run."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def write(self: GraphLowering) -> Any:
        code = self.codegen()[0]
        raise _Written(getattr(code, "value", code))

    try:
        with (
            a_card(),
            tracing(TracingContext(mode)),
            torch.no_grad(),
            config.patch(fx_graph_cache=False, compile_threads=1),
            patch.object(GraphLowering, "compile_to_module", write),
        ):
            compiles()
    except Exception as error:
        found: Any = error
        while found is not None and not isinstance(found, _Written):
            found = getattr(found, "inner_exception", None) or found.__cause__ or found.__context__
        if found is None:
            raise
        return found.code
    raise AssertionError("Inductor wrote no code")


def planned(
    function: Callable[..., Any],
    rule: Rule,
    *like: torch.Tensor,
    passes: Sequence[manager.Pass] = manager.PASSES,
) -> tuple[PassContext, list[torch.Tensor]]:
    """Return the results of some passes for a graph of a GPU, and its inputs.

    Functions that sites share (``lowering.kernel``) are not compiled: Inductor would need a card to
    trace them.
    """
    with a_card(), patch("commpass.passes.lower.make", lambda sources: None):
        gm, inputs = trace(function, *like)
        given = GraphInput(
            gm=gm,
            direction="forward",
            policy=Policy(rules=[rule]),
            profile=default_profile("cuda"),
            stateless=None,
            kernels=True,
        )
        outcome = manager.run(given, "0", passes, strict=True)
    if outcome.error is not None:
        raise outcome.error
    return outcome, inputs
