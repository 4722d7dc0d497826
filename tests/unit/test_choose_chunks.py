"""Chunks that the model chooses, or that are requested in vain."""

from __future__ import annotations

import dataclasses

import pytest
from deciding import KERNELS, MIB, decide, forced, one, options, profile, site
from tiers import has_messages

from commpass.costmodel import (
    KernelRate,
    Link,
    ethernet,
)
from commpass.errors import PolicyError
from commpass.plan import NONE, Site
from commpass.policy import Policy
from commpass.policy.rules import Annotation, Rule


def chunks_of(a_site: Site, policy: Policy) -> set[int]:
    """Return into how many chunks candidates split a site."""
    (found,) = options([a_site], policy, profile(ethernet(1).link))
    assert found.possible
    return {each.chunks for each in found.possible}


def large(kind: str = "all_reduce", **changes) -> Site:
    """16 MiB on two ranks, with coded exchanges as messages."""
    return site(kind, 4 * MIB, 2, **({"by_messages": True} | changes))


DIVIDED = [
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
    ("reduce_scatter", "direct"),
    ("all_gather", "direct"),
    ("all_to_all", "direct"),
]


@pytest.mark.parametrize(("kind", "name"), DIVIDED)
def test_large_sites_are_divided_unasked_where_exchanges_go_as_messages(kind, name):
    policy = Policy(codecs="int8", algorithms=name)
    assert chunks_of(large(kind), policy) == {1, 2, 4, 8}
    assert one(large(kind), policy, ethernet(1)).chunks > 1
    assert chunks_of(large(kind, bytes=4 * MIB, shape=(MIB,)), policy) == {1, 2}


UNASKED = {
    "not as messages": (large(by_messages=False), "int8", "two_shot"),
    "a small tensor": (large(bytes=4 * MIB - 4, shape=(MIB - 1,)), "int8", "two_shot"),
    "a size that is not fixed": (large(shape=("s0", 4)), "int8", "two_shot"),
    "splits": (large("all_to_all", splits=((9, 3), (9, 3))), "int8", "direct"),
    "a wire that depends on values": (large(dtype="bfloat16"), "exponent", "two_shot"),
    "blocks that must be alike": (large(), "equarx", "two_shot"),
    "many hops": (large(), "int8", "semi_ring"),
    "the library's sum": (large(), "bf16", "native"),
    "shards": (large(), "int8", "two_shot(shards=2)"),
    "a word": (large(annotation=Annotation(chunks=1).to_json()), "int8", "two_shot"),
}


def test_rings_are_divided_unasked_where_their_messages_take_long():
    """int8 takes one byte and 1/64 per value, which 0.1 Gbit/s carry in 81 ns, and 1 Gbit/s in 8.1.

    Encode and decode take 0.9 ns, and 84 us besides, which is 0.64 ns for each value of an eighth
    of 4 MiB.
    """
    a_site = site("all_reduce", 4 * MIB, 4, by_messages=True)
    policy = Policy(codecs="int8", algorithms="ring")
    for gbit, expected in ((0.1, {1, 2, 4, 8}), (1, {1})):
        (found,) = options([a_site], policy, ethernet(gbit))
        assert {each.chunks for each in found.possible} == expected
    (found,) = options([dataclasses.replace(a_site, by_messages=False)], policy, ethernet(0.1))
    assert {each.chunks for each in found.possible} == {1}


@pytest.mark.parametrize("what", UNASKED)
def test_model_divides_nothing_unasked(what):
    a_site, codec, name = UNASKED[what]
    assert chunks_of(a_site, Policy(codecs=codec, algorithms=name)) == {1}


@pytest.mark.parametrize(
    "what", ["not as messages", "a small tensor", "blocks that must be alike", "many hops"]
)
def test_rule_may_divide_what_the_model_does_not(what):
    a_site, codec, name = UNASKED[what]
    policy = Policy(rules=[Rule(codec=codec, algorithm=name, chunks=4, force=True)])
    planned = one(a_site, policy, ethernet(1))
    assert planned.chunks == 4
    assert "chunks=" not in planned.reason


WHOLE = {
    "send": (site("send", ranks=2, peer=1), "int8", "direct", "send by direct is sent whole"),
    "recv": (site("recv", ranks=2, peer=1), "int8", "direct", "recv by direct is sent whole"),
    "sparse": (
        site(direction="backward", stateless=None),
        "topk",
        "sparse",
        "all_reduce by sparse is sent whole",
    ),
    "native": (site(), "bf16", "native", "all_reduce by native is sent whole"),
    "shards": (site(), "int8", "two_shot(shards=2)", "two_shot(shards=2) has shards instead"),
    "chunks": (site(), "int8", "two_shot(chunks=3)", "the algorithm was named with chunks=3"),
}


@pytest.mark.parametrize(
    "what",
    [pytest.param(each, marks=has_messages if each in ("send", "recv") else ()) for each in WHOLE],
)
def test_chunks_that_do_not_apply_are_reported_in_the_reason(what):
    a_site, codec, name, why = WHOLE[what]
    told = f"; chunks=4 does not apply: {why}"
    rule = Rule(codec=codec, algorithm=name, chunks=4, force=True)
    for policy in (
        Policy(rules=[rule]),
        Policy(chunks=4, rules=[dataclasses.replace(rule, chunks=None)]),
    ):
        planned = one(a_site, policy, profile())
        assert planned.chunks == (3 if what == "chunks" else 1)
        assert planned.reason.endswith(told)
    for chunks in (None, 3 if what == "chunks" else 1):  # others are not requested
        policy = Policy(rules=[dataclasses.replace(rule, chunks=chunks)])
        assert "chunks=" not in one(a_site, policy, profile()).reason.replace(name, "")
    kept = one(a_site, Policy(rules=[Rule(keep=True)], chunks=4), profile())
    assert "does not apply" not in kept.reason  # it is not even compressed


def test_chunks_of_the_chosen_algorithm_are_reported():
    rule = Rule(codec="bf16", algorithm=["native", "two_shot"], chunks=4)
    slow = profile(Link(0.0, 0.05, {"all_to_all": 100.0, "all_gather": 100.0}))
    assert one(site(), Policy(rules=[rule]), slow).reason.endswith("is sent whole")
    other = one(site(), Policy(rules=[rule]), profile(Link(0.0, 0.05, {"all_reduce": 9.0})))
    assert (other.algorithm, other.chunks) == ("two_shot", 4)
    assert "does not apply" not in other.reason


def test_codec_may_have_a_time_of_a_call_of_its_own():
    """Two calls, an encode and a decode, of 100 us each instead of 40."""
    own = KernelRate(0.125, 0.0625, call_us=100.0)
    same, slower = (
        profile(kernels=dataclasses.replace(KERNELS, call_us=40.0, rates={"int8": rate}))
        for rate in (KernelRate(0.125, 0.0625), own)
    )
    a_site = site("all_gather", 1 << 16, 2)
    took = [one(a_site, forced("int8", chunks=1), each).predicted_us for each in (same, slower)]
    assert took[1] - took[0] == pytest.approx(2 * 60.0)
    with pytest.raises(PolicyError, match="call_us"):
        KernelRate(1.0, 1.0, call_us=-1.0)


@pytest.mark.parametrize(
    ("kind", "numel"),
    [("reduce_scatter", 64 * 16), ("all_to_all", 64 * 64), ("all_gather", 64)],
)
def test_codec_whose_padded_row_is_not_smaller_is_refused_unless_forced(kind, numel):
    """A row has a block of 256 codes, and 128 bytes with its scale."""
    one = site(kind, numel, ranks=64, dtype="bfloat16")
    row = numel // 64 if kind != "all_gather" else numel
    (found,) = options([one], Policy(codecs="int8"), profile())
    refused = {each.refused for each in found.candidates if each.codec != NONE}
    refused = {why for why in refused if not why.startswith("hierarchical needs")}
    assert refused == {f"int8 sends 384 bytes for each {row} values of bfloat16, no fewer"}
    assert decide([one], Policy(codecs="int8"), profile())[0].codec == NONE
    rules = [Rule(codec="int8", force=True)]
    assert decide([one], Policy(rules=rules), profile())[0].codec == "int8"
    larger = site(kind, numel * 16, ranks=64, dtype="bfloat16")
    assert decide([larger], Policy(codecs="int8"), profile())[0].codec == "int8"
