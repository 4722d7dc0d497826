"""discover: every form of a functional collective, and its relevant properties."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from graphs import ops, trace
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.passes.discover import discover

X = torch.ones(8, 16)
wait = ops.wait_tensor


def sites(function, *inputs):
    return [found.site for found in discover(trace(function, *(inputs or (X,))))]


PLAIN = {
    "all_reduce": lambda x: wait(ops.all_reduce(x * 2, "sum", "0")),
    "all_gather": lambda x: wait(ops.all_gather_into_tensor(x * 2, 8, "0")),
    "reduce_scatter": lambda x: wait(ops.reduce_scatter_tensor(x * 2, "avg", 8, "0")),
    "all_to_all": lambda x: wait(ops.all_to_all_single(x * 2, [1] * 8, [1] * 8, "0")),
    "broadcast": lambda x: wait(ops.broadcast(x * 2, 0, "0")),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_forms(kind, fake_group):
    fake_group(8)
    (site,) = sites(PLAIN[kind])
    assert (
        site.kind,
        site.group,
        site.group_size,
        site.dtype,
        site.shape,
        site.bytes,
        site.unsupported_reason,
    ) == (
        kind,
        "0",
        8,
        "float32",
        (8, 16),
        512,
        None,
    )
    assert site.reduce_op == {"all_reduce": "sum", "reduce_scatter": "avg"}.get(kind)


def test_numbers_without_a_dimension_stay_uncompressed_where_rows_are_needed(fake_group):
    fake_group(8)
    rules = [commpass.Rule(codec="int8", force=True, max_error=1.0)]
    for kind in ("all_gather", "all_reduce", "broadcast"):
        gm = trace(PLAIN[kind], torch.ones(()))
        plan = commpass.rewrite(gm, [torch.ones(())], commpass.Policy(rules=rules))
        (site,) = plan.sites
        assert not plan.fallback
        assert "failed" not in site.reason
        assert (site.codec == "none") == (kind == "all_gather")
        assert ("without a dimension" in site.reason) == (kind == "all_gather")


@pytest.mark.parametrize(
    "collective",
    [
        lambda xs: ops.all_reduce_coalesced(xs, "sum", "0"),
        lambda xs: ops.all_gather_into_tensor_coalesced(xs, 8, "0"),
        lambda xs: ops.reduce_scatter_tensor_coalesced(xs, "sum", 8, "0"),
    ],
)
def test_coalesced_forms_are_a_site_for_each_tensor(collective, fake_group):
    fake_group(8)
    found = sites(lambda x: [wait(y) for y in collective([x * 2, (x + 1).bfloat16()])])
    assert [(site.dtype, site.bytes, site.unsupported_reason) for site in found] == [
        ("float32", 512, None),
        ("bfloat16", 256, None),
    ]
    assert len({site.name for site in found}) == 2


def test_forms_in_place_and_out(fake_group):
    fake_group(8)

    def function(x, out):
        y = wait(ops.all_reduce_(x * 2, "sum", "0"))
        return y, wait(ops.all_gather_into_tensor_out(x, 8, "0", out=out))

    found = sites(function, X, torch.ones(64, 16))
    assert [(site.kind, site.unsupported_reason) for site in found] == [
        ("all_reduce", None),
        ("all_gather", None),
    ]


def test_several_waits_and_waits_on_waits(fake_group):
    fake_group(8)

    def function(x):
        started = ops.all_reduce(x * 2, "sum", "0")
        return wait(started) + 1, wait(wait(started)) * 2

    found = discover(trace(function, X))
    assert len(found) == 1
    assert len(found[0].outputs) == 2
    assert found[0].site.unsupported_reason is None


def test_result_taken_before_its_wait_or_never_waited_for_has_an_unsupported_reason(fake_group):
    fake_group(8)
    (early,) = sites(lambda x: ops.all_reduce(x * 2, "sum", "0") + 1)
    assert "before it is waited for" in early.unsupported_reason
    (never,) = sites(lambda x: (ops.all_reduce(x * 2, "sum", "0"), x)[1])
    assert "nobody waits" in never.unsupported_reason


def test_autograd_and_deprecated_forms_are_seen_and_left_alone(fake_group):
    fake_group(8)
    graph = fx.Graph()
    x = graph.placeholder("x")
    autograd = graph.call_function(
        torch.ops._c10d_functional_autograd.all_gather_into_tensor.default, (x, 8, "0")
    )
    legacy = graph.call_function(
        torch.ops.c10d_functional.all_reduce.default, (x, "sum", "", list(range(8)), 8)
    )
    graph.output((autograd, legacy))
    found = discover(fx.GraphModule({}, graph))
    assert "gradient would be lost" in found[0].site.unsupported_reason
    assert "deprecated" in found[1].site.unsupported_reason


def test_mesh_dimension_is_the_label_of_a_group(fake_group):
    fake_group(8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    found = sites(
        lambda x: [
            wait(ops.all_reduce(x, "sum", mesh.get_group(name).group_name)) for name in ("dp", "tp")
        ]
    )
    assert [(site.group_label, site.group_size) for site in found] == [("dp", 2), ("tp", 4)]


def test_group_that_is_not_here_has_an_unsupported_reason_where_its_size_matters(fake_group):
    fake_group(8)
    gm = trace(lambda x: wait(ops.all_reduce(x, "sum", "0")), X)
    dist.destroy_process_group()
    assert "size of group '0' is not known" in discover(gm)[0].site.unsupported_reason


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return wait(ops.all_reduce(self.up(x), "sum", "0"))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(
            lambda x: self.inner(x).sin().cos(), x, use_reentrant=False
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Checkpointed()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return wait(ops.all_reduce(x, "sum", "0")).sin()


def test_module_paths_in_forward_backward_and_recomputation(fake_group):
    fake_group(8)
    seen = len(commpass.plans())
    torch.compile(Model(), backend=commpass.backend("off", inner="aot_eager", strict=True))(
        X.clone().requires_grad_()
    ).sum().backward()
    forward, backward = commpass.plans()[seen:]
    assert [site.module for site in forward] == ["layers.0", "layers.1.inner", ""]
    assert sorted(site.module for site in backward) == [
        "",
        "layers.0",
        "layers.1.inner",
        "layers.1.inner",
    ]  # one again
    assert {site.direction for site in forward} == {"forward"}
    again = [site for site in backward if site.direction == "forward"]
    assert [site.module for site in again] == ["layers.1.inner"]
    assert {site.direction for site in backward if site not in again} == {"backward"}


def test_nested_compile_regions_are_searched(fake_group):
    fake_group(8)

    @torch.compiler.nested_compile_region
    def region(x):
        return wait(ops.all_reduce(x.sin() * 2, "sum", "0")) + 1

    seen = len(commpass.plans())
    with torch.no_grad():
        torch.compile(
            lambda x: region(region(x)),
            backend=commpass.backend("off", strict=True),
            fullgraph=True,
        )(X)
    assert [site.kind for site in commpass.plans()[seen]] == ["all_reduce"]


def test_symbolic_sizes_stand_as_text_with_the_bytes_of_their_hints(fake_group):
    fake_group(8)
    seen = len(commpass.plans())
    compiled = torch.compile(
        PLAIN["all_reduce"], backend=commpass.backend("off", strict=True), dynamic=True
    )
    compiled(X)
    (site,) = commpass.plans()[seen].sites
    assert site.dynamic
    assert all(isinstance(size, str) for size in site.shape)
    assert site.bytes == 512


def test_group_given_as_an_object(fake_group):
    group = fake_group(8)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = trace(lambda x: x + 1, X).graph.find_nodes(op="placeholder")[0].meta["val"]
    name = graph.call_function(lambda: group)
    name.meta["val"] = group
    started = graph.call_function(ops.all_reduce.default, (x, "sum", name))
    graph.output(graph.call_function(ops.wait_tensor.default, (started,)))
    (found,) = discover(fx.GraphModule({}, graph))
    assert (found.site.group, found.site.group_size, found.site.unsupported_reason) == (
        group.group_name,
        8,
        None,
    )
