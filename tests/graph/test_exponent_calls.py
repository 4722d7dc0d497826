"""Encode and decode of the exponent codec as one call each, for compilers that accept our calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from graphs import ops, trace
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import commpass
from commpass.codecs import codec, exponent_operators
from commpass.errors import KernelError
from commpass.lowering import Source, exponent
from commpass.passes import lower
from commpass.passes.context import GraphInput
from commpass.passes.manager import run
from commpass.policy import Policy
from commpass.policy.rules import Rule

RANKS = 2
CALLS = ["exponent_encode", "exponent_decode"]


@pytest.fixture(autouse=True)
def _world(fake_group):
    fake_group(RANKS)


def tokens(x, counts):
    """Send tokens to each rank as given by ``counts``, and get as many from each."""
    sizes = counts.tolist()
    for size in sizes:
        torch._check(size >= 0)
        torch._check(size <= 64)
    given = x.narrow(0, 0, sum(sizes))
    return ops.wait_tensor(ops.all_to_all_single(given * 2, sizes, sizes, "0")) + 1


def lowered(x, dynamic=True, lowering=None, **more):
    """Return the graph of an all_to_all, and the names of commpass's operators in it."""
    counts = torch.tensor([3, 4])
    function = tokens if dynamic else lambda x, _: tokens_fixed(x)
    gm = trace(function, x, counts, dynamic=True)
    policy = Policy(rules=[Rule(codec="exponent", force=True, lowering=lowering)])
    graph_input = GraphInput(
        gm=gm, direction="forward", policy=policy, profile=commpass.ethernet(1), **more
    )
    outcome = run(graph_input, "0", strict=True)
    assert outcome.error is None
    assert len(outcome.plan.compressed) == 1
    own = [n.target.name().split("::")[1] for n in gm.graph.nodes if "commpass" in str(n.target)]
    return gm, own


def tokens_fixed(x):
    return ops.wait_tensor(ops.all_to_all_single(x * 2, [64, 64], [64, 64], "0")) + 1


X = torch.ones(128, 256)


@pytest.mark.slow
def test_exchange_of_tokens_has_few_nodes():
    gm, own = lowered(X, operators=True)
    assert own == CALLS
    assert len(gm.graph.nodes) < 250


@pytest.mark.every
def test_other_compile_stacks_get_plain_operators_alone():
    gm, own = lowered(X)
    assert own == []
    assert len(gm.graph.nodes) > 3000


@pytest.mark.slow
def test_exchange_of_fixed_size_has_few_nodes():
    gm, own = lowered(X, dynamic=False, operators=True)
    assert own == CALLS
    assert len(gm.graph.nodes) < 250


def test_kernel_of_a_region_has_few_nodes(monkeypatch):
    sources = []
    monkeypatch.setattr(lower, "make", sources.extend)
    lowered(X, dynamic=False, lowering="kernel", operators=True, kernels=True)
    bodies = [each.body.graph for each in sources if isinstance(each, Source)]
    called = [str(node.target) for body in bodies for node in body.nodes]
    assert "commpass.exponent_encode.default" in called
    assert all(len(body.nodes) < 250 for body in bodies)


def test_rows_too_short_to_be_coded_are_not_called():
    short = torch.ones(128, 1)
    _, own = lowered(short, dynamic=False, operators=True)
    assert own == []


# --- the operators --------------------------------------------------------------------------------

VALUES = torch.tensor([0.0, -0.0, 1.5, torch.inf, torch.nan, 1e-42, -3e38])


def rows(count, numel, dtype):
    generator = torch.Generator().manual_seed(count + numel)
    made = torch.randn((count, numel), generator=generator).to(dtype)
    flat = made.view(-1)
    flat[: min(len(VALUES), flat.numel())] = VALUES[: flat.numel()].to(dtype)
    return made


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=pytest.mark.every)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_calls_give_the_bytes_of_the_codec(kernel, dtype):
    """A kernel leaves the bytes of a wire that are not used as they are."""
    own, coder = torch.ops.commpass, codec("exponent")
    for count, numel in [(0, 5), (1, 5), (3, 1025), (5, 2048)]:
        whole = rows(count, 2 * numel, dtype)
        for given in (whole[:, :numel], whole[:, ::2]):
            plain = given.clone(memory_format=torch.contiguous_format)
            wire = own.exponent_encode(given, "exponent", kernel)
            unused = torch.arange(wire.shape[1]) >= coder.used_bytes(wire, numel, dtype)[:, None]
            assert torch.equal(wire.masked_fill(unused, 0), coder.encode_rows(plain))
            back = own.exponent_decode(wire, "exponent", numel, dtype, kernel)
            assert torch.equal(back.view(torch.uint8), plain.view(torch.uint8))


def test_missing_kernels_are_an_error_with_the_line_to_write(monkeypatch):
    monkeypatch.setattr(exponent_operators, "KERNELS", [])
    with pytest.raises(KernelError, match=r"import commpass\.backend"):
        torch.ops.commpass.exponent_encode(X, "exponent", True)


def test_explicit_calls_in_compiled_code_have_few_nodes():
    """Inductor took 200 s for the plain operators of one explicit call."""
    seen = []

    def backend(gm, inputs):
        def count(traced, _):
            seen.append([str(node.target) for node in traced.graph.nodes])
            return traced

        return aot_module_simplified(gm, inputs, fw_compiler=count)

    gather = partial(commpass.all_gather, codec="exponent")
    torch.compile(gather, backend=backend, fullgraph=True)(X)
    (names,) = seen
    assert len(names) < 100
    assert "commpass.exponent_encode.default" in names
    assert "commpass.exponent_decode.default" in names


def test_shapes_are_asked_of_the_operators_alone():
    """Dynamo and AOTAutograd ask for shapes before they trace: 20 s for the plain operators."""
    coder, count = codec("exponent"), []
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, CountOperators(count):
        given = mode.from_tensor(X)
        wire = coder.encode_rows(given * 1)
        back = coder.decode_rows(wire, 256, torch.float32)
    assert (wire.shape, back.shape) == ((128, coder.wire_bytes(256, torch.float32)), X.shape)
    assert 0 < len(count) < 10


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda it: it.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_compiled_code_keeps_all_bits_in_any_mode(dtype, mode):
    coder = codec("exponent")
    for numel in (5, 200, 1500):
        given = rows(3, numel, dtype)

        def both(x, numel=numel):
            return coder.decode_rows(coder.encode_rows(x), numel, dtype)

        torch._dynamo.reset()
        with mode():
            back = torch.compile(both, backend="aot_eager", fullgraph=True)(given)
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), given.view(torch.uint8))


class CountOperators(TorchDispatchMode):
    def __init__(self, names: list[str]):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_shapes_are_those_that_torch_is_given():
    wire = torch.ops.commpass.exponent_encode(X, "exponent", False)
    torch.library.opcheck(torch.ops.commpass.exponent_encode.default, (X, "exponent", False))
    decode = torch.ops.commpass.exponent_decode.default
    torch.library.opcheck(decode, (wire, "exponent", 256, torch.float32, False))


def test_code_without_a_kernel_is_inline_where_a_compiler_fuses(monkeypatch):
    """Without compilation, the operators run one after the other anyway."""
    monkeypatch.setattr(exponent, "_has_kernel", lambda chain, device: False)
    calls = []

    def inline(coder, *given):
        calls.append(given)
        return torch.empty(0)

    monkeypatch.setattr(type(codec("exponent")), "encode_rows", inline)
    with exponent.as_calls(kernels=True):
        encode, _ = exponent_calls()
        encode(codec("exponent"), X)
    assert len(calls) == 1


def exponent_calls():
    from commpass.codecs.exponent.codec import _calls

    return _calls.get()
