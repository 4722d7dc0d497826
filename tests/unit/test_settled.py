"""What a rank takes for agreed on before, and carries out without asking the others."""

from __future__ import annotations

import pytest

from commpass.plan import Grouped, Plan, Simplification, Site, left_alone
from commpass.runtime.agreement import _settled
from commpass.runtime.board import History, Speaker
from commpass.runtime.parts import Part

SPEAKER = Speaker("policy", "custom", "backend", "function", "call")


def part(**changes: object) -> Part:
    """A plan of three sums of modules of their own, which are left alone."""
    sites = [
        Site(
            name=name,
            kind="all_reduce",
            reduce_op="sum",
            group="0",
            group_label="tp",
            group_size=2,
            dtype="float32",
            shape=(64, 32),
            bytes=64 * 32 * 4,
            module=f"layers.{name}",
        )
        for name in "abc"
    ]
    alone = tuple(left_alone(site, "") for site in sites)
    plan = Plan(
        graph="graph", direction="forward", policy="custom", profile="link", sites=alone, **changes
    )
    return Part("0@0-1", "0@0-1~policy", None, (0, 1), False, tuple(sites), plan)


def merged(*numbers: int) -> Part:
    done = Simplification(
        rule="sum of sums", site="a", into="", saved_bytes=8192, group="0", numbers=numbers
    )
    return part(simplified=(done,))


def grouped(*numbers: int) -> Part:
    done = Grouped(
        sites=("a", "b", "c"),
        modules=("layers.a", "layers.b", "layers.c"),
        into="d",
        group="0",
        numbers=numbers,
        bytes=(8192, 8192, 8192),
        gain_us=1.0,
        reason="",
    )
    return part(grouped=(done,))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (merged(0, 1), merged(0, 2)),
        (grouped(0, 1, 2), grouped(0, 2, 1)),
    ],
    ids=["simplified", "grouped"],
)
def test_the_same_of_each_site_is_not_enough_where_sites_were_put_together(first, second):
    past = History(group=None)
    past.agree(SPEAKER, first.digest, first.decisions())
    assert first.decisions() == second.decisions()
    assert first.digest != second.digest
    assert _settled(first, past, SPEAKER.scope)
    assert not _settled(second, past, SPEAKER.scope)


def test_a_part_of_what_was_agreed_on_is_settled():
    past = History(group=None)
    known = part()
    past.agree(SPEAKER, "digest of more", known.decisions())
    assert _settled(known, past, SPEAKER.scope)
    assert not _settled(known, past, "another/function")
