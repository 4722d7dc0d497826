"""Pieces for torch-tensorrt, which cannot be installed everywhere.

A stand-in accepts the same arguments, compiles in the same way (torch-tensorrt 2.14), and runs with
PyTorch.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import fx

import commpass
from commpass.errors import PolicyError
from commpass.passes.fx.parse import is_wait, parse
from commpass.policy import Policy
from commpass.policy.rules import Rule
from commpass.tensorrt import Engines, cut

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
INT8 = Policy(rules=[Rule(codec="int8", algorithm="one_shot", force=True)], skip="chunk")
NAMES = ("torch_tensorrt", "torch_tensorrt.dynamo", "torch_tensorrt.dynamo.backend")


class StandIn:
    """``torch_tensorrt.dynamo.backend``, which records its arguments.

    On several ranks the real one calls AOTAutograd once more, and so does this.
    """

    def __init__(self):
        self.calls: list[tuple[list[str], dict]] = []

    def torch_tensorrt_backend(self, gm, sample_inputs, **kwargs):
        from torch._dynamo.backends.common import aot_autograd

        assert all(isinstance(x, torch._subclasses.FakeTensor) for x in sample_inputs)
        assert isinstance(gm.graph.output_node().args[0], (tuple, list))
        for node in gm.graph.nodes:
            assert parse(node) is None
            assert not is_wait(node)
            assert getattr(node.target, "namespace", "aten") == "aten"
        targets = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
        self.calls.append((targets, kwargs))
        return aot_autograd(fw_compiler=lambda piece, _: piece.forward)(gm, sample_inputs)

    def install(self) -> None:
        for name in NAMES:
            sys.modules[name] = ModuleType(name)
        sys.modules[NAMES[-1]].torch_tensorrt_backend = self.torch_tensorrt_backend


@pytest.fixture
def stand_in(monkeypatch):
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = StandIn()
    found.install()
    yield found
    for name in NAMES:
        sys.modules.pop(name, None)


def layer(x, weight, norm):
    summed = ops.wait_tensor(ops.all_reduce(x @ weight, "sum", dist.group.WORLD.group_name))
    return torch.nn.functional.rms_norm(summed + x, (256,), norm) @ weight


def inputs(rank: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    weight, norm = torch.randn(256, 256, generator=generator) / 16, torch.ones(256)
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)), weight, norm


def served() -> tuple:
    """Return the compressed sum and what is computed from it, with engines and with PyTorch
    only."""
    found = StandIn()
    found.install()
    try:
        given = inputs(dist.get_rank())
        seen = len(commpass.plans())
        results = []
        for inner in ("tensorrt", "aot_eager"):
            torch._dynamo.reset()
            backend = commpass.backend(INT8, inner=inner, strict=True)
            with torch.inference_mode():
                results.append(torch.compile(layer, backend=backend, fullgraph=True)(*given))
        return results, found.calls, commpass.plans()[seen]
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.mark.slow
def test_engines_get_what_is_computed_and_nothing_that_is_sent(ranks2):
    told = ranks2.run(served)
    (by_engines, by_torch), calls, plan = told[0]
    assert torch.allclose(by_engines, by_torch, rtol=1e-5, atol=1e-5)
    assert [kwargs for _, kwargs in calls] == [{"options": {}}, {"options": {}}]
    assert calls[0][0] == ["aten.mm.default"]
    assert calls[1][0][0] == "aten.add.Tensor"
    assert calls[1][0][-1] == "aten.mm.default"
    [site] = plan
    numel = 64 * 256
    assert (site.codec, site.bytes, site.wire_bytes) == (
        "int8",
        4 * numel,
        numel + 4 * numel // 256,
    )
    # from the formula: the sum of the inputs of two ranks, each rounded to a step of its block
    xs, weight, norm = [inputs(rank)[0].double() for rank in range(2)], *inputs(0)[1:]
    summed = sum(x @ weight.double() for x in xs)
    plain = torch.nn.functional.rms_norm(summed + xs[0], (256,), norm.double()) @ weight.double()
    assert ((by_engines - plain).norm() / plain.norm()).item() < 0.02
    assert not torch.allclose(by_engines.double(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.every
def test_settings_go_to_torch_tensorrt(fake_group, stand_in):
    fake_group(2)
    backend = commpass.backend("off", inner=Engines(min_block_size=1, use_fp32_acc=True))
    with torch.inference_mode():
        torch.compile(layer, backend=backend, fullgraph=True)(*inputs(0))
    assert [kwargs["options"] for _, kwargs in stand_in.calls] == [
        {"min_block_size": 1, "use_fp32_acc": True}
    ] * 2


def test_training_is_refused(fake_group, stand_in):
    fake_group(2)
    x, weight, norm = inputs(0)
    compiled = torch.compile(layer, backend=commpass.backend(INT8, inner="tensorrt"))
    with pytest.raises(Exception, match=r"inference only.*torch.inference_mode\(\)"):
        compiled(x, weight.requires_grad_(), norm)
    assert stand_in.calls == []


def test_error_without_torch_tensorrt_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(PolicyError, match=r"needs torch-tensorrt.*pip install 'commpass\[tensorrt"):
        commpass.backend("balanced", inner="tensorrt")
    with pytest.raises(PolicyError, match="'tensorrt'"):
        commpass.backend("balanced", inner="tensort")


def test_writes_keep_their_place(fake_group):
    """A piece is moved to the front as far as possible, but not across a write to its inputs."""
    fake_group(2)
    graph = fx.Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    before = graph.call_function(torch.ops.aten.neg.default, (state,))
    started = graph.call_function(ops.all_reduce.default, (x, "sum", "0"))
    summed = graph.call_function(ops.wait_tensor.default, (started,))
    graph.call_function(torch.ops.aten.copy_.default, (state, summed))
    after = graph.call_function(torch.ops.aten.neg.default, (state,))
    graph.output((before, after, summed))
    pieces = cut(fx.GraphModule(torch.nn.Module(), graph))
    names = [node.target for node in pieces.graph.nodes if node.op == "call_module"]
    assert names == ["engine_0", "outside_0", "engine_1"]
    before, after, summed = pieces(torch.ones(2), state := torch.zeros(2))
    assert before.tolist() == [0, 0]
    assert torch.equal(after, -summed)
    assert torch.equal(state, summed)


def test_error_without_the_libraries_of_tensorrt_names_them(monkeypatch, tmp_path):
    """As torch-tensorrt 2.13 raises it where it is installed alone."""
    (tmp_path / "torch_tensorrt").mkdir()
    text = "raise Exception('Could not find libnvinfer.so.11')\n"
    (tmp_path / "torch_tensorrt" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_tensorrt", raising=False)
    monkeypatch.delitem(sys.modules, "torch_tensorrt.dynamo.backend", raising=False)
    with pytest.raises(PolicyError, match=r"cannot be imported here \(Could not find libnvinfer"):
        commpass.backend("balanced", inner="tensorrt")
