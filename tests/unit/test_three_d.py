"""The three-dimensional presets: each kind of site of each role gets its codec, and no other site
gets any."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from deciding import decide
from refusals import refusals
from tiers import has_messages
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.codecs import codec
from commpass.costmodel import Link, Profile
from commpass.plan import NONE, PlannedSite, Site
from commpass.policy import PRESETS, Policy, policy_named
from commpass.policy.presets import DIMENSIONS, THREE_D
from commpass.policy.rules import Rule

HOSTS = Profile("hosts", Link(60.0, 0.01), ranks_per_host=4, intra_host_link=Link(8.0, 200.0))
CODED = {
    "taco-3d": ("taco", "difference(inner=sdp4bit(part=weight))", "sdp4bit(bits=8)", "tahquant"),
    "balanced-3d": (
        "rotated",
        "difference(inner=rotated(bits=4, block=2048))",
        "rotated",
        "tahquant(form=companded)",
    ),
}
"""Codecs of layers' sums, weights, gradients, and what is sent between stages."""
OUR_SIX = "rotated(bits=6, block=32, scale=lsq)"
NAMES = {
    "tp": ("tp", "tensor", "tensor_parallel", "model", "mp"),
    "dp": ("dp", "dp_shard", "dp_replicate", "dp_shard_cp", "fsdp", "efsdp", "data", "shard"),
    "pp": ("pp", "pipe", "pipeline", "stage"),
}
OTHERS = ("cp", "ep", "sp", "world", "")


def planned(policy: str | Policy, kind: str, direction: str, label: str, **more) -> PlannedSite:
    numel = 1 << 22
    site = Site(
        name="site",
        kind=kind,
        reduce_op="sum" if "reduce" in kind else None,
        group="7",
        group_label=label,
        group_size=more.pop("ranks", 8),
        dtype="bfloat16",
        shape=(numel,),
        bytes=2 * numel,
        direction=direction,
        peer=1 if kind in ("send", "recv") else None,
        stateless=more.pop("stateless", None),
    )
    (found,) = decide([site], policy_named(policy), more.pop("profile", HOSTS))
    return found


@has_messages
@pytest.mark.parametrize("preset", CODED)
def test_each_role_gets_its_own_codecs(preset):
    sums, weights, gradients, stages = CODED[preset]
    for label in NAMES["tp"]:
        for direction in ("forward", "backward"):
            for kind in ("all_reduce", "all_gather", "reduce_scatter"):
                assert planned(preset, kind, direction, label).codec == sums
    for label in NAMES["dp"]:
        assert planned(preset, "all_gather", "forward", label).codec == weights
        for kind in ("all_reduce", "reduce_scatter"):
            found = planned(preset, kind, "backward", label)
            between = "sdp4bit" if preset == "taco-3d" else "rotated(bits=4)"
            assert found.codec == gradients
            assert found.algorithm == f"hierarchical(between={between}, node=4)"
    back = "int6(block=32, stored=bf16)" if preset == "taco-3d" else OUR_SIX
    for label in NAMES["pp"]:
        for kind in ("send", "recv"):
            assert planned(preset, kind, "forward", label).codec == stages
            assert planned(preset, kind, "backward", label).codec == back


@has_messages
@pytest.mark.parametrize("preset", CODED)
def test_nothing_else_is_touched(preset):
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv")
    for label in OTHERS:
        for kind in kinds:
            for direction in ("forward", "backward"):
                assert planned(preset, kind, direction, label).codec == NONE
    for role, names in NAMES.items():
        for label in names:
            assert planned(preset, "all_to_all", "backward", label).codec == NONE
            assert (planned(preset, "send", "forward", label).codec == NONE) == (role != "pp")
        assert not planned(preset, "broadcast", "forward", names[0]).compressed
    assert planned(preset, "reduce_scatter", "forward", "dp").codec == NONE
    assert planned(preset, "all_gather", "backward", "dp").codec == NONE
    activation = planned(preset, "all_gather", "forward", "dp", stateless="an activation")
    assert activation.codec == NONE
    assert "an activation" in activation.reason


@has_messages
def test_ours_sends_no_more_and_loses_less_at_each_site():
    sites = [
        ("all_reduce", "forward", "tp"),
        ("all_gather", "forward", "tp"),
        ("reduce_scatter", "backward", "tp"),
        ("all_gather", "forward", "dp"),
        ("reduce_scatter", "backward", "dp"),
        ("all_reduce", "backward", "dp"),
        ("send", "forward", "pp"),
    ]
    for profile in (HOSTS, dataclasses.replace(HOSTS, ranks_per_host=0, intra_host_link=None)):
        for one in sites:
            theirs, ours = (planned(name, *one, profile=profile) for name in THREE_D)
            assert ours.error < 0.95 * theirs.error, one
            assert ours.algorithm.partition("(")[0] == theirs.algorithm.partition("(")[0], one
            assert ours.wire_bytes <= theirs.wire_bytes, one
    theirs, ours = (planned(name, "send", "backward", "pp") for name in THREE_D)
    assert ours.wire_bytes <= theirs.wire_bytes
    assert ours.error < theirs.error  # on a Gaussian; by more on gradients: benchmarks/three_d.py


def test_companded_form_has_the_wire_of_the_published_one():
    ours, theirs = codec("tahquant(form=companded)"), codec("tahquant")
    assert ours.wire_bytes(4096, torch.float32) == theirs.wire_bytes(4096, torch.float32)
    assert ours.relative_error() < 0.95 * theirs.relative_error()
    assert "form" in refusals(lambda: codec("tahquant(form=fp8)"))[0]


def test_mesh_with_other_names_is_reported(fake_group):
    fake_group(8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("x", "model", "z"))
    policy = Policy.for_mesh("taco-3d", tp="x", dp=("model", "z"), pp=())
    assert planned(policy, "all_reduce", "forward", "x").codec == "taco"
    # Explicit names take precedence over the usual names of other dimensions.
    assert planned(policy, "all_reduce", "backward", "model").codec == "sdp4bit(bits=8)"
    assert planned(policy, "all_gather", "forward", "z").codec == CODED["taco-3d"][1]
    assert planned(policy, "all_reduce", "forward", "tp").codec == NONE
    assert planned(policy, "send", "forward", "pp").codec == NONE
    one = Policy.for_mesh("balanced-3d", dp="world")
    assert planned(one, "all_reduce", "backward", "world").codec == "rotated"
    assert planned(one, "all_reduce", "forward", "tp").codec == "rotated"
    assert planned(one, "all_reduce", "backward", "dp").codec == NONE
    kept = Rule(module="head", keep=True)
    more = Policy.for_mesh("taco-3d", tp="x", rules=[kept], max_error=0.3)
    assert more.rules[0] == kept
    assert more.max_error == 0.3
    assert len(more.rules) == 1 + sum(map(len, THREE_D["taco-3d"].values()))
    unknown, both, plain, no_role = refusals(
        lambda: Policy.for_mesh("taco-3d", tp="modle"),
        lambda: Policy.for_mesh("taco-3d", tp="x", dp="x"),
        lambda: Policy.for_mesh("taco", tp="x"),
        lambda: Policy.for_mesh("taco-3d", ddp="x"),
    )
    assert "tp='modle'" in unknown
    known = unknown.partition("did you mean 'model'? Known: ")[2].rstrip(".").split(", ")
    assert {"model", "world", "x", "z"} <= set(known)  # and those of meshes not yet collected
    assert "'x' is both tp and dp" in both
    assert "did you mean 'taco-3d'" in plain
    assert "no role or field 'ddp'; did you mean 'dp'?" in no_role
    assert "make the mesh first" in unknown
    del mesh


def test_preset_survives_its_file(tmp_path):
    for name in THREE_D:
        path = tmp_path / f"{name}.toml"
        path.write_text(PRESETS[name].to_toml())
        assert Policy.from_toml(path) == PRESETS[name]
    (said,) = refusals(lambda: Rule(group=[]))
    assert "must name a dimension" in said
    assert Rule(group=["a", "b"]).group == ("a", "b")
    assert set(DIMENSIONS) == set(NAMES)


@pytest.mark.slow
def test_graph_of_two_dimensions_gets_both(fake_group):
    fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ops = torch.ops._c10d_functional

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(128, 512))

        def forward(self, x):
            dp, tp = (mesh.get_group(name).group_name for name in ("dp", "tp"))
            whole = ops.wait_tensor(ops.all_gather_into_tensor(self.weight, 2, dp))
            return ops.wait_tensor(ops.all_reduce(x @ whole, "sum", tp))

    torch._dynamo.reset()
    backend = commpass.backend(
        "balanced-3d", inner="aot_eager", strict=True, profile=Profile("slow", Link(60.0, 1e-4))
    )
    seen = len(commpass.plans())
    with torch.enable_grad():
        torch.compile(Net(), backend=backend)(torch.ones(64, 256))
    forward = commpass.plans()[seen]
    assert [(s.kind, s.group_label, s.codec) for s in forward] == [
        ("all_gather", "dp", CODED["balanced-3d"][1]),
        ("all_reduce", "tp", "rotated"),
    ]
    assert dist.get_world_size() == 4
