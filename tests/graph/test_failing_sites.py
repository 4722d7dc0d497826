"""A site that fails in a pass stays uncompressed with a reason, and its neighbours are
compressed."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from graphs import code, ops, trace
from torch import ones

import commpass
from commpass.codecs import Codec, registry
from commpass.codecs.block.presets import int8
from commpass.collectives import data_sized
from commpass.errors import VerifyError
from commpass.passes import lower, manager, rewrite, verify
from commpass.passes.context import GraphInput, PassContext
from commpass.passes.failures import SiteFailure
from commpass.passes.manager import run
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
RANKS = 4
SLOW = commpass.ethernet(0.01)


@dataclasses.dataclass(frozen=True)
class Broken(Codec):
    """int8 with one method that fails."""

    spec: str
    how: str

    block = 256
    bound = 1.0

    def wire_bytes(self, numel, dtype):
        if self.how == "dtype":
            return numel * {torch.bfloat16: 1}[dtype]
        if self.how == "size" and numel > 100:
            raise ValueError(f"{numel} values are too many")
        return int8("int8").wire_bytes(numel, dtype)

    def encode_rows(self, rows):
        if self.how == "encode":
            raise RuntimeError("injected\nand more of it")
        if self.how == "captures":
            rows = rows * torch.tensor([2.0, 3.0])[0]
        return int8("int8").encode_rows(rows)

    def decode_rows(self, wire, numel, dtype):
        if self.how == "decode":
            raise RuntimeError("injected")
        return int8("int8").decode_rows(wire, numel, dtype)

    def relative_error(self):
        return 0.01


def broken(spec: str, *, how: str = "") -> Codec:
    return Broken(spec, how)


@pytest.fixture(autouse=True)
def _world(fake_group, monkeypatch):
    fake_group(RANKS)
    monkeypatch.setitem(registry.NAMES, "broken", broken)
    monkeypatch.setattr(lower, "make", lambda sources: None)


def three(x):
    """Three sites, of which the second is the only gather."""
    a = wait(ops.reduce_scatter_tensor(x * 2, "sum", RANKS, "0"))
    b = wait(ops.all_gather_into_tensor(a + 1, RANKS, "0"))
    return wait(ops.broadcast(b * 3, 1, "0")) - 1


def forced(gather: str, other: str = "int8", **more) -> Policy:
    rules = [
        Rule(kind="all_gather", codec=gather, force=True, **more),
        Rule(codec=other, force=True, **more),
    ]
    return Policy(rules=rules)


def planned(gm, policy, **more):
    road = GraphInput(gm=gm, direction="forward", policy=policy, profile=SLOW)
    return run(road, "0", **more)


def check(policy, reason, caplog, *, warned):
    """Check that only the gather is uncompressed, for this reason and with one warning."""
    gm = trace(three, ones(64, 64))
    with caplog.at_level(logging.WARNING, "commpass"):
        outcome = planned(gm, policy)
    names = [site.name for site in outcome.plan]
    assert outcome.error is None
    assert outcome.plan.fallback == ""
    assert [site.compressed for site in outcome.plan] == [True, False, True]
    assert outcome.plan.sites[1].reason == reason
    messages = [entry.getMessage() for entry in caplog.records]
    assert messages == ([f"forward graph 0: {names[1]} is {reason}"] if warned else [])
    assert dict(outcome.excluded) == ({names[1]: reason} if warned else {})


# --- rejected before anything is changed ----------------------------------------------------------

REFUSED = {
    "broken(how=dtype)": "broken(how=dtype) by direct fails: KeyError: torch.float32",
    "broken(how=size)": "broken(how=size) by direct fails: ValueError: 1024 values are too many",
    "exponent": "exponent has a wire whose size depends on the values, but its fake values have no"
    " ShapeEnv",
}


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("spec", REFUSED)
def test_values_that_a_codec_cannot_carry_are_refused(spec, caplog):
    check(forced(spec), REFUSED[spec], caplog, warned=False)


# --- detected by a pass ---------------------------------------------------------------------------

FAILING = {
    "encode": "RuntimeError: injected",
    "decode": "RuntimeError: injected",
    "captures": "VerifyError: encode_1 (commpass.encode.default) captured tensors while it was"
    " traced: ['_tensor_constant0']",
}


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("lowering", ["inline", "kernel"])
@pytest.mark.parametrize("how", FAILING)
def test_codec_that_fails_costs_its_own_site(how, lowering, caplog):
    reason = FAILING[how]
    if lowering == "kernel":
        reason = reason.replace("encode_1 (commpass.encode.default)", "commpass.encode.default")
    policy = forced(f"broken(how={how})", lowering=lowering)
    check(policy, f"uncompressed: pass 'lower' failed: {reason}", caplog, warned=True)


@pytest.mark.slow
def test_graph_is_that_of_a_caller_who_excludes_the_site():
    gm, expected = trace(three, ones(64, 64)), trace(three, ones(64, 64))
    policy = forced("broken(how=captures)")
    name = planned(gm, policy).plan.sites[1].name
    assert planned(expected, policy, excluded={name: "a caller said so"}).error is None
    assert code(gm) == code(expected)


def test_site_that_fails_is_an_error_under_strict():
    gm = trace(three, ones(64, 64))
    before = code(gm)
    outcome = planned(gm, forced("broken(how=captures)"), strict=True)
    assert isinstance(outcome.error, VerifyError)
    assert "captured tensors" in outcome.plan.fallback
    assert code(gm) == before


def failing(function, wrong):
    """Return a function that raises if its arguments are ``wrong``."""

    def instead(*args, **kwargs):
        if wrong(*args):
            raise RuntimeError("injected")
        return function(*args, **kwargs)

    return instead


def gathers(x, y):
    """Two sites that share their kernels, and one of a different size."""
    one, two, other = (wait(ops.all_gather_into_tensor(e, RANKS, "0")) for e in (x, x * 2, y))
    return one + two, other


def test_kernel_that_does_not_compile_costs_the_sites_that_share_it(caplog, monkeypatch):
    small = failing(lambda _: None, lambda sources: sources[0].inputs[0].whole.shape[0] == 1000)
    monkeypatch.setattr(lower, "make", small)
    gm = trace(gathers, ones(1000), ones(3000))
    policy = dataclasses.replace(forced("int8", lowering="kernel"), group_bytes=0)
    with caplog.at_level(logging.WARNING, "commpass"):
        plan = planned(gm, policy).plan
    why = "uncompressed: pass 'lower' failed: RuntimeError: injected"
    assert [site.reason for site in plan][:2] == [why, why]
    assert [site.codec for site in plan] == ["none", "none", "int8"]
    assert len(caplog.records) == 1


def test_sites_that_fail_in_several_passes_are_all_left_alone(caplog, monkeypatch):
    """One fails in rewrite, and one in lower, which the first round does not reach."""
    of = failing(rewrite.Templates.of, lambda _, found, *__: found.site.kind == "broadcast")
    monkeypatch.setattr(rewrite.Templates, "of", of)
    gm = trace(three, ones(64, 64))
    with caplog.at_level(logging.WARNING, "commpass"):
        plan = planned(gm, forced("broken(how=encode)")).plan
    assert [site.compressed for site in plan] == [True, False, False]
    assert [site.reason for site in plan][1:] == [
        f"uncompressed: pass {name!r} failed: RuntimeError: injected"
        for name in ("lower", "rewrite")
    ]
    assert len(caplog.records) == 1


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(("rounds", "fallback"), [(2, False), (1, True)])
def test_graph_is_the_untouched_one_if_sites_fail_in_too_many_rounds(
    rounds, fallback, caplog, monkeypatch
):
    of = failing(rewrite.Templates.of, lambda _, found, *__: found.site.kind == "broadcast")
    monkeypatch.setattr(rewrite.Templates, "of", of)
    monkeypatch.setattr(manager, "ROUNDS", rounds)
    gm = trace(three, ones(64, 64))
    before = code(gm)
    with caplog.at_level(logging.WARNING, "commpass"):
        outcome = planned(gm, forced("broken(how=encode)"))
    assert bool(outcome.plan.fallback) == (code(gm) == before) == fallback
    assert (outcome.error is not None) == fallback


@pytest.mark.slow
def test_site_that_fails_again_though_it_is_left_alone_is_an_error(monkeypatch):
    """So is one whose nodes stay in the graph."""

    def again(gm, plan):
        raise SiteFailure({plan[1].name: RuntimeError("again")})

    monkeypatch.setattr(verify, "verify", again)
    gm = trace(three, ones(64, 64))
    before = code(gm)
    outcome = planned(gm, forced("int8"))
    assert str(outcome.error) == "again"
    assert outcome.plan.fallback == "pass 'verify' failed: RuntimeError: again"
    assert code(gm) == before


@pytest.mark.slow
def test_sizes_that_a_failed_trace_left_behind_do_not_matter(monkeypatch):
    """A site fails after sizes were read from values; other sites that read some are unaffected."""

    def wrong(_, parts, numel, dtype):
        return dtype == torch.float16 and data_sized._foreseen.get() is None

    fails = failing(data_sized.operators.decode_parts, wrong)
    monkeypatch.setattr(data_sized.operators, "decode_parts", fails)

    def both(x, y):
        return [wait(ops.all_gather_into_tensor(e * 2, RANKS, "0")) + 1 for e in (x, y)]

    gm = trace(both, ones(4000).half(), ones(4000).bfloat16(), dynamic=True)
    names = [each.name for each in manager.PASSES]
    passes = manager.PASSES[: names.index("rewrite") + 1]
    plan = planned(gm, forced("exponent"), passes=passes).plan
    assert [site.codec for site in plan] == ["none", "exponent"]
    assert plan.sites[0].reason == "uncompressed: pass 'rewrite' failed: RuntimeError: injected"


# --- restoring the untouched graph ----------------------------------------------------------------


def test_restored_graph_has_no_results_of_passes(fake_group):
    fake_group(RANKS)
    gm = trace(lambda x: wait(ops.all_reduce(x * 2, "sum", "0")) + 1, ones(1024))
    given = GraphInput(gm=gm, direction="forward", policy=Policy(rules=[]), profile=SLOW)
    context = run(given, "0")
    kept = {"plan", "input", "found", "first", "times_ms", "error", "failed"}
    fresh = PassContext.of(given, "0")
    names = {field.name for field in dataclasses.fields(context)} - kept
    assert len(names) > 8
    for name in names:
        setattr(context, name, object())
    context.untouched = {}
    context.restore("injected")
    assert {name: getattr(context, name) for name in names} == {
        name: getattr(fresh, name) for name in names
    }
    assert context.plan.fallback == "injected"
    assert [site.codec for site in context.plan.sites] == ["none"]
