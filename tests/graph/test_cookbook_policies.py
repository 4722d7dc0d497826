"""The policies of docs/cookbook.md do what the page says, in a model with all of its parts."""

from __future__ import annotations

import pytest
import torch
from doc_blocks import block_under, blocks_of
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.plan import NONE
from commpass.policy import Policy

PAGE = "docs/cookbook.md"
ROWS, WIDTH = 4096, 64


class Gather(nn.Module):
    """A gather over two ranks in forward, and a reduce_scatter in backward."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        first, second = all_gather_tensor_autograd(x, 0, self.group).chunk(2)
        return first * second


class Mixture(nn.Module):
    """A router that gathers its scores, and experts that receive tokens."""

    def __init__(self, tensor, experts):
        super().__init__()
        self.router, self.experts = Gather(tensor), experts

    def forward(self, x):
        scores = torch.softmax(self.router(x), -1)
        return all_to_all_single_autograd(x * scores, None, None, self.experts)


class Layer(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.attn = Gather(mesh["tp"])
        self.moe = Mixture(mesh["tp"], mesh.get_group("ep"))
        self.shard = Gather(mesh["dp"])

    def forward(self, x):
        return self.moe(torch.tanh(self.attn(x))) + torch.tanh(self.shard(x))


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed_tokens = Gather(mesh["tp"])
        self.layers = nn.ModuleList([Layer(mesh)])
        self.lm_head = Gather(mesh["tp"])

    def forward(self, x):
        return self.lm_head(torch.sin(self.layers[0](torch.sin(self.embed_tokens(x)))))


@pytest.fixture
def mesh(fake_group):
    fake_group(8)
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))


def policy_under(heading: str) -> Policy:
    """Return the policy that the block of Python under a heading makes."""
    names = {"commpass": commpass}
    exec(block_under(PAGE, heading), names)
    return names["policy"]


def plans_under(policy, mesh):
    """Return the plans of a training step of the model, forward and backward."""
    torch._dynamo.reset()
    earlier = len(commpass.plans())
    backend = commpass.backend(policy, profile="ethernet-0.1g", inner="aot_eager", strict=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.compile(Model(mesh), backend=backend)(x).sum().backward()
    return commpass.plans()[earlier:]


def codecs(plans, **wanted) -> set[str]:
    """Return the codecs of the sites with these properties; at least one has them."""
    sites = [site for plan in plans for site in plan]
    found = [
        site
        for site in sites
        if all(value in (getattr(site, name) or "") for name, value in wanted.items())
    ]
    assert found, (wanted, [(s.module, s.kind, s.group_label) for s in sites])
    return {site.codec for site in found}


def check_rules(policy, plans):
    """Each rule of the page matches a collective of the model."""
    matched = {number for plan in plans for number in plan.matched}
    written = len(policy.rules) - len(Policy.from_preset("balanced").rules)
    assert matched >= set(range(max(written, 1)))


def test_every_policy_of_the_page_is_tried_here():
    headings = [title for title, text in blocks_of(PAGE, "python") if "import" not in text]
    assert headings == [
        "Keep the head and the embedding exact",
        "Mixtures of experts",
        "Another codec for each dimension",
    ]
    rules = [policy_under(heading).rules for heading in headings]
    assert [rule.module for rule in rules[0][:2]] == ["lm_head", "embed_tokens"]
    assert [rule.group for rule in rules[2]] == ["tp", "dp"]


@pytest.mark.slow
def test_head_and_embedding_are_kept(mesh):
    policy = policy_under("Keep the head and the embedding exact")
    plans = plans_under(policy, mesh)
    check_rules(policy, plans)
    assert codecs(plans, module="lm_head") == codecs(plans, module="embed_tokens") == {NONE}
    assert NONE not in codecs(plans, module="attn")


@pytest.mark.slow
def test_policy_of_a_file_keeps_the_head(mesh, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(block_under(PAGE, "One policy for all jobs", "toml"))
    plans = plans_under(path, mesh)
    assert codecs(plans, module="lm_head") == {NONE}
    assert NONE not in codecs(plans, module="embed_tokens")


@pytest.mark.slow
def test_tokens_of_experts_travel_as_floats_of_8_bits(mesh):
    policy = policy_under("Mixtures of experts")
    plans = plans_under(policy, mesh)
    check_rules(policy, plans)
    assert codecs(plans, kind="all_to_all") == {"fp8"}
    assert codecs(plans, module="router") == {NONE}
    assert not codecs(plans, module="attn") & {NONE, "fp8"}


@pytest.mark.slow
def test_dimensions_have_their_own_codecs(mesh):
    plans = plans_under(policy_under("Another codec for each dimension"), mesh)
    assert codecs(plans, group_label="tp") <= {"rotated", "int8"}
    assert codecs(plans, group_label="dp", direction="backward") == {"rotated(bits=4)"}
    assert codecs(plans, group_label="dp", direction="forward") == {NONE}
    assert codecs(plans, group_label="ep") == {NONE}
