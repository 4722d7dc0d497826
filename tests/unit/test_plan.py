"""Plans as data: JSON round trips, digests, differences; and dumps, which are written whole under
separate numbers."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import threading
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from commpass.distributed.differences import cause
from commpass.distributed.summary import Summary
from commpass.errors import DumpError
from commpass.plan import (
    AGREED_FIELDS,
    NONE,
    ROWS,
    Difference,
    Grouped,
    Plan,
    PlannedSite,
    Simplification,
    Site,
    Split,
    diff,
)
from commpass.plan import dump as dumps
from commpass.plan.dump import Dump, GraphNode
from commpass.plan.kinds import KINDS
from commpass.plan.stage import Stage
from commpass.policy import Policy

tried = settings(max_examples=examples(26, 80), deadline=None)


def planned(name="all_reduce", **changes) -> PlannedSite:
    facts = {
        "name": name,
        "kind": "all_reduce",
        "reduce_op": "sum",
        "group": "3",
        "group_label": "tp",
        "group_size": 8,
        "dtype": "bfloat16",
        "shape": ("s0", 4096),
        "bytes": 1 << 20,
        "module": "layers.0.mlp",
        "codec": "int8",
        "algorithm": "two_shot",
        "wire_bytes": 1 << 19,
        "plain_us": 100.0,
        "predicted_us": 60.0,
        "error": 0.01,
        "reason": "faster",
    }
    return PlannedSite(**(facts | changes))


def plan(*sites: PlannedSite, **changes) -> Plan:
    return Plan(
        **(
            {
                "graph": "0",
                "direction": "forward",
                "policy": "custom",
                "profile": "ethernet-10g",
                "sites": sites,
            }
            | changes
        )
    )


TEXTS = st.text(max_size=12)
TIMES = st.floats(0, 1e12)
SPLITS = st.lists(
    st.integers(0, 1 << 40) | st.sampled_from(["u0", "u0 + u1", "64"]), min_size=1, max_size=4
).map(tuple)
SITES = st.builds(
    PlannedSite,
    name=TEXTS,
    kind=st.sampled_from(list(KINDS)),
    reduce_op=st.none() | TEXTS,
    group=TEXTS,
    group_label=TEXTS,
    group_size=st.integers(0, 1 << 20),
    dtype=st.sampled_from(["float32", "bfloat16", "unknown"]),
    shape=st.lists(
        st.integers(0, 1 << 40) | st.sampled_from(["s0", "2*s1 + 3", "u0", "64"]), max_size=4
    ).map(tuple),
    bytes=st.integers(-1, 1 << 50),
    device=st.sampled_from(["cpu", "cuda"]),
    module=TEXTS,
    direction=st.sampled_from(["forward", "backward"]),
    annotation=st.none() | TEXTS,
    unsupported_reason=st.none() | TEXTS,
    width=st.integers(0, 1 << 40),
    splits=st.none() | st.tuples(SPLITS, SPLITS),
    stateless=st.none() | TEXTS,
    domain=TEXTS,
    dynamic_bytes=st.integers(0, 1 << 50),
    codec=st.sampled_from([NONE, "int8", "fp8(form=e5m2)"]),
    algorithm=TEXTS,
    chunks=st.integers(1, 64),
    fused=st.booleans(),
    wire_bytes=st.integers(-1, 1 << 50),
    plain_us=TIMES,
    predicted_us=TIMES,
    error=st.floats(0, 10),
    reason=TEXTS,
)
PLANS = st.builds(
    Plan,
    graph=TEXTS,
    direction=st.sampled_from(["forward", "backward"]),
    policy=TEXTS,
    profile=TEXTS,
    sites=st.lists(SITES, max_size=4).map(tuple),
    fallback=TEXTS,
    simplified=st.lists(
        st.builds(
            Simplification, rule=TEXTS, site=TEXTS, into=TEXTS, saved_bytes=st.integers(-1, 1 << 50)
        ),
        max_size=2,
    ).map(tuple),
    grouped=st.lists(
        st.builds(
            Grouped,
            sites=st.lists(TEXTS, max_size=3).map(tuple),
            modules=st.lists(TEXTS, max_size=3).map(tuple),
            into=TEXTS,
            group=TEXTS,
            numbers=st.lists(st.integers(0, 99), max_size=3).map(tuple),
            bytes=st.lists(st.integers(0, 1 << 30), max_size=3).map(tuple),
            reason=TEXTS,
        ),
        max_size=2,
    ).map(tuple),
    split=st.lists(
        st.builds(
            Split,
            site=TEXTS,
            into=st.lists(TEXTS, max_size=3).map(tuple),
            rows=st.lists(st.integers(1, 64), max_size=3).map(tuple),
            reason=TEXTS,
        ),
        max_size=2,
    ).map(tuple),
)


def sizes(site: PlannedSite) -> tuple[int | str, ...]:
    return (*site.shape, *(site.splits[0] + site.splits[1] if site.splits else ()))


# --- JSON -----------------------------------------------------------------------------------------


@tried
@given(PLANS)
def test_plan_comes_back_from_json_as_it_was(one):
    back = Plan.from_json(one.to_json())
    assert back == one
    assert back.digest() == one.digest()
    assert all(
        type(size) is type(was)
        for a, b in zip(back, one, strict=True)
        for size, was in zip(sizes(a), sizes(b), strict=True)
    )
    assert diff(one, back, [field.name for field in dataclasses.fields(PlannedSite)]) == []


def test_plan_of_an_older_version_is_read_without_its_unused_fields():
    one = plan(planned())
    old = json.loads(one.to_json())
    old["sites"][0] |= {"producer": "mm", "consumers": ["relu"]}
    assert Plan.from_json(json.dumps(old)) == one


def _with_old_names(site: dict) -> dict:
    old = {"annotation": "word", "unsupported_reason": "obstacle"}
    return {old.get(name, name): value for name, value in site.items()}


def test_plan_of_an_older_version_is_read_by_the_old_names_of_its_fields():
    one = plan(planned(annotation='{"keep": true}', unsupported_reason="nobody waits for it"))
    old = json.loads(one.to_json())
    old["sites"] = [_with_old_names(site) for site in old["sites"]]
    assert "word" in old["sites"][0]
    assert Plan.from_json(json.dumps(old)) == one


def test_dump_of_an_older_version_is_read_by_the_old_names_of_its_fields(tmp_path):
    now = dump()
    path = dumps.write(tmp_path, now)
    old = json.loads(path.read_text()) | {"version": 1}
    old["plan"]["sites"] = [_with_old_names(site) for site in old["plan"]["sites"]]
    path.write_text(json.dumps(old))
    assert dumps.read(path).plan == now.plan


def test_json_of_a_plan_names_what_the_design_names():
    (site,) = json.loads(plan(planned()).to_json())["sites"]
    named = """name kind reduce_op group_size dtype shape bytes module direction codec algorithm
    chunks fused wire_bytes plain_us predicted_us reason"""
    assert set(named.split()) <= set(site)
    assert site["shape"] == ["s0", 4096]


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", "3", '{"graph": "0"}'])
def test_objects_other_than_plans_are_refused(text):
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        Plan.from_json(text)


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.99])
def test_plan_cut_short_is_refused(cut):
    text = plan(planned()).to_json()
    with pytest.raises(msgspec.DecodeError):
        Plan.from_json(text[: int(len(text) * cut)])


def test_shape_of_another_type_is_refused():
    with pytest.raises(msgspec.ValidationError, match="shape"):
        Plan.from_json(plan(planned()).to_json().replace('"s0"', "0.5"))


def test_size_as_text_is_dynamic():
    assert planned().dynamic
    assert not planned(shape=(3, 4096)).dynamic
    assert not planned(shape=()).dynamic


def test_summary_of_a_model_says_what_it_could_not_count():
    summary = Summary(Policy())
    summary.add(plan(planned(), planned(bytes=-1, wire_bytes=-1)), trained=True)
    assert (
        "2 sites, 2 compressed; each graph run once: 1,048,576 bytes -> 524,288" in summary.line()
    )
    assert ", collectives predicted " in summary.line()  # not the time of the graphs
    assert summary.line().endswith(", 1 site of unknown size not counted")


def test_summary_of_a_model_begins_with_policy_and_profile_and_says_the_gain():
    summary = Summary(Policy())
    summary.add(plan(planned()), trained=True, profile="ethernet-1g (nominal rate, not measured)")
    found = summary.line()
    assert found.startswith(
        "policy 'custom', profile ethernet-1g (nominal rate, not measured): 1 graph, 1 site,"
    )
    assert "1,048,576 bytes -> 524,288 (50% less), collectives predicted " in found


# --- digest ---------------------------------------------------------------------------------------

OTHER = {
    "kind": "all_gather",
    "reduce_op": "avg",
    "group_size": 4,
    "dtype": "float32",
    "shape": (7, 4096),
    "module": "layers.1.mlp",
    "direction": "backward",
    "codec": "int4",
    "algorithm": "one_shot",
    "chunks": 2,
    "fused": True,
    "lowering": "kernel",
}
FREE = {
    "by_messages": True,
    "name": "other",
    "group": "9",
    "peer": 1,
    "tag": 7,
    "group_label": "dp",
    "group_labels": ("dp",),
    "members": (4, 5),
    "bytes": 7,
    "device": "cuda",
    "annotation": "{}",
    "label": "head.weight to head.bias, 2 parameters",
    "unsupported_reason": "some",
    "width": 7,
    "stateless": None,
    "fixed": "its fake values have no ShapeEnv",
    "note": "chunks=4 does not apply",
    "wire_bytes": 7,
    "dynamic_bytes": 7,
    "domain": "hadamard",
    "plain_us": 7.0,
    "predicted_us": 7.0,
    "error": 0.5,
    "stages": (Stage(role="encode", values=7),),
    "refused": "some",
    "reason": "another",
    "hidden": True,
    "own_stream": True,
    "holds": "below 64 bytes",
    "exposed_us": 7.0,
    "unmoved_us": 7.0,
    "missed": "some",
}
"""Facts in which ranks may differ, or that follow from the others."""
AGREED_AS = {"shape": "common_shape"}
"""Facts of which a part is agreed, and that part. Which part depends on ``splits``, which is
neither agreed nor free."""


def test_each_field_of_a_site_is_agreed_or_free():
    assert {AGREED_AS.get(field, field) for field in OTHER} == set(AGREED_FIELDS)
    assert set(OTHER) | set(FREE) | {"splits"} == {
        field.name for field in dataclasses.fields(PlannedSite)
    }
    assert not set(OTHER) & set(FREE)


@pytest.mark.parametrize("field", OTHER)
def test_digest_differs_if_an_agreed_field_does(field):
    changed, agreed = planned("b", **{field: OTHER[field]}), AGREED_AS.get(field, field)
    one, other = plan(planned("a"), planned("b")), plan(planned("a"), changed)
    assert one.digest() != other.digest()
    assert diff(one, other) == [
        Difference("b", agreed, getattr(planned(), agreed), getattr(changed, agreed))
    ]


def exchanged(
    entries: int | str, width: int = 4096, splits=((3, 4), (5, 2)), **changes
) -> PlannedSite:
    """An all-to-all among two ranks."""
    facts = {"kind": "all_to_all", "reduce_op": None, "group_size": 2, "algorithm": "direct"}
    return planned(**facts | {"shape": (entries, width), "splits": splits} | changes)


def test_first_dimensions_may_differ_between_ranks_in_an_all_to_all_with_splits_and_nowhere_else():
    assert exchanged(7).common_shape == exchanged("u0").common_shape == (4096,)
    mine, theirs = exchanged(7), exchanged(9, splits=((5, 4), (4, 4)))
    unknown = exchanged("u0 + u1", splits=(("u0", "u1"), ("u2", "u3")))
    assert plan(mine).digest() == plan(theirs).digest() == plan(unknown).digest()
    assert diff(plan(mine), plan(theirs)) == diff(plan(mine), plan(unknown)) == []
    for facts in (
        {},
        {"kind": "all_gather"},
        {"kind": "all_reduce", "reduce_op": "sum"},
        {"kind": "broadcast"},
    ):
        left, right = (exchanged(entries, splits=None, **facts) for entries in (7, 9))
        assert left.common_shape == (7, 4096)
        assert plan(left).digest() != plan(right).digest()
        assert diff(plan(left), plan(right)) == [
            Difference("all_reduce", "common_shape", (7, 4096), (9, 4096))
        ]


def test_other_dimensions_are_agreed_in_an_all_to_all_with_splits_too():
    assert plan(exchanged(7)).digest() != plan(exchanged(7, 4095)).digest()
    assert plan(exchanged(7)).digest() != plan(exchanged(7, splits=None)).digest()
    assert diff(plan(exchanged(7)), plan(exchanged(9, 4095))) == [
        Difference("all_reduce", "common_shape", (4096,), (4095,))
    ]
    assert exchanged(7, shape=(7,)).common_shape == ()


@pytest.mark.parametrize(
    ("splits", "uneven"),
    [
        (None, False),
        (((3, 3), (3, 3)), False),
        (((3, 4), (3, 3)), True),
        (((3, 3), (3, 4)), True),
        (((3, 3), (4, 4)), True),
        ((("u0", "u0"), ("u0", "u0")), True),
        (((3, "u0"), (3, 3)), True),
        (((3, 3), ("u0", "u1")), True),
    ],
)
def test_sizes_that_differ_or_are_not_known_are_uneven(splits, uneven):
    assert exchanged(6, splits=splits).uneven is uneven


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)]
)
def test_ranks_take_an_uneven_exchange_for_one_of_1024_entries_from_each_to_each(dtype, itemsize):
    assert ROWS == 1024
    of_forty = dataclasses.replace(exchanged(7, 40), dtype=dtype, width=40, bytes=7 * 40 * itemsize)
    for splits in (((3, 4), (5, 2)), ((0, 7), (9000, 0)), (("u0", "u1"), ("u2", "u3"))):
        site = dataclasses.replace(of_forty, splits=splits)
        assert site.common_bytes == 1024 * 2 * 40 * itemsize
        assert dataclasses.replace(site, group_size=64).common_bytes == 1024 * 64 * 40 * itemsize
    for splits in (None, ((3, 3), (3, 3))):
        assert dataclasses.replace(of_forty, splits=splits).common_bytes == 7 * 40 * itemsize


@pytest.mark.parametrize("field", FREE)
def test_digest_is_the_same_whatever_ranks_may_differ_in(field):
    assert plan(planned()).digest() == plan(planned(**{field: FREE[field]})).digest()


def test_digest_differs_if_the_direction_of_the_graph_does():
    assert plan(planned()).digest() != plan(planned(), direction="backward").digest()


@pytest.mark.parametrize("field", ["graph", "policy", "profile"])
def test_digest_is_of_what_is_done_not_of_how_it_is_called(field):
    assert plan(planned()).digest() == plan(planned(), **{field: "other"}).digest()


def test_fallback_is_part_of_a_digest_but_its_words_are_not():
    done, failed, otherwise = (
        plan(planned()),
        plan(planned(), fallback="rewrite failed"),
        plan(planned(), fallback="verify failed"),
    )
    assert done.digest() != failed.digest()
    assert failed.digest() == otherwise.digest()


def test_digest_is_of_what_algebra_did_moved_and_merged_but_not_of_names():
    done = {
        "rule": "sum of sums",
        "site": "all_reduce_1",
        "into": "all_reduce",
        "saved_bytes": 256,
        "group": "3",
        "numbers": (0, 1),
    }
    one, other, scaled, apart, elsewhere = (
        plan(planned(), simplified=(Simplification(**done | changes),))
        for changes in (
            {},
            {"rule": "same"},
            {"moved": ("mul 2.0",)},
            {"numbers": (2, 3)},
            {"site": "all_reduce_2", "saved_bytes": 512},
        )
    )
    assert len({each.digest() for each in (plan(planned()), one, other, scaled, apart)}) == 5
    assert one.digest() == elsewhere.digest()


def test_digest_is_of_which_sites_were_grouped_but_not_of_their_names():
    done = {
        "sites": ("a", "b"),
        "modules": ("x", "x"),
        "into": "c",
        "group": "3",
        "numbers": (0, 1),
        "bytes": (4, 4),
        "reason": "faster",
    }
    one, other, elsewhere = (
        plan(planned(), grouped=(Grouped(**done | changes),))
        for changes in ({}, {"numbers": (0, 2)}, {"sites": ("d", "e")})
    )
    assert len({each.digest() for each in (plan(planned()), one, other)}) == 3
    assert one.digest() == elsewhere.digest()


def test_digest_is_of_the_rows_of_a_split_but_not_of_why():
    done = {"site": "all_reduce", "into": ("a", "b"), "rows": (64, 64), "through": ("mm",)}
    one, other, told = (
        plan(planned(), split=(Split(**done | changes),))
        for changes in ({}, {"rows": (60, 68)}, {"reason": "because", "through": ()})
    )
    assert len({each.digest() for each in (plan(planned()), one, other)}) == 3
    assert one.digest() == told.digest()


def test_digests_tell_a_number_from_a_name_and_one_site_from_two():
    plans = [
        plan(planned(shape=(64,))),
        plan(planned(shape=("64",))),
        plan(planned(shape=(6, 4))),
        plan(planned(reduce_op=None)),
        plan(planned(reduce_op="None")),
        plan(planned(), planned()),
        plan(planned()),
        plan(),
    ]
    assert len({one.digest() for one in plans}) == len(plans)


@tried
@given(PLANS, st.data())
def test_plans_have_one_digest_if_and_only_if_they_decide_the_same(one, data):
    changes = data.draw(st.lists(st.sampled_from(sorted(OTHER | FREE)), max_size=3, unique=True))
    which = data.draw(st.integers(0, max(len(one.sites) - 1, 0)))
    sites = [
        (
            dataclasses.replace(site, **{field: (OTHER | FREE)[field] for field in changes})
            if index == which
            else site
        )
        for index, site in enumerate(one)
    ]
    other = dataclasses.replace(one, sites=tuple(sites), policy="another")
    common = [
        [[getattr(site, field) for field in AGREED_FIELDS] for site in plan.common()]
        for plan in (one, other)
    ]
    same = common[0] == common[1]
    assert (one.digest() == other.digest()) == same


def test_digest_is_16_hexadecimal_digits():
    assert re.fullmatch("[0-9a-f]{16}", plan(planned()).digest())


# --- difference -----------------------------------------------------------------------------------


def test_equal_plans_have_no_difference():
    assert diff(plan(planned("a"), planned("b")), plan(planned("a"), planned("b"))) == []
    assert diff(plan(), plan()) == []


def test_difference_lists_every_field_of_every_site_that_differs_and_no_other():
    left = plan(planned("a"), planned("b"), planned("c"))
    right = plan(
        planned("a", codec="int4", chunks=2),
        planned("b", reason="x", predicted_us=1.0),
        planned("c", shape=("s1", 4096)),
    )
    assert diff(left, right) == [
        Difference("a", "codec", "int8", "int4"),
        Difference("a", "chunks", 1, 2),
        Difference("c", "common_shape", ("s0", 4096), ("s1", 4096)),
    ]
    assert diff(left, right, ["reason"]) == [Difference("b", "reason", "faster", "x")]
    assert diff(left, right, []) == []


def test_site_that_only_one_plan_has_is_one_difference():
    left, right = (
        plan(planned("a"), planned("b")),
        plan(planned("b"), planned("c", kind="all_gather")),
    )
    assert diff(left, right) == [
        Difference("a", "site", "all_reduce", None),
        Difference("c", "site", None, "all_gather"),
    ]
    assert [str(one) for one in diff(left, right)] == [
        "a: only in the first",
        "c: only in the second",
    ]


def test_fallback_on_one_side_is_a_difference():
    left, right = plan(planned()), plan(planned(), fallback="rewrite failed")
    assert diff(left, right) == [Difference("(graph)", "fallback", "", "rewrite failed")]
    assert diff(right, plan(planned(), fallback="verify failed")) == []


def test_difference_says_what_both_sides_say():
    assert (
        str(Difference("a", "codec", "int8", "int4"))
        == "a: codec is 'int8' in the first and 'int4' in the second"
    )


UNLIKE = {
    "codec": (plan(planned("a")), plan(planned("a", codec="int4"))),
    "fallback": (plan(planned("a")), plan(planned("a"), fallback="failed")),
    "direction of the graph": (plan(planned("a")), plan(planned("a"), direction="backward")),
    "direction of an empty graph": (plan(), plan(direction="backward")),
    "order of the sites": (
        plan(planned("a"), planned("b", codec="int4")),
        plan(planned("b", codec="int4"), planned("a")),
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_plans_with_different_digests_have_a_difference_to_show(what):
    """Law 5: ranks that planned differently get a report of the difference."""
    left, right = UNLIKE[what]
    assert left.digest() != right.digest()
    assert diff(left, right)


def test_cause_of_different_kernels_is_no_difference_of_models():
    one, other = plan(planned("a", fused=True)), plan(planned("a", fused=False))
    assert "processors or compilers differ" in cause(diff(one, other))
    other = plan(planned("a", fused=False, codec="int4"))
    assert "the model or its inputs differ" in cause(diff(one, other))


def test_part_of_a_group_has_its_sites_in_order_and_all_else():
    whole = plan(
        planned("a", group="1"), planned("b", group="2"), planned("c", group="1"), fallback="failed"
    )
    part = whole.of_group("1")
    assert [site.name for site in part] == ["a", "c"]
    assert dataclasses.replace(part, sites=whole.sites) == whole
    assert part.digest() != whole.of_group("2").digest()
    assert whole.of_group("3").sites == ()


def test_sites_carried_out_alone_count_as_compressed():
    sites = planned("a"), planned("b", codec=NONE)
    assert [site.name for site in plan(*sites).compressed] == ["a"]
    assert plan(*sites, fallback="failed").compressed == ()
    assert (
        Site(
            **{field.name: getattr(sites[0], field.name) for field in dataclasses.fields(Site)}
        ).name
        == "a"
    )


# --- dumps ----------------------------------------------------------------------------------------


def dump(run: str = "one", direction: str = "forward", **changes) -> Dump:
    return Dump(
        run=run,
        commpass="0.1.0",
        torch="2.13.0",
        rank=0,
        world_size=8,
        written="2026-01-01T00:00:00+00:00",
        plan=plan(planned(), direction=direction),
        **changes,
    )


def test_dump_is_read_as_it_was_written(tmp_path):
    one = dump(
        policy={"name": "custom", "codecs": ["int8"]},
        profile={"margin": 0.1},
        passes_ms={"decide": 0.5},
        before=(GraphNode(name="x", op="placeholder", target="x", value="float32[s0, 4]"),),
        after=(
            GraphNode(
                name="y",
                op="call_function",
                target="aten.mul",
                inputs=("x",),
                site="all_reduce",
                inserted=True,
            ),
        ),
    )
    path = dumps.write(tmp_path / "deep" / "folder", one)
    assert path == tmp_path / "deep" / "folder" / "0000-forward.json"
    assert dumps.read(path) == one


def test_each_dump_takes_the_next_number_whatever_its_direction(tmp_path):
    paths = [
        dumps.write(tmp_path, dump(direction=direction))
        for direction in ("forward", "backward", "forward")
    ]
    assert [path.name for path in paths] == [
        "0000-forward.json",
        "0001-backward.json",
        "0002-forward.json",
    ]
    assert [dumps.read(path).number for path in paths] == [0, 1, 2]
    assert dumps.files(tmp_path) == paths


def test_next_number_is_one_above_the_largest_there_is(tmp_path):
    for name in (
        "0041-forward.json",
        "0007-backward.json",
        "notes-forward.json",
        "0099-forward.txt",
        "9999.json",
    ):
        (tmp_path / name).write_text("mine")
    assert dumps.write(tmp_path, dump()).name == "0042-forward.json"
    assert (tmp_path / "0041-forward.json").read_text() == "mine"


def test_numbers_of_five_digits_come_behind_those_of_four(tmp_path):
    (tmp_path / "9999-forward.json").write_text("{}")
    paths = [dumps.write(tmp_path, dump()) for _ in range(2)]
    assert [path.name for path in dumps.files(tmp_path)] == [
        "9999-forward.json",
        "10000-forward.json",
        "10001-forward.json",
    ]
    assert [dumps.read(path).number for path in paths] == [10000, 10001]


def together(functions) -> None:
    """Run functions in threads; raise what one of them raised."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    "directions",
    [["forward"] * 8, ["forward", "backward"] * 4],
    ids=["one direction", "both directions"],
)
def test_writers_at_the_same_time_take_different_numbers_and_lose_nothing(
    directions, tmp_path, monkeypatch
):
    barrier = threading.Barrier(len(directions), timeout=100)
    real = dumps.files

    def files(folder):
        found = real(folder)
        time.sleep(0.02)  # time enough for all others to see the same number as free
        return found

    monkeypatch.setattr(dumps, "files", files)

    def write(writer, direction):
        barrier.wait()
        for turn in range(3):
            dumps.write(tmp_path, dump(f"{writer}.{turn}", direction))

    together(
        [lambda w=writer, d=direction: write(w, d) for writer, direction in enumerate(directions)]
    )
    paths = real(tmp_path)
    written = [dumps.read(path) for path in paths]
    assert sorted(one.run for one in written) == sorted(
        f"{w}.{turn}" for w in range(len(directions)) for turn in range(3)
    )
    assert [one.number for one in written] == list(range(3 * len(directions)))
    assert [path.name for path in paths] == [
        f"{one.number:04d}-{one.plan.direction}.json" for one in written
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_dump_that_does_not_fit_leaves_nothing_behind(tmp_path):
    dumps.write(tmp_path, dump())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (200, limits[1])
    )  # the largest size of a file, as if the disk were full
    try:
        with pytest.raises(OSError, match="too large"):
            dumps.write(tmp_path, dump())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["0000-forward.json"]
    assert dumps.write(tmp_path, dump()).name == "0001-forward.json"


def test_newest_run_of_a_folder_is_read_unless_another_is_named(tmp_path):
    for run, direction in (
        ("old", "forward"),
        ("old", "backward"),
        ("new", "forward"),
        ("old", "forward"),
        ("new", "backward"),
    ):
        dumps.write(tmp_path, dump(run, direction))
    assert [(one.run, one.number) for one in dumps.read_run(tmp_path)] == [("new", 2), ("new", 4)]
    assert [(one.run, one.number) for one in dumps.read_run(tmp_path, "old")] == [
        ("old", 0),
        ("old", 1),
        ("old", 3),
    ]
    assert [one.number for one in dumps.read_run(tmp_path / "0003-forward.json")] == [3]


def test_run_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    dumps.write(tmp_path, dump("3f2a90b1"))
    with pytest.raises(DumpError, match=r"3f2a90b2.*did you mean '3f2a90b1'"):
        dumps.read_run(tmp_path, "3f2a90b2")
    for path, said in (
        (tmp_path / "none", "no such file"),
        (tmp_path / "empty", "no dump in this folder"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(DumpError, match=said) as error:
            dumps.read_run(path)
        assert str(path) in str(error.value)


SPOILT = {
    "cut short": (lambda text: text[: len(text) // 2], "cut short"),
    "empty": (lambda text: "", "cut short"),
    "no JSON": (lambda text: "dump", "not JSON"),
    "another's": (lambda text: '{"a": 1}', "not a commpass dump"),
    "newer": (
        lambda text: text.replace('"version": 2', '"version": 3'),
        "version 3.*newer commpass",
    ),
    "damaged": (
        lambda text: text.replace('"world_size": 8', '"world_size": "8"'),
        r"damaged.*world_size",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_file_that_is_no_dump_of_ours_is_refused_with_its_name_and_what_is_wrong(what, tmp_path):
    spoil, said = SPOILT[what]
    path = dumps.write(tmp_path, dump())
    text = path.read_text()
    assert spoil(text) != text
    path.write_text(spoil(text))
    with pytest.raises(DumpError, match=said) as error:
        dumps.read_run(tmp_path)
    assert str(path) in str(error.value)


IMPOSSIBLE = {
    "kind": ({"kind": "all_reduced"}, r"sites\[0\]\.kind.*did you mean 'all_reduce'"),
    "ranks": ({"group_size": 0}, r"sites\[0\]\.group_size: 0, must be at least 1"),
    "bytes": ({"bytes": -5}, r"sites\[0\]\.bytes: -5, must be at least 0"),
    "wire bytes": ({"wire_bytes": -2}, r"sites\[0\]\.wire_bytes: -2"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_site_that_cannot_be_is_refused_with_its_place(what, tmp_path):
    changes, said = IMPOSSIBLE[what]
    spoilt = dataclasses.replace(planned("a"), **changes)
    with pytest.raises(DumpError, match=said):
        dumps.read(dumps.write(tmp_path, dataclasses.replace(dump(), plan=plan(spoilt))))
    unknown = dataclasses.replace(planned("a"), bytes=-1, wire_bytes=-1)  # unknown sizes
    dumps.read(dumps.write(tmp_path, dataclasses.replace(dump(), plan=plan(unknown))))


def test_plan_has_a_length_and_shows_itself_in_one_line():
    sites = [planned("a", codec="int8"), planned("b", codec=NONE), planned("c", codec=NONE)]
    one = plan(*sites, graph="7", direction="backward", policy="mine", profile="ethernet-1g")
    assert len(one) == len(list(one)) == 3
    assert repr(one) == (
        "<Plan: graph '7', backward, policy 'mine', profile 'ethernet-1g', 3 sites, 1 compressed>"
    )
    given_up = one.untouched(sites[:1], "pass fuse failed:\nKeyError")
    assert repr(given_up).endswith(", 1 site, fallback 'pass fuse failed:\\nKeyError'>")


def test_plan_without_sites_is_a_plan_all_the_same():
    assert len(plan()) == 0
    assert plan()


def test_order_in_which_exchanges_start_is_compared():
    sites = planned("first"), planned("second")
    orders = [(), ("first", "second"), ("second", "first")]
    assert len({plan(*sites, reordered=order).digest() for order in orders}) == 3
