"""``Policy.lowbit_tp``: which rules a calibration makes."""

from __future__ import annotations

import dataclasses

import pytest

from commpass.calibration.measured_sites import Address, CountedSite, ErrorLevel, MeasuredSites
from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Channels
from commpass.errors import PolicyError
from commpass.plan import Site
from commpass.policy import Policy
from commpass.policy.lowbit import SHARES

WIDTH = 128


@dataclasses.dataclass
class Found:
    places: tuple[MeasuredSites, ...]


def place(module: str, *, sensitivity: float = 1.0, far: float = 30.0, **more) -> MeasuredSites:
    """A place with channels whose ranges on two ranks fall from ``far`` to 1."""
    row = tuple(max(1.0, far / (1 + channel)) for channel in range(WIDTH))
    channels = Channels(WIDTH, (), (row, tuple(2 * each for each in row)), row)
    site = Site(
        name="s",
        kind=more.get("kind", "all_reduce"),
        reduce_op="sum",
        group="0",
        group_size=2,
        dtype="float32",
        shape=(64, WIDTH),
        bytes=64 * WIDTH * 4,
        module=module,
        direction=more.get("direction", "forward"),
    )
    return MeasuredSites(
        where=(Address(module, site.kind, site.direction, "tp"),),
        sites=(CountedSite(site=site, calls=1.0),),
        errors={},
        levels=(ErrorLevel(codec="int4", error=0.1, sensitivity=sensitivity),),
        statistics=more.get("statistics", channels.to_text()),
    )


def kept(policy: Policy) -> dict[str, int]:
    return {str(r.module): len(codec(r.codec[0]).channels.kept) for r in policy.rules}


def test_rules_are_for_sums_of_forward_that_have_channels():
    found = Found(
        (
            place("a.b"),
            place("c"),
            place("d", direction="backward"),
            place("e", kind="all_gather"),
            place("f", statistics=""),
        )
    )
    policy = Policy.lowbit_tp(found)
    assert [rule.module for rule in policy.rules] == ["a.b", "c"]
    for rule in policy.rules:
        assert (rule.kind, rule.direction) == ("all_reduce", "forward")
        assert rule.algorithm == ("one_shot",)
        used = codec(rule.codec[0]).channels
        assert used.kept == (0, 1)
        assert len(used.ranges) == 2
    shared = Policy.lowbit_tp(found, 1 / 32, per_rank=False, algorithm=("two_shot", "ring"), bits=6)
    for rule in shared.rules:
        assert rule.algorithm == ("two_shot", "ring")
        coder = codec(rule.codec[0])
        assert (len(coder.channels.ranges), len(coder.channels.kept), coder.largest) == (1, 4, 31)


def test_rule_of_a_module_inside_of_another_comes_first():
    policy = Policy.lowbit_tp(Found((place("a"), place("b"), place("a.b.c"), place("a.b"))))
    assert [rule.module for rule in policy.rules] == ["a.b.c", "a.b", "a", "b"]


def test_share_may_be_of_each_layer():
    found = Found((place("layers.0.mlp"), place("layers.1.mlp")))
    policy = Policy.lowbit_tp(found, {"layers.0": 1 / 16})
    assert kept(policy) == {"layers.0.mlp": 8, "layers.1.mlp": 2}
    with pytest.raises(PolicyError, match=r"no layer is called 'layer.0'"):
        Policy.lowbit_tp(found, {"layer.0": 1 / 16})


def test_share_by_sensitivity_keeps_more_where_the_model_minds_errors():
    found = Found((place("a", sensitivity=10.0), place("b"), place("c", far=1.0)))
    counts = kept(Policy.lowbit_tp(found, "sensitivity"))
    assert counts["a"] > counts["b"] >= counts["c"] == 0
    assert sum(counts.values()) <= 3 * WIDTH // 64
    assert all(count / WIDTH in SHARES for count in counts.values())
    alike = kept(Policy.lowbit_tp(Found((place("a"), place("b"))), "sensitivity"))
    assert alike == {"a": 2, "b": 2}


def test_calibration_without_channels_is_refused_with_what_to_do():
    with pytest.raises(PolicyError, match="outliers=True"):
        Policy.lowbit_tp(Found((place("d", direction="backward"),)))
    with pytest.raises(PolicyError, match="did you mean 'sensitivity'"):
        Policy.lowbit_tp(Found((place("a"),)), "sensitive")
