"""A policy that compresses no site of a backend's graphs causes one warning, with the reason and a
remedy."""

from __future__ import annotations

import ast
import dataclasses
import gc
import logging
import re
from unittest.mock import patch

import pytest
import torch
from graphs import as_rank, ops
from torch import nn

import commpass
from commpass.costmodel import Link, Profile, ethernet, profile_named
from commpass.distributed.summary import SERVED, Summary
from commpass.distributed.uncompressed import EARLIER, OVERLAPPED, Slower, UncompressedSite
from commpass.passes.breakeven import break_even_rate
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.plan import NONE, Candidate, Plan, PlannedSite, Site
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Rule

WIDTH, ROWS, RANKS = 64, 256, 8
FAST = Profile("fast", Link(1.0, 1e4))
SLOW = ethernet(0.01)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return ops.wait_tensor(ops.all_reduce(self.linear(x), "sum", "0"))


class Broken(nn.Module):
    """A model of two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.fixture
def warnings(caplog):
    """Return the warnings about uncompressed sites."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()  # the backends of other tests report when they are deleted
    caplog.set_level(logging.WARNING, "commpass")
    caplog.clear()

    def found() -> list[str]:
        return [entry.getMessage() for entry in caplog.records if entry.name == "commpass"]

    return found


def train(policy, profile, model=None, steps=4):
    """Train a model, and return its plans."""
    chosen = commpass.backend(policy, inner="aot_eager", strict=True, profile=profile)
    seen, model = len(commpass.plans()), model or Block()
    compiled = torch.compile(model, backend=chosen)
    for _ in range(steps):
        compiled(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
    return commpass.plans()[seen:]


def serve(policy, profile, rounds):
    chosen = commpass.backend(policy, inner="aot_eager", strict=True, profile=profile)
    compiled = torch.compile(Block(), backend=chosen)
    with torch.no_grad():
        for _ in range(rounds + 1):  # a round ends when the next begins
            compiled(torch.ones(ROWS, WIDTH))
    return compiled


@pytest.mark.slow
def test_preset_on_a_fast_link_says_its_times_and_the_profile(fake_group, warnings):
    fake_group(RANKS)
    plans = train("taco", "nvlink-4")
    (text,) = warnings()
    sites = [site for plan in plans for site in plan]
    assert len(sites) == 2
    assert text.startswith("policy 'taco': 0 of 2 sites compressed: on nvlink-4, all_reduce of 64 ")
    (reason,) = {site.reason for site in sites}
    coded, plain = re.findall(r"([\d,.]+) us", reason)
    assert f"over 8 ranks takes {plain} us, with taco by two_shot {coded} us (2 sites)" in text
    assert f"{sites[0].plain_us:,.0f}" == plain
    assert "commpass probe): nvlink-4 is stated" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["ssfusion", Policy(rules=[Rule(codec="bf16", algorithm="native")])],
    ids=["sparse", "native"],
)
def test_algorithm_without_chunks_has_its_times_too(policy, fake_group, warnings):
    fake_group(RANKS)
    train(policy, FAST, nn.Sequential(Block(), Block()))
    (text,) = warnings()
    assert "0 of 4 sites compressed" in text
    assert re.search(r"with (dgc\(density=[\d.]+\) by sparse|bf16 by native) [\d,.]+ us", text)
    assert "tensors of " in text or "Gbit/s or less" in text


def test_report_that_fails_is_a_warning(monkeypatch, caplog):
    """Other ranks would wait for the first one, which alone reports."""

    def fails(*given, **fields):
        raise ValueError("no sentence")

    monkeypatch.setattr(Summary, "log_line", fails)
    summary = Summary(Policy(codecs="int8"))
    with pytest.raises(ValueError, match="no sentence"):  # COMMPASS_CHECK is set in tests
        summary.report()
    monkeypatch.setenv("COMMPASS_CHECK", "0")
    summary.report()
    for _ in range(3):
        summary.count_call("0forward")
    found = [each for each in caplog.records if "a report of commpass failed" in each.getMessage()]
    assert len(found) == 3
    assert all("no sentence" in str(each.exc_info[1]) for each in found)


@pytest.mark.slow
def test_named_remedy_changes_the_outcome(fake_group, warnings):
    fake_group(RANKS)
    profile = dataclasses.replace(profile_named("nvlink-4"), link=Link(1.0, 1000.0))
    train("taco", profile)
    (text,) = warnings()
    (rate,) = re.findall(r"a link of ([\d,.]+) Gbit/s or less", text)
    slower = dataclasses.replace(profile, link=Link(1.0, float(rate.replace(",", "")) / 8))
    torch._dynamo.reset()
    # the error may be too large for these weights
    unchecked = Policy.from_preset("taco", check_calls=0)
    assert all(plan.compressed for plan in train(unchecked, slower))
    torch._dynamo.reset()
    (rule,) = re.findall(r"Rule\(.*?\)", text)
    rules = [eval(rule, {"Rule": Rule})]
    forced = train(Policy.from_preset("taco", rules=rules), profile)
    assert [len(plan.compressed) for plan in forced] == [1, 1]
    assert len(warnings()) == 1


@pytest.mark.slow
def test_size_is_named_from_which_on_a_codec_gains(fake_group, warnings):
    fake_group(RANKS)
    link = ethernet(1)
    train(Policy(codecs="int8", max_error=0.05), link)
    (text,) = warnings()
    (number, unit) = re.search(r"tensors of ([\d.]+) ([KM])iB or more", text).groups()
    nbytes = float(number) * {"K": 1 << 10, "M": 1 << 20}[unit]
    rows = [int(nbytes * times) // (4 * WIDTH * RANKS) * RANKS for times in (0.9, 1.1)]
    found = [of_rows(each, link) for each in rows]
    assert [site.codec == NONE for site in found] == [True, False]


def of_rows(rows: int, profile: Profile) -> PlannedSite:
    policy = Policy(codecs="int8", max_error=0.05)
    shape = (rows, WIDTH)
    facts = {"name": "a", "kind": "all_reduce", "reduce_op": "sum", "group": "0"}
    site = Site(**facts, group_size=RANKS, dtype="float32", shape=shape, bytes=rows * WIDTH * 4)
    allowed = policy.allowed(site)[0]
    return choose([site], [candidates(site, allowed, profile, True)], [allowed], profile)[0]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "profile"),
    [
        ("balanced", SLOW),
        ("lossless", FAST),
        ("off", FAST),
        (Policy(), FAST),
        (Policy(rules=[Rule(module="first", keep=True)]), FAST),
        ("equarx", SLOW),  # forward only
        ("ssfusion", SLOW),  # backward only
    ],
    ids=["compressed", "default", "off", "no codec", "keep", "forward", "backward"],
)
def test_policy_says_nothing_where_it_compresses_or_none_is_asked(
    policy, profile, fake_group, warnings
):
    fake_group(RANKS)
    plans = train(policy, profile, Broken())
    gc.collect()
    assert len(plans) == 4
    assert not [text for text in warnings() if "sites compressed" in text]


@pytest.mark.slow
def test_sites_that_are_all_kept_by_an_annotation_say_so(fake_group, warnings):
    fake_group(RANKS)
    model = Broken()
    commpass.apply_policy(model, {"first": commpass.keep(), "second": commpass.keep()})
    train("balanced", SLOW, model)
    assert warnings() == ["policy 'balanced': 0 of 4 sites compressed: kept by keep in the model"]


@pytest.mark.slow
def test_reasons_are_counted_where_there_are_several(fake_group, warnings):
    fake_group(RANKS)
    model = Broken()
    commpass.apply_policy(model, {"first": commpass.keep()})
    train("taco", FAST, model)
    (text,) = warnings()
    assert "0 of 4 sites compressed: on fast, all_reduce of 64 KiB" in text
    assert "; 2 sites: kept by keep in the model. What would change it:" in text


@pytest.mark.slow
def test_codec_that_loses_more_than_the_budget_is_named_with_both(fake_group, warnings):
    fake_group(RANKS)
    policy = Policy(codecs="int4", algorithms="one_shot", max_error=0.01)
    train(policy, SLOW)
    (text,) = warnings()
    assert "int4 by one_shot: error 11.7" in text
    assert "above the budget of 1.000%" in text
    assert text.endswith("What would change it: a larger max_error")


@pytest.mark.slow
def test_annotation_asks_for_codecs_whatever_the_policy(fake_group, warnings):
    fake_group(RANKS)
    model = Broken()
    commpass.apply_policy(model, {"first": "int8"})
    train("lossless", FAST, model)
    (text,) = warnings()
    assert "0 of 4 sites compressed: on fast" in text
    assert "2 sites: policy 'lossless' names no codec" in text
    torch._dynamo.reset()
    train("off", FAST, model)  # annotations do not count
    assert len(warnings()) == 1


@pytest.mark.slow
def test_model_of_two_graphs_is_reported_once_and_not_again(fake_group, warnings):
    fake_group(RANKS)
    plans = train("taco", FAST, Broken(), steps=8)
    gc.collect()
    assert len(plans) == 4
    (text,) = warnings()
    assert "0 of 4 sites" in text


@pytest.mark.slow
def test_rules_that_match_nothing_are_reported_by_their_own_warning_alone(fake_group, warnings):
    fake_group(RANKS)
    train("tahquant", SLOW)
    (text,) = warnings()
    assert "no rule of policy 'tahquant' matched" in text


@pytest.mark.slow
def test_served_model_is_reported_while_it_runs_and_one_that_is_evaluated_at_the_end(
    fake_group, warnings
):
    fake_group(RANKS)
    model = serve("equarx", FAST, SERVED - 1)
    assert not warnings()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(warnings()) == 1
    model = serve("equarx", FAST, SERVED)
    assert len(warnings()) == 2
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(warnings()) == 2
    assert all("0 of 1 site compressed" in text for text in warnings())


def other_rank():
    with as_rank(1, RANKS):
        train("taco", FAST)


def one_rank(fake_group):
    fake_group(1)
    train("taco", FAST)


def no_site(fake_group):
    fake_group(RANKS)
    train("taco", FAST, nn.Linear(WIDTH, WIDTH), steps=1)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("run", [one_rank, no_site])
def test_nothing_is_said_where_nothing_could_be_compressed(run, fake_group, warnings):
    run(fake_group)
    gc.collect()
    assert not [text for text in warnings() if "compressed" in text]


@pytest.mark.slow
def test_ranks_other_than_the_first_stay_quiet(fake_group, warnings):
    other_rank()
    gc.collect()
    assert not warnings()


def summary_of(*whys: str) -> Summary:
    facts = {"kind": "all_reduce", "group": "0", "group_size": RANKS, "dtype": "float32"}
    sites = [PlannedSite(name=why, shape=(8,), bytes=32, **facts) for why in whys]
    summary = Summary(PRESETS["balanced"])
    plan = Plan(graph="0", direction="forward", policy="p", profile="p", sites=tuple(sites))
    left = [UncompressedSite(site, site.name, f"change {site.name}") for site in sites]
    summary.add(plan, trained=True, sites=left)
    return summary


def test_sites_that_take_longest_come_first():
    summary, named = summary_of("a", "b"), profile_named("nvlink-4")
    candidate = Candidate(codec="int8", algorithm="two_shot", predicted_us=9e3)
    graph = ("0", "forward")
    summary.left[graph] = [
        dataclasses.replace(
            each, site=dataclasses.replace(each.site, plain_us=us, bytes=nbytes), slower=slower
        )
        for each, us, nbytes in zip(summary.left[graph], (10.0, 700.0), (32, 64), strict=True)
        for slower in (Slower((candidate,), named),)
    ]
    text = summary.none_compressed(sizes=False)
    assert text.index("all_reduce of 64 B") < text.index("all_reduce of 32 B")


def test_warning_repeats_no_other_warning():
    assert summary_of(EARLIER, EARLIER).none_compressed() == ""
    assert "1 site: overlapped with" in summary_of(EARLIER, OVERLAPPED).none_compressed()


def test_sentence_names_the_commonest_reasons_and_counts_the_others():
    text = summary_of(*"aabccccddde").none_compressed()
    assert "4 sites: c; 3 sites: d; 2 sites: a; and 2 more reasons (commpass explain)." in text
    assert text.endswith("What would change it: change c; change d; change a")


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("mapped", [False, True])
def test_rate_is_where_a_candidate_begins_to_gain(kind, mapped):
    link = Link(1.0, 1000.0)
    profile = Profile("p", link)
    if mapped:
        profile = Profile("p", Link(1.0, 1e-3), links={"t*": link})
    site = Site(
        name="a",
        kind=kind,
        reduce_op="sum" if kind == "all_reduce" else None,
        group="0",
        group_label="tp",
        group_size=RANKS,
        dtype="float32",
        shape=(1 << 18,),
        bytes=1 << 20,
    )
    policy = Policy(codecs="int8", algorithms=("two_shot", "direct"), max_error=0.05)
    allowed = policy.allowed(site)[0]
    best = candidates(site, allowed, profile, True).possible[0]
    rate = break_even_rate(site, best, profile)
    assert 0 < rate < 1000

    def is_best_at(gbytes: float) -> bool:
        at = Link(1.0, gbytes)
        there = dataclasses.replace(profile, **({"links": {"t*": at}} if mapped else {"link": at}))
        again = candidates(site, allowed, there, True)
        (same,) = (
            each
            for each in again.possible
            if (each.algorithm, each.chunks) == (best.algorithm, best.chunks)
        )
        return same.predicted_us < again.uncompressed.predicted_us * (1 - profile.margin)

    assert is_best_at(rate)
    assert is_best_at(rate / 100)
    assert not is_best_at(rate * 1.05)
    slower = profile.scaled("t*" if mapped else "(link)", rate / 2000)
    assert break_even_rate(site, best, slower) == pytest.approx(rate / 2)  # it gains as it is


def test_deleted_backend_reports_without_pythons_parser(fake_group, warnings):
    """Python before 3.11.8 fails if the garbage collector interrupts its parser to parse more."""
    fake_group(RANKS)
    model = serve(Policy(rules=[Rule(module="head", codec="int8(block=64)")]), FAST, 1)
    assert not warnings()
    with patch.object(ast, "parse", wraps=ast.parse) as parse:
        del model
        torch._dynamo.reset()
        gc.collect()
    (text,) = warnings()
    assert "matched no collective" in text
    assert not parse.called
