"""Whole models on real ranks, through torch.compile: training and inference, meshes, dynamic
shapes, checkpointing."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from rank_helpers import is_same_on_all_ranks
from tiers import rarely
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpass
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional
FORCED = Policy(rules=[Rule(codec="int8", force=True)])


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 48, depth: int = 2):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tensor_parallel(mesh, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def step(model, x) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and local gradients of one step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    local = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    return out.detach(), [x.grad, *local]


def digest(tensors) -> str:
    return hashlib.sha256(
        b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)
    ).hexdigest()


def close(a, b, share: float) -> bool:
    return bool((a - b).norm() <= share * b.norm())


def train(inner) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tensor_parallel(mesh)
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
    plain_out, plain_grads = step(model, x)
    seen = len(commpass.plans())
    out, grads = step(
        torch.compile(
            model, backend=commpass.backend(FORCED, inner=inner, strict=True), fullgraph=True
        ),
        x,
    )
    forward, backward = commpass.plans()[seen:]
    assert [site.codec for site in (*forward, *backward)] == ["int8"] * 4
    assert [site.module for site in forward] == ["layers.0.down", "layers.1.down"]
    assert [site.module for site in backward] == ["layers.1.up", "layers.0.up"]
    for site in forward:  # meshes of earlier tests may share the group of all ranks
        assert {"tp", "world"} <= set(site.group_labels)
    assert not torch.equal(out, plain_out)  # it was really compressed
    assert close(out, plain_out, 0.01)
    for got, expected in zip(grads, plain_grads, strict=True):
        assert close(got, expected, 0.03)
    assert is_same_on_all_ranks(digest([out, grads[0]]))
    return [digest([out, grads[0]])]


@pytest.mark.every
@pytest.mark.parametrize(("size", "inner"), [(2, "inductor"), rarely(3, "inductor")])
def test_tensor_parallel_model_trains_with_replicas_bit_equal(size, inner, request):
    request.getfixturevalue(f"ranks{size}").run(train, inner)


@pytest.mark.every
def test_every_inner_compiler_gives_the_same_numbers(ranks2):
    results = [ranks2.run(train, inner)[0] for inner in ("eager", "aot_eager")]
    results.append(ranks2.run(train_with_function)[0])
    assert results[1] == results[2]


def graph_itself(gm, example_inputs):
    return gm


def train_with_function() -> list[str]:
    return train(graph_itself)


def infer_with_one_dynamic_graph(inner: str) -> None:
    size = dist.get_world_size()
    group = dist.group.WORLD.group_name

    def function(x):
        y = ops.wait_tensor(ops.all_reduce(x * 2, "sum", group))
        z = ops.wait_tensor(ops.all_gather_into_tensor(y.sin(), size, group))
        return ops.wait_tensor(ops.reduce_scatter_tensor(z * 3, "avg", size, group))

    for codec in ("rotated",):
        torch._dynamo.reset()
        policy = Policy(rules=[Rule(codec=codec, force=True)])
        compiled = torch.compile(
            function,
            backend=commpass.backend(policy, inner=inner, strict=True),
            dynamic=True,
            fullgraph=True,
        )
        seen = len(commpass.plans())
        with torch.no_grad():
            for number, rows in enumerate((40, 57, 257, 32, 40, 6)):
                if (
                    number == 5
                ):  # fewer values than a block: torch specialises sizes of 1, blocks included
                    assert len(commpass.plans()) == seen + 1, "one graph serves all sizes"
                x = torch.randn(rows, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
                got, expected = compiled(x), function(x)
                assert got.shape == expected.shape
                assert close(got, expected, 0.03), (codec, rows)
        assert len(commpass.plans()) == seen + 2
        assert all(site.dynamic and site.compressed for site in commpass.plans()[-1])


@pytest.mark.every
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_one_dynamic_graph_is_right_at_every_size(inner, ranks2):
    ranks2.run(infer_with_one_dynamic_graph, inner)


class Checkpointed(Net):
    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(
                lambda x, layer=layer: layer(x).sin(), x, use_reentrant=False
            )
        return x


def checkpointed() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tensor_parallel(mesh)
    model.__class__ = Checkpointed
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
    plain_out, plain_grads = step(model, x)
    seen = len(commpass.plans())
    compiled = torch.compile(model, backend=commpass.backend(FORCED, inner="eager", strict=True))
    out, grads = step(compiled, x)
    _forward, backward = commpass.plans()[seen:]
    assert len(backward.compressed) == 4  # the forward's two again, and two of its own
    assert close(out, plain_out, 0.01)
    for got, expected in zip(grads, plain_grads, strict=True):
        assert close(got, expected, 0.03)
    again, grads_again = step(compiled, x)
    assert torch.equal(out, again)  # recomputation gives the same bits (law 4)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


@pytest.mark.slow
def test_activation_checkpointing(ranks2):
    ranks2.run(checkpointed)


def mesh_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    data = mesh["dp"].get_group().group_name
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return ops.wait_tensor(ops.all_reduce(self.net(x), "avg", data))

    averaged = Averaged()
    with torch.no_grad():
        plain = averaged(x)
        policy = Policy(
            rules=[
                Rule(group="tp", codec="int8", force=True),
                Rule(group="dp", codec="fp8", force=True),
            ]
        )
        seen = len(commpass.plans())
        got = torch.compile(averaged, backend=commpass.backend(policy, inner="eager", strict=True))(
            x
        )
    assert [(s.group_label, s.codec) for s in commpass.plans()[seen]] == [
        ("tp", "int8"),
        ("tp", "int8"),
        ("dp", "fp8"),
    ]
    assert close(got, plain, 0.05)
    assert is_same_on_all_ranks(digest([got]))


@pytest.mark.slow
def test_several_groups_of_a_mesh_in_one_model(ranks4):
    ranks4.run(mesh_of_two_dimensions)


def two_backends() -> None:
    torch.manual_seed(0)
    group = dist.group.WORLD.group_name
    results = []
    for codec in ("int8", "int4"):
        policy = Policy(name=codec, rules=[Rule(codec=codec, force=True)])
        results.append(
            torch.compile(
                lambda x: ops.wait_tensor(ops.all_reduce(x * 2, "sum", group)),
                backend=commpass.backend(policy, inner="eager", strict=True),
            )
        )
    x = torch.randn(2000)
    exact = x * 2 * dist.get_world_size()
    errors = [((f(x) - exact).norm() / exact.norm()).item() for f in (*results, *results)]
    assert errors[0] == errors[2] < 0.02 < errors[1] == errors[3]


@pytest.mark.slow
def test_two_backends_live_in_one_process(ranks2):
    ranks2.run(two_backends)


FORMS = {
    "coalesced": lambda x, g, w: [
        ops.wait_tensor(y) * 2 for y in ops.all_reduce_coalesced([x, x + 1], "sum", g)
    ],
    "several waits": lambda x, g, w: _several_waits(ops.all_reduce(x * 3, "sum", g)),
    "transposed": lambda x, g, w: [
        ops.wait_tensor(ops.all_reduce((x * 2).t(), "sum", g)).reshape(-1) + 1
    ],
    "in place": lambda x, g, w: [_in_place(x)],
    "avg of scatter": lambda x, g, w: [ops.wait_tensor(ops.reduce_scatter_tensor(x, "avg", w, g))],
    "scaled": lambda x, g, w: [ops.wait_tensor(ops.all_reduce(x / w, "sum", g)) / w],
}


def _several_waits(started):
    return [ops.wait_tensor(started) + 1, ops.wait_tensor(ops.wait_tensor(started)) * 2]


def _in_place(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def forms(inner: str) -> None:
    size, group = dist.get_world_size(), dist.group.WORLD.group_name
    x = torch.randn(size * 8, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    for name, function in FORMS.items():
        torch._dynamo.reset()
        compiled = torch.compile(
            function, backend=commpass.backend(FORCED, inner=inner, strict=True), fullgraph=True
        )
        with torch.no_grad():
            got, expected = compiled(x, group, size), function(x, group, size)
        assert commpass.plans()[-1].compressed, name
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape, name
            assert close(a, b, 0.02), (name, inner)


@pytest.mark.every
@pytest.mark.parametrize("inner", ["eager", rarely("inductor")])
def test_every_form_gives_the_numbers_of_the_plain_one(inner, ranks2):
    ranks2.run(forms, inner)


def on_the_wire(inner: str) -> None:
    """Law 9 end to end: a compiled model passes to the process group what its plan states."""
    from counting import counting_group

    group = counting_group()
    size, name = dist.get_world_size(), group.group_name
    mixed = Policy(
        rules=[
            Rule(codec="int8", kind="all_reduce", force=True),
            Rule(codec="fp8", kind="all_gather", force=True),
        ]
    )

    def function(x):
        y = ops.wait_tensor(ops.all_reduce(x * 2, "sum", name))
        z = ops.wait_tensor(ops.all_gather_into_tensor(y.bfloat16(), size, name))
        return ops.wait_tensor(ops.reduce_scatter_tensor(z.float(), "sum", size, name))

    with torch.no_grad():
        compiled = torch.compile(
            function, backend=commpass.backend(mixed, inner=inner, strict=True), fullgraph=True
        )
        compiled(torch.ones(33, 50))
        group.seen.clear()
        compiled(torch.ones(33, 50))
    plan = commpass.plans()[-1]
    assert [site.codec for site in plan] == ["int8", "fp8", "none"]
    assert sum(size for _, _, size in group.seen) == sum(site.wire_bytes for site in plan)
    compressed = [size for _, dtype, size in group.seen if dtype == torch.uint8]
    assert sum(compressed) == sum(site.wire_bytes for site in plan.compressed)
    assert [(dtype, size) for _, dtype, size in group.seen if dtype != torch.uint8] == [
        (torch.float32, plan.sites[2].bytes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", rarely("inductor")])
def test_bytes_of_a_compiled_model_are_those_of_its_plan(inner, ranks2):
    ranks2.run(on_the_wire, inner)


def lossless() -> None:
    """Law 3: under the default policy every bit is that of the plain model, including NaN payloads
    and -0.0."""
    group = dist.group.WORLD.group_name
    size = dist.get_world_size()

    def function(x):
        return ops.wait_tensor(ops.all_gather_into_tensor(x.clone(), size, group))

    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32)
    bits[:3] = torch.tensor([0x7F800001, -0x80000000, 0x7FC12345 - 2**31], dtype=torch.int64).to(
        torch.int32
    )
    with torch.no_grad():
        got = torch.compile(function, backend=commpass.backend(strict=True))(
            bits.view(torch.float32)
        )
        assert torch.equal(
            got.view(torch.int32), function(bits.view(torch.float32)).view(torch.int32)
        )


def test_default_policy_is_bit_exact(ranks2):
    ranks2.run(lossless)
