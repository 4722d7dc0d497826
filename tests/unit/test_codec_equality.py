"""Codecs compare by what they do: they are equal if and only if they encode and decode alike."""

from __future__ import annotations

import dataclasses
import pickle
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import FAMILY, Setting, blocks_for
from test_codecs import bits, build, gaussian, one_thread
from test_wrappers import built
from tiers import examples

from commpass.codecs import NAMES, VALUES, Codec, codec
from commpass.codecs.block import domain, grids, noise, scales, transforms
from commpass.codecs.sparse import indices, select
from commpass.codecs.wrappers.outlier import Channels
from commpass.errors import PolicyError

__all__ = ["one_thread"]  # a fixture that works by its presence

OTHERS = [
    "nvfp4",
    *("raw", "cast", "cast(to=fp16)", "exponent", "exponent(planes=3)"),
    *("topk", "topk(density=0.02)", "topk(values=int8)", "topk(indices=bitmap)", "dgc"),
    *("randomk", "randomk(seed=1)", "gaussiank", "redsync", "sidco"),
    *("segments(lengths=n5_9)", "segments(lengths=n9_5)", "segments(inner=topk, lengths=n5_9)"),
    *("outlier(width=8)", "outlier(width=8, seed=1)", "outlier(width=9)", "difference"),
    *("difference(inner=int8)", "mixed", "mixed(by=energy)", "mixed(share=0.5)"),
    *("mixed(width=256)", "mixed(low=rotated(bits=3, block=128))"),
    *("ecq", "ecq(bits=2)", "ecq(bits=4.5)", "ecq(even=1)"),
]


def meaning(setting: Setting) -> Setting:
    """Return a setting without irrelevant parameters, so that aliases are equal."""
    width = (setting.width or setting.block) if setting.rotation else 0
    block = 0 if setting.layout == "tiles" else setting.block
    stored = "" if setting.scale == "static" else setting.stored
    return dataclasses.replace(setting, width=width, block=block, stored=stored)


@st.composite
def named(draw: st.DrawFn) -> tuple[Codec, Setting]:
    text = draw(st.sampled_from(sorted(FAMILY)))
    return build(text, draw(st.sampled_from([None, *blocks_for(text)])))


@settings(max_examples=examples(100, 300), deadline=None)
@given(named(), named())
def test_codecs_are_equal_if_and_only_if_their_settings_mean_the_same(one, other):
    (first, its), (second, others) = one, other
    assert (first == second) == (meaning(its) == meaning(others))
    assert codec(first.spec) == first
    if first == second:
        assert hash(first) == hash(second)
        x = gaussian(700)
        assert bits(first.encode(x).payload) == bits(second.encode(x).payload)


def test_all_settings_fall_into_groups_that_mean_the_same():
    groups: dict[Codec, set[Setting]] = {}
    for text in FAMILY:
        groups.setdefault(codec(text), set()).add(meaning(FAMILY[text]))
    assert all(len(group) == 1 for group in groups.values())
    assert len(groups) == len({meaning(setting) for setting in FAMILY.values()})


ALIASES = [
    ("int8", "taco(form=int8, rotate=False, scale=absmax)"),
    ("int4(block=2048)", "sdp4bit(part=weight)"),
    ("fp8", "taco(rotate=False, scale=absmax)"),
    ("table(bits=3)", "rotated(form=table, bits=3, scale=rms)"),
    ("int8(static=0.5)", "int8(scale=static, static=0.5, stored=bf16)"),
    ("topk", "topk(indices=elias_fano)"),
    ("topk(density=0.5)", "topk(density=0.5, indices=bitmap)"),
    ("outlier(width=8)", "outlier(width=8, inner=int4)"),
    ("mixed", "mixed(width=128)"),
]


@pytest.mark.parametrize(("one", "other"), ALIASES)
def test_two_names_of_one_codec_are_equal_and_keep_their_names(one, other):
    assert codec(one) == codec(other)
    assert hash(codec(one)) == hash(codec(other))
    assert codec(one).spec != codec(other).spec


def test_other_codecs_differ_from_each_other_and_from_the_family():
    made = [codec(text) for text in OTHERS]
    assert len(set(made)) == len(made)
    assert not set(made) & {codec(text) for text in FAMILY}
    assert {coder.spec.partition("(")[0] for coder in made} | {
        text.partition("(")[0] for text in FAMILY
    } == set(NAMES) - {"bf16", "fp16"}


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_cast_is_the_same_by_all_its_names(form):
    made = [codec(form), codec(f"cast({form})"), codec(f"cast(to={form})"), codec("cast", to=form)]
    assert all(coder == made[0] for coder in made)


@pytest.mark.parametrize("text", ["rotated", "rotated(bits=4)", "taco", "sdp4bit"])
def test_codec_of_what_is_in_its_domain_is_another_one(text):
    coder = codec(text)
    assert coder.domain_codec != coder
    assert coder.domain_codec.spec == coder.spec
    assert coder.domain != VALUES
    assert coder.domain_codec.domain == VALUES
    assert coder.domain_codec.domain_codec == coder.domain_codec
    x = gaussian(512)
    wire = coder.encode(x)
    assert bits(coder.decode(wire)) != bits(coder.domain_codec.decode(wire))


def test_domains_are_equal_if_their_transforms_are():
    assert codec("rotated").domain == codec("rotated(bits=4)").domain == codec("table").domain
    others = [codec(text).domain for text in ("rotated", "rotated(block=64)", "taco", "sdp4bit")]
    assert len(set(others)) == 4
    for text in ("int8", "tahquant", "equarx", "exponent", "topk"):
        assert codec(text).domain == VALUES


def test_grids_made_for_other_blocks_differ():
    """Two blocks of 256 values, one of them coded with the grid for blocks of 64."""
    one, other = codec("rotated", block=64), codec("rotated", block=256)
    assert one.grid != other.grid
    assert one.domain_codec != dataclasses.replace(other.domain_codec, layout=one.layout)
    assert codec("rotated", block=64, form="int").grid == codec("rotated", form="int").grid


def test_salt_makes_another_codec_only_where_there_is_noise():
    coder = codec("int4(rounding=stochastic, seed=7)")
    x = gaussian(300)
    salted = coder.salted(1, 2)
    assert coder.salted(1, 2) == salted != coder
    assert bits(salted.encode(x).payload) != bits(coder.encode(x).payload)
    assert bits(salted.decode(coder.encode(x))) == bits(coder.decode(coder.encode(x)))
    assert codec("int4").salted(1, 2) == codec("int4")
    assert codec("topk(values=int8)").salted(3) == codec("topk(values=int8)")
    random = codec("topk(values=int8(rounding=stochastic))")
    assert random.salted(3) != random


def test_references_and_ranks_and_tables_count_for_what_they_do():
    held = gaussian(4, 5)
    coder = codec("difference")
    assert coder.against(held) == coder.against(held) != coder
    assert coder.against(held) != coder.against(held.clone())  # which may become different
    assert hash(coder.against(held)) == hash(coder.against(held))
    channels = Channels(8, (1,), ((1.0,) * 8, (2.0,) * 8))
    outlier = built(channels)
    assert len({outlier, outlier.at(0), outlier.at(1)}) == 3
    assert outlier.with_constants(outlier.constants(torch.ones(1))) == outlier
    assert built(Channels(8, (2,), channels.ranges)) != outlier


@pytest.mark.parametrize("text", [*OTHERS, "rotated", "tahquant", "equarx(width=96)", "taco"])
def test_codecs_are_data(text):
    """No part is a function: a codec can be serialized and read again."""
    assert pickle.loads(pickle.dumps(codec(text))) == codec(text)


DISPATCHED = [
    *((grids.Grid, each) for each in (grids.encode, grids.decode)),
    *((scales.Scale, each) for each in (scales.divide, scales.refit, scales.multiply)),
    *((scales.Scale, each) for each in (scales.bound, scales.floor)),
    *((transforms.Transform, each) for each in (transforms.forward, transforms.inverse)),
    *((transforms.Transform, each) for each in (domain.to_domain, domain.from_domain)),
    (noise.Rounding, noise.noise_of),
    (select.Selector, select.select),
    *((indices.IndexCode, each) for each in (indices.nbytes, indices.encode, indices.decode)),
]


@pytest.mark.parametrize(("part", "function"), DISPATCHED)
def test_every_type_of_a_part_is_registered_itself(part, function):
    """Dynamo of torch 2.11 cannot trace the search of singledispatch through base classes."""
    assert {*get_args(part), object} == set(function.registry)


def test_codecs_may_be_compared_in_compiled_code():
    coder, inside = codec("rotated"), codec("rotated").domain_codec

    def run(x):
        return x + 1 if coder == codec_again and coder != inside else x - 1

    codec_again = codec("rotated(bits=8)")
    call = torch.compile(run, backend="eager", fullgraph=True)
    assert call(torch.zeros(2)).tolist() == [1, 1]


def test_rotation_with_a_static_scale_is_refused():
    """Decode divides the scale on the wire by the sums of a rotation, and a static scale is not on
    the wire.

    Values would be decoded as many times too large.
    """
    rotated = codec("rotated(form=int)")
    with pytest.raises(PolicyError, match=r"Hadamard.*Static.*scale that travels"):
        dataclasses.replace(rotated, scale=scales.Static(0.5))
    plain = dataclasses.replace(codec("int8"), scale=scales.Static(0.02))
    x = torch.linspace(-1, 1, 256)
    assert (plain.decode(plain.encode(x)) - x).abs().max() <= 0.011
