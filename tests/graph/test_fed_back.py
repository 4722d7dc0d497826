"""fed_back: values that the next call starts with are not compressed lossily; recomputed values may
be."""

from __future__ import annotations

import pytest
import torch
from functional_ops import ag, ar, rs
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


def broadcast(x):
    return ops.wait_tensor(ops.broadcast(x, 0, "0"))


FED_BACK = {
    "own part updated, gathered": (lambda w, g: w.copy_(ag(w[:64] - 0.1 * g[:64])), (W, GRADIENT)),
    "own part gathered": (lambda w: w.copy_(ag(w[:64])), (W,)),
    "updated in place, gathered": (
        lambda w, g: w.sub_(g).copy_(ag(w[:64])),
        (W, GRADIENT),
    ),
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
def test_values_that_replace_their_own_inputs_are_left_alone(name):
    site = planned(*FED_BACK[name])
    assert site.codec == "none"
    assert "takes the place of" in site.reason


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", ANEW)
def test_values_made_anew_in_each_call_are_compressed(name):
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


# --- whole steps, as passed by Dynamo and AOTAutograd ---------------------------------------------

V, OTHER, ROW, ROWS = W + 1, GRADIENT + 1, torch.rand(64, 64), torch.randn(8, 64)


def step_of_one(weight, update):
    return weight[:64] - 0.1 * update[:64]


def foreach_copied(w, v, g, h):
    new = torch._foreach_add([w[:64], v[:64]], [g[:64], h[:64]], alpha=-0.1)
    torch._foreach_copy_([w, v], [ag(each) for each in new])


def foreach_adam(w, v, g, h, m, s):
    weights, gradients = [w[:64], v[:64]], [rs(g) / RANKS, rs(h) / RANKS]
    averages, squares = [m, m + 1], [s, s + 1]
    torch._foreach_lerp_(averages, gradients, 0.1)
    torch._foreach_addcmul_(squares, gradients, gradients, 0.01)
    torch._foreach_addcdiv_(weights, averages, torch._foreach_sqrt(squares), -0.01)
    w.copy_(ag(w[:64]))
    v.copy_(ag(v[:64]))


def part_in_place(w, g, m, s):
    w[:64].addcdiv_(m, s.sqrt() + 1e-8, value=-0.01)
    w.copy_(ag(w[:64]))


def split_and_joined(w, v, g, h):
    both = torch.cat([step_of_one(w, g).flatten(), step_of_one(v, h).flatten()])
    parts = ag(both).view(RANKS, -1).split_with_sizes([64 * 64] * 2, 1)
    w.copy_(parts[0].reshape(256, 64))
    v.copy_(parts[1].reshape(256, 64))


def chunked(w, g):
    w.copy_(torch.cat(ag(step_of_one(w, g).flatten()).chunk(4)).view(256, 64))


def by_slices(w, g):
    for rows in (slice(0, 128), slice(128, 256)):
        w[rows].copy_(ag(w[rows][:32] - 0.1 * g[rows][:32]))


def summed_with_zeros(w, g):
    padded = torch.zeros(256, 64)
    padded[:64] = step_of_one(w, g)
    w.copy_(ar(padded))


def by_rows(w, g):
    w.index_add_(0, torch.arange(8), g[:8])
    w.copy_(ar(w, "avg"))


def low_rank(w, x):
    w.addmm_(w[:, :8] * 0, x)
    w.copy_(ag(w[:64]))


def unless_overflow(w, g):
    w.copy_(ag(torch.where(g.isfinite().all(), w - 0.1 * g, w)[:64]))


def unless_overflow_elsewhere(w, g):
    w.copy_(torch.where(g.isfinite().all(), ag(step_of_one(w, g)), w))


STEPS_FED_BACK = {
    "foreach, copied": (foreach_copied, (W, V, GRADIENT, OTHER), ["none"] * 2),
    "foreach Adam": (
        foreach_adam,
        (W, V, GRADIENT, OTHER, ROW, ROW),
        ["int8", "int8", "none", "none"],
    ),
    "own part updated in place": (part_in_place, (W, GRADIENT, ROW, ROW), ["none"]),
    "two in one, split": (split_and_joined, (W, V, GRADIENT, OTHER), ["none"]),
    "chunks joined": (chunked, (W, GRADIENT), ["none"]),
    "slice by slice": (by_slices, (W, GRADIENT), ["none"] * 2),
    "summed, with zeros for others": (summed_with_zeros, (W, GRADIENT), ["none"]),
    "summed, masked": (lambda w, g, m: w.copy_(ar((w - g) * m)), (W, GRADIENT, V), ["none"]),
    "summed, then divided": (lambda w, g: w.copy_(ar(w - g) / RANKS), (W, GRADIENT), ["none"]),
    "scattered and gathered": (
        lambda w, g: w.copy_(ag(rs(w - 0.1 * g) / RANKS)),
        (W, GRADIENT),
        ["none", "none"],
    ),
    "some rows": (by_rows, (W, GRADIENT), ["none"]),
    "a product added": (low_rank, (W, ROWS), ["none"]),
    "clamped": (lambda w, g: w.copy_(ag(step_of_one(w, g).clamp(-1, 1))), (W, GRADIENT), ["none"]),
    "if all is finite": (unless_overflow, (W, GRADIENT), ["none"]),
    "if all was finite": (unless_overflow_elsewhere, (W, GRADIENT), ["none"]),
}


def foreach_gradients(g, h):
    new = torch._foreach_div([ar(g), ar(h)], RANKS)
    torch._foreach_copy_([g, h], new)


def accumulated(total, g):
    total.add_(g)
    total.copy_(ar(total))


def difference_to_anchor(w, g, anchor):
    w.sub_(0.1 * g)
    w.copy_(anchor + ar(w - anchor, "avg"))


def kept_apart(w, mine, g):
    mine.sub_(0.1 * g[:64])
    w.copy_(ag(mine))


STEPS_ANEW = {
    "foreach gradients": (foreach_gradients, (GRADIENT, OTHER), ["int8", "int8"]),
    "gradients added up, then summed": (accumulated, (W, GRADIENT), ["int8"]),
    "gradients scattered and gathered": (lambda g: g.copy_(ag(rs(g))), (GRADIENT,), ["int8"] * 2),
    "a difference to what stays": (difference_to_anchor, (W, GRADIENT, V), ["int8"]),
    "a part that is kept apart": (kept_apart, (W, ROW, GRADIENT), ["int8"]),
    "a gradient with decay": (lambda w, g: w.sub_(ar(g + 0.01 * w)), (W, GRADIENT), ["int8"]),
    "a moving average of what others have": (
        lambda w, mean: mean.lerp_(ar(w, "avg"), 0.01),
        (W, V),
        ["int8"],
    ),
}


@pytest.mark.rest_slow(1)
@pytest.mark.few(8)
@pytest.mark.parametrize("name", [*STEPS_FED_BACK, *STEPS_ANEW])
def test_compiled_steps_keep_what_is_fed_back_and_compress_the_rest(name):
    function, inputs, codecs = (STEPS_FED_BACK | STEPS_ANEW)[name]

    def step(*inputs):
        function(*inputs)
        return inputs[0].sum()

    torch._dynamo.reset()
    backend = commpass.backend(INT8, inner="aot_eager", profile=SLOW, strict=True)
    torch.compile(step, backend=backend, fullgraph=True)(*[each.clone() for each in inputs])
    plans = [entry.plan for entry in backend.step_log.entries]
    assert [site.codec for plan in plans for site in plan.sites] == codecs
