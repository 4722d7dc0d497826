"""fed_back: what the next call begins with is not compressed with loss; what is made anew is."""

from __future__ import annotations

import pytest
import torch
from graphs import as_rank, ops, trace

import commpass
from commpass import Policy, Rule

RANKS = 4
SLOW = commpass.ethernet(0.001)
INT8 = Policy(codecs=("int8",), skip=("group", "simplify"))
W, GRADIENT, MINE = torch.randn(256, 64), torch.randn(256, 64), torch.randn(64, 64)


@pytest.fixture(autouse=True)
def group():
    with as_rank(0, RANKS):
        yield


def ar(x, op="sum"):
    return ops.wait_tensor(ops.all_reduce(x, op, "0"))


def ag(x):
    return ops.wait_tensor(ops.all_gather_into_tensor(x, RANKS, "0"))


def broadcast(x):
    return ops.wait_tensor(ops.broadcast(x, 0, "0"))


FED_BACK = {
    "own part updated, gathered": (lambda w, g: w.copy_(ag(w[:64] - 0.1 * g[:64])), (W, GRADIENT)),
    "own part gathered": (lambda w: w.copy_(ag(w[:64])), (W,)),
    "gathered, viewed": (lambda w: w.copy_(ag(w[:64].view(-1)).view(256, 64)), (W,)),
    "broadcast": (lambda w: w.copy_(broadcast(w)), (W,)),
    "averaged with another": (lambda w, g: w.copy_(ar(w * 0.9 + g * 0.1, "avg")), (W, GRADIENT)),
    "lerp": (lambda w, g: w.copy_(ar(torch.lerp(w, g, 0.1), "avg")), (W, GRADIENT)),
    "momentum": (lambda m, g: m.copy_(ar(m * 0.9 + g)), (W, GRADIENT)),
}
ANEW = {
    "a gradient summed in place": (lambda g: g.copy_(ar(g)), (GRADIENT,)),
    "a gradient scaled and summed in place": (lambda g: g.copy_(ar(g / RANKS)), (GRADIENT,)),
    "another's part gathered": (lambda w, mine: w.copy_(ag(mine * 2)), (W, MINE)),
    "added to": (lambda w, g: w.add_(ar(g)), (W, GRADIENT)),
    "part of a product": (lambda w, x: w.copy_(ag(w[:64] @ x)), (W, MINE)),
    "given back": (lambda w, g: ag(w[:64] - 0.1 * g[:64]), (W, GRADIENT)),
}


def planned(function, inputs, policy=INT8):
    gm = trace(function, *inputs)
    (site,) = commpass.rewrite(gm, inputs, policy, profile=SLOW, strict=True).sites
    return site


@pytest.mark.parametrize("name", FED_BACK)
def test_what_takes_the_place_of_what_it_was_made_of_is_left_alone(name):
    site = planned(*FED_BACK[name])
    assert site.codec == "none"
    assert "takes the place of" in site.reason


@pytest.mark.parametrize("name", ANEW)
def test_what_is_made_anew_in_each_call_is_compressed(name):
    assert planned(*ANEW[name]).codec == "int8"


def test_codecs_that_lose_nothing_and_rules_that_name_the_site_still_compress():
    function, inputs = FED_BACK["own part gathered"]
    raw = Policy(rules=[Rule(codec="raw", force=True)], skip=("group", "simplify"))
    assert planned(function, inputs, raw).codec == "raw"
    named = Policy(rules=[Rule(module="layers", codec="int8")], skip=("group", "simplify"))
    gm = trace(function, *inputs)
    for node in gm.graph.nodes:
        node.meta["nn_module_stack"] = {"model": ("L['self'].layers", "Module")}
    (site,) = commpass.rewrite(gm, inputs, named, profile=SLOW, strict=True).sites
    assert site.codec == "int8"
