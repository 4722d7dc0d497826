"""Lossless codecs, domains, casts, and the library's own collective on casts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from choice_formulas import SPECS, choices, exchange_us
from deciding import CODECS, COMPRESSIBLE, ITEM, KERNELS, SLOW, forced, one, options, profile, site

import commpass
from commpass.costmodel import (
    KernelRate,
    Kernels,
    Link,
    ethernet,
)
from commpass.costmodel.kernels import CPU
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Annotation, Rule

REDUCTIONS = ("all_reduce", "reduce_scatter")


@pytest.mark.few(17)
@pytest.mark.parametrize("dtype", ITEM)
@pytest.mark.parametrize("kind", COMPRESSIBLE)
@pytest.mark.parametrize("codec", ["exponent", "raw", *CODECS])
def test_bytes_depend_on_the_values_with_a_lossless_code_alone(codec, kind, dtype):
    planned = one(site(kind, 1 << 20, 8, dtype), forced(codec), profile())
    assert planned.codec == codec
    assert (planned.dynamic_bytes > 0) == (
        codec == "exponent" and dtype != "float64"
    )  # whose exponents are sent as they are
    assert planned.dynamic_bytes < planned.wire_bytes
    if codec in ("exponent", "raw"):
        assert planned.error == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lossless_code_is_expected_to_need_what_a_gaussian_does(dtype):
    numel = 1 << 20
    planned = one(site("all_gather", numel, 8, dtype), forced("exponent"), profile())
    sample = (
        torch.randn(numel, generator=torch.Generator().manual_seed(1))
        .to(getattr(torch, dtype))
        .reshape(1, -1)
    )
    coder = commpass.codec("exponent")
    used = int(coder.used_bytes(coder.encode_rows(sample), numel, sample.dtype))
    assert planned.wire_bytes == pytest.approx(used, rel=0.02)
    assert planned.wire_bytes < planned.bytes
    sizes = one(
        site("all_gather", numel, 8, dtype), forced("exponent", "direct(first=sizes)"), profile()
    )
    assert sizes.wire_bytes == planned.wire_bytes + 8
    assert sizes.dynamic_bytes == planned.wire_bytes  # the static part is then sent with the rest


@pytest.mark.parametrize("codec", ["exponent", "raw"])
@pytest.mark.parametrize("kind", COMPRESSIBLE)
def test_codecs_that_lose_nothing_still_sum_in_another_order_which_may_be_forbidden(kind, codec):
    a_site = site(kind)
    assert one(a_site, forced(codec), profile()).codec == codec
    strict = one(a_site, forced(codec, reassociate=False), profile())
    assert strict.compressed is (kind not in REDUCTIONS)
    if kind in REDUCTIONS:
        for spec in choices(kind):
            assert (
                f"{codec} by {spec} sums in another order, which reassociate=False forbids"
                in strict.reason
            )
    assert (
        one(a_site, forced("int8", reassociate=False), profile()).codec == "int8"
    )  # an explicitly allowed error is different


DOMAINS = {
    "rotated": {
        "one_shot": "hadamard",
        "two_shot": "hadamard",
        "two_shot(stage=rs)": "hadamard",
        "two_shot(stage=ag)": "",
        "ring": "hadamard",
        "ring(stage=rs)": "hadamard",
        "ring(stage=ag)": "",
        "semi_ring": "hadamard",
        "hierarchical(node=4)": "hadamard",
    },
    "int8": dict.fromkeys(SPECS["all_reduce"], ""),
    "raw": dict.fromkeys(SPECS["all_reduce"], ""),
}


@pytest.mark.parametrize(
    ("codec", "spec", "domain"),
    [(c, spec, name) for c, of in DOMAINS.items() for spec, name in of.items()],
)
def test_sums_are_made_in_the_codecs_domain_where_coded_values_are_summed(codec, spec, domain):
    planned = one(site(), forced(codec, spec), profile())
    assert (planned.algorithm, planned.domain) == (spec, domain)
    assert (f"sums in the {domain} domain" in planned.reason) == (domain != "")
    assert ("domain" in planned.reason) == (domain != "")


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "broadcast"])
def test_domain_is_absent_where_nothing_is_summed(kind):
    assert one(site(kind), forced("rotated"), profile()).domain == ""
    assert one(site("reduce_scatter"), forced("rotated"), profile()).domain == "hadamard"


REDUCTIONS = ("all_reduce", "reduce_scatter")


def native_us(kind: str, values: int, ranks: int, link: Link) -> float:
    """A cast of all values, the plain collective on bf16, and widening what arrives."""
    back = values if kind == "all_reduce" else values // ranks
    rate = KERNELS.other
    us = exchange_us(kind, 2 * values, ranks, link.alpha_us, link.gbytes_per_s)
    return us + 2 * KERNELS.launch_us + (values * rate.encode_ns + back * rate.decode_ns) / 1000


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_native_costs_the_plain_collective_on_two_bytes_a_value_and_two_casts(kind, ranks):
    numel = 64 * 100 * ranks  # a row of whole 128 bytes
    planned = one(site(kind, numel, ranks), forced("bf16", "native"), profile())
    assert (planned.codec, planned.algorithm) == ("bf16", "native")
    assert planned.wire_bytes == 2 * numel
    assert [stage.kind for stage in planned.stages if stage.role == "exchange"] == [kind]
    assert planned.predicted_us == pytest.approx(native_us(kind, numel, ranks, SLOW), abs=1e-3)
    once = commpass.codec("bf16").relative_error()
    partial = sum(k / ranks for k in range(2, ranks + 1))  # shares of what is rounded in between
    assert planned.error == pytest.approx(once * math.sqrt(1 + partial), abs=2e-6)


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("spec", ["bf16", "fp16", "cast(fp16)", "cast"])
def test_native_is_chosen_only_where_it_is_named(kind, spec):
    """This holds even on a link on which it is by far the fastest."""
    slow = profile(Link(0.0, 0.05, {"all_to_all": 100.0, "all_gather": 100.0}))
    fastest, other = (one(site(kind), forced(spec, name), slow) for name in ("native", None))
    assert fastest.predicted_us < 0.1 * other.predicted_us
    named = Rule(codec=spec, algorithm="native")
    word = Annotation(codec=spec, algorithm="native").to_json()
    for policy, a_site in (
        (Policy(rules=[named]), site(kind)),
        (Policy(), site(kind, annotation=word)),
        (Policy(codecs=spec, algorithms="native"), site(kind)),
    ):
        assert one(a_site, policy, slow).algorithm == "native"
    for policy in (
        Policy(codecs=spec),
        Policy(rules=[Rule(codec=spec, force=True)]),
        Policy(codecs=spec, algorithms="direct" if kind == "all_reduce" else "one_shot"),
        *(dataclasses.replace(preset, codecs=spec) for preset in PRESETS.values()),
    ):
        (found,) = options([site(kind)], policy, slow)
        assert "native" not in [each.algorithm for each in found.candidates]


@pytest.mark.parametrize("codec", ["int8", "rotated", "raw", "exponent", "topk"])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_native_is_refused_for_codes_that_no_library_can_sum(kind, codec):
    planned = one(site(kind), forced(codec, "native"), profile())
    assert not planned.compressed
    assert f"the library cannot sum what {codec} sends" in planned.reason
    assert "write codec='bf16'" in planned.reason


def test_native_is_within_the_budget_or_not_taken():
    """On many ranks partial sums are rounded often."""
    policy = forced("bf16", "native", max_error=0.005)
    assert one(site(ranks=8), policy, profile()).compressed
    many = one(site(ranks=64), policy, profile())
    assert not many.compressed
    assert "bf16 by native: error" in many.reason


LOSSY = ("balanced", "aggressive")


@pytest.mark.parametrize("name", LOSSY)
def test_preset_takes_a_cast_where_coding_takes_longer_than_it_saves(name):
    """2^22 values on each of two ranks, 2^21 of which are sent to the other rank.

    int8 is encoded in 0.65 ns and decoded in 0.25, a cast in 0.30 and 0.40: 0.20 ns less for each
    of the 2^22, which is 839 us. int8 and its scales take 2 - 1 - 1/64 bytes less for each of the
    2^21, which 25 Gbit/s, 3125 bytes per microsecond, carry in 661 us.
    """
    a_site, link = site("all_to_all", 1 << 22, 2, by_messages=True), ethernet(25)
    cast = KernelRate(0.30, 0.40)
    rates = {"int8": KernelRate(0.65, 0.25), "bf16": cast, "fp16": cast}
    kernels = Kernels(2.0, KernelRate(3.0, 3.0), rates, call_us=40.0)
    link = dataclasses.replace(link, kernels=kernels)
    chosen = one(a_site, dataclasses.replace(PRESETS[name], chunks=1), link)
    assert (chosen.codec, chosen.algorithm) == ("bf16", "direct")
    alpha, busy = link.link.alpha_us, link.link.overhead_us
    assert chosen.predicted_us == pytest.approx(
        alpha + busy + 2 * (2 + 40) + 2**22 * 0.7 / 1e3 + 2**22 / 3125, abs=5.0
    )
    int8 = one(a_site, forced("int8", chunks=1), link)
    assert int8.predicted_us - chosen.predicted_us == pytest.approx(839 - 661, abs=1.0)


@pytest.mark.parametrize("name", LOSSY)
def test_preset_leaves_casts_out_where_fewer_bytes_gain_more(name):
    """At 1 Gbit/s the same byte takes 25 times as long."""
    a_site = site("all_to_all", 1 << 22, 2, by_messages=True)
    chosen = one(a_site, PRESETS[name], ethernet(1))
    assert chosen.compressed
    assert chosen.codec != "bf16"


@pytest.mark.parametrize("name", LOSSY)
def test_preset_takes_a_cast_where_the_budget_of_a_rule_is_below_all_others(name):
    policy = dataclasses.replace(PRESETS[name], rules=(Rule(max_error=0.003),))
    assert one(site(), policy, profile()).codec == "bf16"
    below = dataclasses.replace(PRESETS[name], rules=(Rule(max_error=0.001),))
    assert not one(site(), below, profile()).compressed


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("kind", COMPRESSIBLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_of_16_bits_are_not_cast(kind, dtype, name):
    """It would save nothing, and float16 would lose three bits."""
    for kernels in (KERNELS, Kernels(0.0, KernelRate(9.0, 9.0), {"bf16": KernelRate(0.0, 0.0)})):
        slow = profile(kernels=kernels)
        assert one(site(kind, 1 << 22, 2, dtype), PRESETS[name], slow).codec != "bf16"
        only = one(site(kind, 1 << 22, 2, dtype), Policy(codecs=["bf16", "fp16"]), slow)
        assert not only.compressed
        assert f"bf16 sends no fewer bytes than the values of {dtype} are" in only.reason
        for wider in ("float32", "float64"):
            assert one(site(kind, 1 << 22, 2, wider), Policy(codecs="bf16"), slow).compressed
    assert one(site(kind, 1 << 22, 2, dtype), forced("bf16"), profile()).codec == "bf16"


def test_casts_have_one_rate_whatever_they_are_called():
    for role in ("encode", "decode"):
        rates = {CPU.time_us(name, role, 1e6) for name in ("bf16", "fp16", "cast", "cast(to=fp16)")}
        assert len(rates) == 1
        assert max(rates) < CPU.time_us("other", role, 1e6)
