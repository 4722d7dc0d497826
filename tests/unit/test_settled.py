"""What a rank treats as agreed, and executes without a new round; and what it accepts as the other
ranks' answers."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
from torch import fx

import commpass
from commpass.backend.agree import _participant
from commpass.distributed.agreement import _is_agreed
from commpass.distributed.origin import Origin
from commpass.distributed.parts import Part, call_of
from commpass.distributed.plan_store import History, NoChange, Participant, PlanStore
from commpass.distributed.reuse import _Published
from commpass.plan import Grouped, Plan, Simplification, Site, uncompressed
from commpass.policy import Policy

PARTICIPANT = Participant("policy", "custom", "backend", "function", "call")


def part(**changes: object) -> Part:
    """Return a plan of three uncompressed sums in different modules."""
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
    alone = tuple(uncompressed(site, "") for site in sites)
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
def test_same_of_each_site_is_not_enough_where_sites_were_put_together(first, second):
    history = History(group=None)
    history.agree(PARTICIPANT, first.digest, first.decisions())
    assert first.decisions() == second.decisions()
    assert first.digest != second.digest
    assert _is_agreed(first, history, PARTICIPANT.scope)
    assert not _is_agreed(second, history, PARTICIPANT.scope)


def test_part_of_what_was_agreed_on_is_settled():
    history = History(group=None)
    known = part()
    history.agree(PARTICIPANT, "digest of more", known.decisions())
    assert _is_agreed(known, history, PARTICIPANT.scope)
    assert not _is_agreed(known, history, "another/function")


def test_another_order_of_exchanges_is_not_settled():
    history = History(group=None)
    first, second = part(reordered=("b", "a", "c")), part(reordered=("c", "a", "b"))
    history.agree(PARTICIPANT, first.digest, first.decisions())
    assert first.digest != second.digest
    assert _is_agreed(first, history, PARTICIPANT.scope)
    assert not _is_agreed(second, history, PARTICIPANT.scope)


def test_note_that_was_heeded_before_is_no_answer():
    mine = merged(0, 1)

    def note(repeats: int) -> NoChange:
        who = (PARTICIPANT.digest, PARTICIPANT.name, "")
        call = call_of(mine, PARTICIPANT)
        return NoChange(0, mine.outline, mine.sites, *who, call, repeats, mine.digest)

    history = History(group=None, repeats={note(0).graph: 1})
    published = _Published(SimpleNamespace(rank=0), {mine.key: mine}, {mine.key: history}, {})
    published.own_notes = {mine.key: note(2)}
    published.links = {mine.key: SimpleNamespace(call=PARTICIPANT.call)}
    found = [repeats for repeats in range(4) if published._is_of_graph(mine.key, note(repeats))]
    assert found == [2, 3]


def test_participants_differ_by_profile_and_policy_whatever_their_names():
    def digest(policy: Policy, gbit: float) -> str:
        shared = SimpleNamespace(policy=policy, run="r", resets=0)
        profile = dataclasses.replace(commpass.ethernet(gbit), name="ours")
        job = SimpleNamespace(profile=profile, origin=Origin(), direction="forward")
        return _participant(shared, job).digest

    ours = Policy(name="ours", codecs=("int8",))
    assert digest(ours, 1) == digest(dataclasses.replace(ours, name="theirs"), 1)
    others = [(ours, 1), (ours, 10), (dataclasses.replace(ours, codecs=("fp8",)), 1)]
    assert len({digest(*each) for each in others}) == 3


def test_group_with_the_name_of_one_before_continues_its_rounds():
    """The votes of the earlier rounds are still stored, and must not count as new ones."""
    first, second = (fx.Graph() for _ in range(2))  # any objects that can be referred to weakly
    store = PlanStore(weakref.ref(first), 0, "nonce")
    before = store.history("group", first)
    before.count = 3
    before.agree(PARTICIPANT, "digest", {"site": "int8"})
    assert store.history("group", first) is before
    after = store.history("group", second)
    assert after.count == 3
    assert not after.agreed_digests
    assert store.history("other", second).count == 0
