"""Torch modes of the caller do not change the results of a codec, a direct collective call, or a
pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ambient import (
    CODECS,
    MODES,
    NOT_COMPILED,
    OF_THE_PROCESS,
    SPARSE,
    UsersDispatchMode,
    UsersFunctionMode,
    differing,
)
from tiers import crossed, rarely, sampled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import commpass
from commpass.codecs import FLOATS, codec
from commpass.codecs.codec import _gaussian_share, _sample_error
from commpass.collectives import Payload, Request, read_stages
from commpass.lowering import cpu
from commpass.lowering.chain import Chain, Encode
from commpass.utils.ambient import ambient_free, making_lasting_tensors, without_ambient_state

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FORWARD_ALONE = ("inference", "no gradients")
QUICK = [("all_gather", mode) for mode in MODES] + [("all_reduce", "autocast to bf16")]


def data(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    shape = shape or (20, 64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def alone():
    """A gloo group of this process only."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


# --- computations ---------------------------------------------------------------------------------


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("dtype", [torch.float32, *map(rarely, FLOATS[1:])])
@pytest.mark.parametrize("mode", MODES)
def test_codec_gives_the_same_bits(mode, dtype):
    x = data(dtype)

    def run(name: str) -> list[torch.Tensor]:
        wire = codec(name).encode(x)
        return [wire.payload, codec(name).decode(wire)]

    assert differing(run, CODECS + SPARSE, mode) == []


@pytest.mark.parametrize("mode", MODES)
def test_difference_codec_gives_the_same_bits(mode):
    x, held = data(), data() * 0.9

    def run(name: str) -> list[torch.Tensor]:
        coder = codec(name).against(held)
        wire = coder.encode(x)
        return [wire.payload, coder.decode(wire)]

    assert differing(run, ("difference", "difference(inner=rotated)"), mode) == []


def by_hand(kind: str, x: torch.Tensor, name: str) -> torch.Tensor:
    return getattr(commpass, kind)(x, codec=name)


@pytest.mark.slow
@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("kind", "mode"), sampled(crossed(KINDS, MODES), lambda case: case in QUICK)
)
def test_collective_by_hand_gives_the_same_bits_and_gradients(alone, kind, mode):
    x, gradient = data().requires_grad_(), data()

    def run(name: str) -> list[torch.Tensor]:
        y = by_hand(kind, x, name)
        return [y, *(torch.autograd.grad(y, x, gradient) if mode not in FORWARD_ALONE else [])]

    with torch.set_grad_enabled(mode not in FORWARD_ALONE):
        assert differing(run, CODECS, mode) == []


@pytest.mark.parametrize("mode", MODES)
def test_sparse_all_reduce_leaves_the_same_residual(alone, mode):
    x, start = data(), torch.zeros(20, 64)

    def run(name: str) -> list[torch.Tensor]:
        residual = start.clone()
        return [commpass.all_reduce(x, codec=name, residual=residual), residual]

    assert differing(run, SPARSE, mode) == []


def test_asynchronous_collective_gives_the_same_bits(alone):
    x = data()

    def run(name: str) -> torch.Tensor:
        return commpass.all_gather(x, codec=name, async_op=True).wait()

    for mode in ("autocast to bf16", "dispatch mode", "function mode"):
        assert differing(run, ("rotated", "taco", "int8"), mode) == []


# --- compiled -------------------------------------------------------------------------------------


TRACED = ("autocast to bf16", "default dtype bfloat16", "device as context", "function mode")
"""Modes that a compiler sees, one of each kind."""
OTHERS = [mode for mode in MODES if mode not in (*TRACED, *NOT_COMPILED)]
CASES = [
    ("autocast to bf16", "rotated", "aot_eager"),
    ("function mode", "int8", "aot_eager"),
    *(rarely(*case, "aot_eager") for case in crossed(TRACED, CODECS, one_in=len(TRACED))),
    *(rarely(mode, "tahquant", "aot_eager") for mode in OTHERS),
    *(rarely(mode, name, "inductor") for mode in TRACED for name in ("rotated", "taco", "table")),
    *(rarely("deterministic", name, "inductor") for name in ("exponent", "mixed", "int4")),
]


def differing_compiled(
    function: Callable[[torch.Tensor], Any],
    finish: Callable[[torch.Tensor, Any], Any],
    mode: str,
    backend: str,
) -> list[str]:
    """Like ``differing``, for one compiled function. Operators outside Inductor have the bits of
    eager."""
    x = data().requires_grad_(mode not in FORWARD_ALONE)

    def run(_: str) -> Any:
        torch._dynamo.reset()
        return finish(x, torch.compile(function, backend=backend, fullgraph=True)(x))

    def eager(_: str) -> Any:
        return finish(x, function(x))

    return differing(run, ("it",), mode, eager if backend == "aot_eager" else None)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name", "backend"), CASES)
def test_compiled_collective_gives_the_same_bits_and_gradients(alone, mode, name, backend):
    gradient = data()

    def with_gradient(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [y, *(torch.autograd.grad(y, x, gradient) if x.requires_grad else [])]

    def function(x: torch.Tensor) -> torch.Tensor:
        return commpass.all_gather(x, codec=name)

    assert differing_compiled(function, with_gradient, mode, backend) == []


FIXED = [case for case in CASES if "exponent" not in getattr(case, "values", case)]
"""Without the codec whose wire length depends on the values: no whole graph has it."""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name", "backend"), FIXED)
def test_compiled_codec_gives_the_same_bits(mode, name, backend):
    coder = codec(name)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wire = coder.encode(x)
        return wire.payload, coder.decode(wire)

    assert differing_compiled(function, lambda x, y: y, mode, backend) == []


@pytest.mark.slow
def test_autocast_around_a_compiled_collective_stays_the_callers(alone):
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x @ x.t()
        y = commpass.all_reduce(before.float(), codec="rotated")
        return y, y @ y.t()

    x = data()
    with torch.autocast("cpu", torch.bfloat16):
        y, after = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        exact = (x @ x.t()).float()
    assert y.dtype == torch.float32
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(y, exact, rtol=0, atol=0.02 * float(exact.abs().max()))


# --- cached computations --------------------------------------------------------------------------


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("mode", MODES)
def test_facts_about_codecs_are_the_same(mode):
    request, _payload = Request("0", 4), Payload(4096, 64, torch.float32)

    def facts(name: str) -> list[torch.Tensor]:
        for cached in (_sample_error, _gaussian_share, read_stages, cpu.source):
            cached.cache_clear()
        coder = codec(name)
        stages = read_stages(
            "all_reduce", "two_shot", name, Payload(4096, 64, torch.float32), request
        )
        chain = Chain(torch.float32, (Encode(coder),))
        said = [coder.relative_error(), coder.expected_bytes(4096, torch.bfloat16), stages]
        return [text(said), text("" if cpu.unsupported_reason(chain) else cpu.source(chain))]

    assert differing(facts, ("rotated", "taco", "int4", "exponent", "table", "sdp4bit"), mode) == []


def text(said: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(str(said).encode() + b"."), dtype=torch.uint8)


def test_tensors_that_last_can_be_written_after_inference():
    with torch.inference_mode():
        with making_lasting_tensors():
            made = torch.zeros(3)
        inside = torch.zeros(3)
    assert inside.is_inference()
    assert not made.is_inference()
    made += 1
    with FakeTensorMode(), UsersDispatchMode(), making_lasting_tensors():
        assert type(torch.zeros(3)) is torch.Tensor


# --- the boundary ---------------------------------------------------------------------------------


def state() -> tuple[object, ...]:
    """Return everything that the boundary changes temporarily, and what it must not change."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        list(map(id, _get_current_dispatch_mode_stack())),
        (torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)).dtype,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.mark.parametrize("mode", MODES)
def test_boundary_restores_the_callers_state_also_after_an_error(mode):
    with UsersDispatchMode(), FakeTensorMode(), CommDebugMode(), MODES[mode]():
        before = state()
        with without_ambient_state():
            assert not torch.is_grad_enabled()
            assert UsersDispatchMode not in map(type, _get_current_dispatch_mode_stack())
            with without_ambient_state():
                pass
        assert state() == before
        with pytest.raises(ZeroDivisionError), without_ambient_state():
            _ = 1 / 0
        assert state() == before


@pytest.mark.parametrize("mode", OF_THE_PROCESS)
def test_boundary_leaves_the_state_of_the_process_alone(mode):
    """Other threads of the caller share it."""

    def of_the_process() -> tuple[object, ...]:
        return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()

    with MODES[mode]():
        outside = of_the_process()
        with without_ambient_state():
            assert of_the_process() == outside


def test_tracing_goes_on_inside_the_boundary():
    @ambient_free
    def double(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    def targets() -> list[object]:
        gm = make_fx(double, tracing_mode="fake")(torch.ones(2, 2))
        return [node.target for node in gm.graph.nodes if node.op == "call_function"]

    plain = targets()
    assert plain == [torch.ops.aten.mm.default]
    with torch.autocast("cpu", torch.bfloat16), UsersDispatchMode(), UsersFunctionMode():
        assert targets() == plain


def test_torchs_own_counter_sees_the_exchanges(alone):
    with CommDebugMode() as counter, torch.autocast("cpu", torch.bfloat16):
        commpass.all_reduce(data(), codec="bf16", algorithm="native")
    assert counter.get_total_counts() == 1
