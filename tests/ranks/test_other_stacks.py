"""The examples' integrations with other stacks, on real ranks.

They are Hugging Face's tensor parallelism, Trainer over DDP, and torchtitan's order of wrappers.
"""

from __future__ import annotations

import os
from argparse import Namespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commpass
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
INT8 = Policy(rules=[Rule(codec="int8", force=True)], skip=("chunk", "group", "simplify"))
TINY = Namespace(layers=1, width=64)


def next_byte(policies: list) -> list[tuple]:
    """Return loss, gradients and plans of a Hugging Face model that is sharded by its own plan, for
    each policy.

    The first entry is the whole model in float64.
    """
    from common import CONTEXT
    from torch.distributed.tensor import DTensor
    from train_hf import build

    text = torch.randint(0, 256, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    found = []
    torch.manual_seed(0)
    model = build(TINY)
    for policy in policies:
        torch._dynamo.reset()
        model.zero_grad()
        seen = len(commpass.plans())
        backend = commpass.backend(policy, inner="eager", strict=True)
        loss = torch.compile(model, backend=backend, fullgraph=True)(text)
        loss.backward()
        grads = {
            name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
            for name, each in model.named_parameters()
        }
        sites = [site for plan in commpass.plans()[seen:] for site in plan]
        found.append((loss.detach(), grads, sites))
    whole = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }
    alone = type(model)(type(model.llama)(model.llama.config)).double()
    alone.load_state_dict(whole)
    loss = alone(text)
    loss.backward()
    return [(loss.detach(), {n: p.grad for n, p in alone.named_parameters()}, []), *found]


def apart(one: dict, other: dict) -> float:
    """Return the norm of the difference of gradients, relative to the norm of the first ones."""
    norm = sum(x.double().square().sum() for x in one.values()).sqrt()
    difference = sum((one[n].double() - other[n].double()).square().sum() for n in one).sqrt()
    return float(difference / norm)


@pytest.mark.every
def test_model_by_its_own_tp_plan(ranks2):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers needs it to shard a model
    told = ranks2.run(next_byte, ["off", INT8])
    for mine, other in zip(told[0], told[1], strict=True):  # replicas
        assert torch.equal(mine[0], other[0])
    (exact, grads, _), (plain, plain_grads, kept), (coded, coded_grads, sites) = told[0]
    assert abs(plain - exact) < 1e-5
    assert apart(grads, plain_grads) < 1e-5
    assert abs(coded - exact) < 0.01
    assert 1e-4 < apart(grads, coded_grads) < 0.05
    assert not any(site.compressed for site in kept)
    assert {site.kind for site in sites} == {"all_reduce", "all_gather"}
    for site in sites:
        assert site.codec == "int8"
        assert site.wire_bytes < 0.3 * site.bytes
    modules = {site.module.removeprefix("llama.model.layers.0.") for site in sites}
    assert {"self_attn.o_proj", "mlp.down_proj", "llama.lm_head"} <= modules


def by_trainer(policies: list) -> list[tuple]:
    from train_trainer import train

    environment = {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "2"}
    found = []
    with mock.patch.dict(os.environ, environment):
        for policy in policies:
            losses, held_out, integration = train(policy, "ethernet-1g", 3, layers=1, width=64)
            sites = [site for plan in integration.plans for site in plan]
            found.append((losses, held_out, sites, integration.bytes))
    return found


@pytest.mark.every
def test_trainer_sends_gradients_by_the_policy(ranks2):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    policy = Policy(rules=[Rule(codec="int8", algorithm="one_shot", force=True)])
    told = ranks2.run(by_trainer, ["off", policy], timeout=280)
    (off, held_off, plain, _), (on, held_on, sites, sent) = told[0]
    assert on[0] == off[0]  # before any gradient
    assert on != off
    assert abs(held_on - held_off) < 0.02
    assert held_on == told[1][1][1]
    assert not any(site.compressed for site in plain)
    assert {(site.kind, site.codec) for site in sites} == {("all_reduce", "int8")}
    assert sent.plain == sum(site.bytes for site in plain)
    assert sent.sent == sum(site.wire_bytes for site in sites) < 0.3 * sent.plain


def as_torchtitan(policies: list) -> list[tuple]:
    from torch.distributed.device_mesh import init_device_mesh
    from train_titan import train

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for policy in policies:
        losses, held_out, plans, integration = train(policy, "ethernet-1g", mesh, 3, 1, 64, "eager")
        sites = [site for plan in plans for site in plan]
        found.append((losses, held_out, sites, integration.bytes))
    return found


@pytest.mark.every
def test_blocks_compiled_apart_within_fsdp2(ranks4):
    told = ranks4.run(as_torchtitan, ["off", INT8], timeout=280)
    (off, held_off, _, plain), (on, held_on, sites, sent) = told[0]
    assert held_on == told[3][1][1]
    assert abs(on[0] - off[0]) < 0.01
    assert on != off
    assert abs(held_on - held_off) < 0.02
    kinds = {(site.kind, site.group_label) for site in sites if site.compressed}
    assert kinds == {("all_reduce", "tp"), ("all_gather", "dp"), ("reduce_scatter", "dp")}
    for kind in ("all_gather", "reduce_scatter"):
        assert sent[kind].plain == plain[kind].plain == plain[kind].sent
        assert sent[kind].sent < 0.3 * sent[kind].plain
