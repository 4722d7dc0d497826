"""Dynamic sizes: one graph on each side of the size from which codes gain."""

from __future__ import annotations

import pytest
import torch
from functional_ops import ar
from graphs import ops
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import commpass
from commpass.passes.breakeven import break_even
from commpass.passes.sizes import MOST
from commpass.policy import Policy
from commpass.policy.rules import Rule

WIDTH = 256
PROFILE = commpass.ethernet(1)
POLICY = Policy(codecs="int8", algorithms="two_shot", max_error=0.05)


@pytest.fixture(autouse=True)
def _group(fake_group):
    fake_group(4)
    counters.clear()


def layer(x, w):
    return torch.relu(ar(x @ w))


def run(function, rows, policy=POLICY, profile=PROFILE, marked=None, train=False, **given):
    """Run a function with tensors of the given numbers of rows; return the plans.

    The columns are fixed, and ``marked`` is passed to mark_dynamic.
    """
    before = len(commpass.plans())
    backend = commpass.backend(policy, profile=profile, inner="eager", strict=True)
    compiled = torch.compile(function, backend=backend, fullgraph=True, **given)
    w = torch.randn(WIDTH, WIDTH, requires_grad=train)
    for many in rows:
        x = torch.randn(many, WIDTH)
        torch._dynamo.mark_dynamic(x, 0, **(marked or {}))
        found = compiled(x, w)
        if train:
            found.sum().backward()
    return commpass.plans()[before:]


def edge(plan) -> int:
    """Return the number of rows from which the codec gains, found by trying all of them."""
    (site,) = plan
    return next(rows for rows in range(2, 4096) if _gains(site, rows * WIDTH * 4))


def _gains(site, nbytes: int) -> bool:
    import dataclasses

    from commpass.passes.candidates import candidates
    from commpass.passes.choose import choose
    from commpass.plan import Site
    from commpass.policy.rules import Allowed

    fields = {each.name: getattr(site, each.name) for each in dataclasses.fields(Site)}
    like = Site(**fields | {"bytes": nbytes, "shape": (nbytes // (WIDTH * 4), WIDTH)})
    allowed = Allowed(codecs=("int8",), algorithms=("two_shot",), max_error=0.05)
    options = candidates(like, allowed, PROFILE, True)
    return choose([like], [options], [allowed], PROFILE)[0].compressed


@pytest.mark.slow
def test_graph_on_each_side_of_the_size_from_which_codes_gain():
    small, large = run(layer, (4, 4000, 7, 900, 3, 2222))
    assert [site.codec for site in small] == ["none"]
    assert [site.codec for site in large] == ["int8"]
    assert small.sites[0].bytes == 4 * WIDTH * 4
    assert large.sites[0].bytes == 4000 * WIDTH * 4


@pytest.mark.every
def test_graph_ends_where_the_cost_model_decides_otherwise():
    (plan,) = run(layer, (4,))
    rows = edge(plan)
    torch._dynamo.reset()
    near = rows // 10 + 1  # it is solved to 2 %, and for rows of full blocks
    assert len(run(layer, (rows - near, rows + near))) == 2
    torch._dynamo.reset()
    assert len(run(layer, (rows + near, 2 * rows))) == 1
    torch._dynamo.reset()
    assert len(run(layer, (rows - near, 2))) == 1


@pytest.mark.every
def test_reason_says_where_a_plan_ends():
    small, large = run(layer, (4, 4000))
    assert "holds until 1024*s" in small.sites[0].reason
    assert "holds while 1024*s" in large.sites[0].reason
    assert large.sites[0].reason.endswith("else compiled anew")


@pytest.mark.slow
def test_training_compiles_both_graphs_twice_and_no_more():
    plans = run(layer, (4, 4000, 7, 900), train=True)
    assert [(plan.direction, plan.sites[0].codec) for plan in plans] == [
        ("forward", "none"),
        ("backward", "none"),
        ("forward", "int8"),
        ("backward", "int8"),
    ]


FORCED = Policy(rules=[Rule(codec="int8", algorithm="two_shot", force=True)])
SLOW = commpass.ethernet(1e-4)
"""A link on which a block saves more time than its coding takes."""


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "profile"),
    [
        (FORCED, PROFILE),
        (Policy(rules=[Rule(keep=True)]), PROFILE),
        (Policy(off=True), PROFILE),
        (POLICY, commpass.ethernet(1e5)),  # gains at no size
        (Policy(codecs="int8", algorithms="one_shot", max_error=0.05), SLOW),  # at every size
    ],
    ids=["forced", "kept", "off", "never", "always"],
)
def test_one_graph_where_no_size_changes_the_decision(policy, profile):
    # 4 rows are one block: torch's special case
    (plan,) = run(layer, (8, 4000, 11), policy, profile)
    assert "holds" not in plan.sites[0].reason


def test_bounds_of_the_user_are_not_narrowed():
    """Dynamo raises an error for a guard inside bounds that the user has promised."""
    (plan,) = run(layer, (4, 4000), marked={"min": 2, "max": 10_000})
    assert "holds" not in plan.sites[0].reason


def test_sizes_that_are_known_only_when_it_runs_are_no_guards():
    def chosen(x, w):
        return ar((x @ w)[x[:, 0] > 0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (plan,) = run(chosen, (64, 640))
    assert plan.sites[0].bytes == -1


@pytest.mark.slow
def test_fixed_sizes_have_no_limit():
    backend = commpass.backend(POLICY, profile=PROFILE, inner="eager", strict=True)
    torch.compile(layer, backend=backend, dynamic=False)(torch.randn(4, 256), torch.eye(256))
    assert "holds" not in commpass.plans()[-1].sites[0].reason


@pytest.mark.slow
def test_limits_of_the_most_sites_count():
    def many(x, w):
        found = [ar(x.repeat(1, n) * i) for i, n in enumerate((1, 2, 3, 3, 4, 4, 5), 2)]
        return [x @ w, *found]

    (plan,) = run(many, (4,), Policy(codecs="int8", algorithms="two_shot", skip=("group",)))
    widths = [int(site.shape[1]) // WIDTH for site in plan if "holds" in site.reason]
    assert widths == [3, 3, 4, 4]
    assert len(set(widths)) == MOST
    assert len(plan.sites) == 7


def test_limits_are_counted_for_each_group():
    """Ranks of one group may also be in other groups, whose sites the other ranks do not see."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (mesh.get_group(name).group_name for name in ("dp", "tp"))

    def many(x, w):
        def over(group, *widths):
            given = [x.repeat(1, n) * i for i, n in enumerate(widths, 2)]
            return [ops.wait_tensor(ops.all_reduce(each, "sum", group)) for each in given]

        return [x @ w, *over(dp, 3, 3, 4, 4, 5), *over(tp, 6, 6, 6, 7, 7, 7, 8)]

    (plan,) = run(many, (4,), Policy(codecs="int8", algorithms="two_shot", skip=("group",)))
    held = [site for site in plan if "holds" in site.reason]
    widths = {
        group: [int(site.shape[1]) // WIDTH for site in held if site.group == group]
        for group in (dp, tp)
    }
    assert widths == {dp: [3, 3, 4, 4], tp: [6, 6, 6, 7, 7, 7]}


def test_size_is_that_which_explain_names():
    (plan,) = run(layer, (4,))
    (site,) = plan
    size = break_even(site, "two_shot", "int8", PROFILE)
    assert f"{round(size + 0.5):,} bytes" in site.reason


def test_plan_that_is_not_carried_out_ends_nowhere():
    """The unchanged graph is right for every size."""

    def failing(*_args, **_more):
        raise RuntimeError("on purpose")

    from commpass.passes import verify

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "verify", failing)
        backend = commpass.backend(POLICY, profile=PROFILE, inner="eager")
        compiled = torch.compile(layer, backend=backend, dynamic=True)
        for rows in (4, 4000):
            compiled(torch.randn(rows, WIDTH), torch.eye(WIDTH))
    assert counters["stats"]["unique_graphs"] == 1
