"""compress, keep and apply_policy: which annotation a site has, in forward and backward, and the
limits of annotations."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import torch.distributed as dist
from graphs import ops
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import checkpoint

import commpass
from commpass.errors import PolicyError, ScopeError
from commpass.plan import NONE
from commpass.policy import Policy
from commpass.policy.annotate import open_scopes
from commpass.policy.rules import Rule

RANKS = 2
NOTHING = Policy(codecs=())
"""Compresses only annotated sites."""


@pytest.fixture(autouse=True)
def group(fake_group):
    fake_group(RANKS)


def gather(x):
    """Gather in forward; reduce and scatter in backward."""
    return all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def reduce(x):
    """Reduce in forward, without a separate gradient."""
    return ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0"))


class Leaf(nn.Module):
    """A module with one collective."""

    def forward(self, x):
        """Gathers."""
        return gather(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Leaf(), Leaf()

    def forward(self, x):
        return self.mlp(self.attention(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = Leaf()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compiled(function, policy=NOTHING, **more):
    torch._dynamo.reset()
    return torch.compile(
        function, backend=commpass.backend(policy, inner="aot_eager", strict=True, **more)
    )


def plans_of(function, policy=NOTHING, *, train: bool = True):
    """Return the plans of the graphs of one step of a function."""
    seen = len(commpass.plans())
    x = torch.ones(4, 3, requires_grad=train)
    result = compiled(function, policy)(x)
    if train:
        result.sum().backward()
    return commpass.plans()[seen:]


def words(plan) -> list:
    """Return each site's annotation, in order: a codec, "keep", the whole annotation, or None."""

    def said(text):
        word = json.loads(text)
        return (
            "keep"
            if word == {"keep": True}
            else word["codec"][0]
            if set(word) == {"codec"}
            else word
        )

    return [site.annotation and said(site.annotation) for site in plan]


def forward_words(function) -> list:
    (plan,) = plans_of(function, train=False)
    return words(plan)


# --- decorators and context managers --------------------------------------------------------------


@pytest.mark.rest_slow(1)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("scope", "word"),
    [
        (commpass.compress(codec="int8"), "int8"),
        (commpass.keep(), "keep"),
        (commpass.keep, "keep"),
        (commpass.compress, {}),
        (commpass.compress(), {}),
        (
            commpass.compress(codec=("int8", "fp8"), algorithm="direct", max_error=0.5, force=True),
            {"codec": ["int8", "fp8"], "algorithm": ["direct"], "max_error": 0.5, "force": True},
        ),
    ],
    ids=["compress", "keep()", "keep", "bare", "bare()", "all that can be said"],
)
@pytest.mark.parametrize("target", ["class", "module", "function", "method"])
def test_decorator_puts_its_annotation_on_all_that_is_inside_in_forward_and_backward(
    scope, word, target
):
    if target == "class":
        decorated = scope(type("Mine", (Leaf,), {}))()
    elif target == "module":
        decorated = scope(Leaf())
    elif target == "function":
        decorated = scope(gather)
    else:
        decorated = type("Mine", (nn.Module,), {"forward": scope(lambda self, x: gather(x))})()
    forward, backward = plans_of(lambda x: gather(decorated(gather(x))))
    assert [site.kind for site in forward] == ["all_gather"] * 3
    assert [site.kind for site in backward] == ["reduce_scatter"] * 3
    assert words(forward) == words(backward) == [None, word, None]


def test_decorated_model_may_be_the_compiled_one_itself():
    decorated = commpass.compress(codec="int8")(type("Mine", (Net,), {}))
    forward, backward = plans_of(decorated())
    assert words(forward) == words(backward) == ["int8"] * 5


def test_context_manager_in_forward_covers_its_lines_alone():
    def function(x):
        x = gather(x)
        with commpass.compress(codec="fp8"):
            x = gather(x)
        with commpass.keep():
            x = gather(x)
        return gather(x)

    forward, backward = plans_of(function)
    assert words(forward) == [None, "fp8", "keep", None]
    assert words(backward) == [None, "keep", "fp8", None]


def test_context_manager_in_forward_takes_all_that_compress_takes():
    def function(x):
        with commpass.compress(
            codec=("int8", "fp8"), algorithm=["direct"], max_error=0.5, force=True
        ):
            return gather(x)

    assert forward_words(function) == [
        {"codec": ["int8", "fp8"], "algorithm": ["direct"], "max_error": 0.5, "force": True}
    ]


def test_codec_that_is_an_attribute_may_change():
    class Chosen(nn.Module):
        codec = "int8"

        def forward(self, x):
            with commpass.compress(codec=self.codec):
                return gather(x)

    model = Chosen()
    run, seen = compiled(model), len(commpass.plans())
    with torch.no_grad():
        for codec in ("int8", "int4", "int8"):
            model.codec = codec
            run(torch.ones(4, 3))
    assert [words(plan) for plan in commpass.plans()[seen:]] == [["int8"], ["int4"]]


def test_nearest_of_nested_annotations_counts():
    inner = commpass.compress(codec="int8")(type("Inner", (Leaf,), {}))()

    @commpass.compress(codec="int4")
    def middle(x):
        x = gather(x)
        with commpass.keep():
            x = gather(inner(x))
            with commpass.compress(codec="fp8"):
                x = gather(x)
            x = gather(x)
        return gather(x)

    @commpass.keep
    def outer(x):
        return gather(middle(gather(x)))

    forward, backward = plans_of(outer)
    expected = ["keep", "int4", "int8", "keep", "fp8", "keep", "int4", "keep"]
    assert words(forward) == expected
    assert words(backward) == expected[::-1]


def test_annotations_hold_for_what_checkpointing_computes_again():
    leaf = commpass.compress(codec="int8")(type("Mine", (Leaf,), {}))()

    def function(x):
        x = checkpoint(lambda x: leaf(x).sin(), x, use_reentrant=False)
        with commpass.keep():
            return checkpoint(lambda x: gather(x).sin(), x, use_reentrant=False)

    forward, backward = plans_of(function)
    assert words(forward) == ["int8", "keep"]
    found = [(site.kind, word) for site, word in zip(backward, words(backward), strict=True)]
    own = sorted(word for kind, word in found if kind == "reduce_scatter")
    again = sorted(word for kind, word in found if kind == "all_gather")
    assert own == ["int8", "keep"]
    # torch 2.11 saves the result of a custom gather instead of recomputing it.
    assert again == ([] if torch.__version__.startswith("2.11.") else ["int8", "keep"])
    assert len(found) == len(own) + len(again)


def test_inherited_forward_gets_the_annotation_of_the_class_that_has_it_and_parents_do_not():
    class Parent(Leaf):
        pass

    @commpass.compress(codec="int8")
    class Child(Parent):
        pass

    class Grandchild(Child):
        pass

    assert [forward_words(kind()) for kind in (Parent, Child, Grandchild)] == [
        [None],
        ["int8"],
        ["int8"],
    ]


def test_annotation_on_one_module_is_not_on_another_of_its_class():
    first, second = commpass.keep(Leaf()), Leaf()
    assert forward_words(lambda x: second(first(x))) == ["keep", None]


def test_decorator_keeps_what_it_decorates_and_its_name_and_docstring():
    class Mine(nn.Module):
        """Of the class."""

        def forward(self, x: int, *, scale: float = 1.0):
            """Of forward."""

    def function(x):
        """Of the function."""

    for scope in (commpass.compress(codec="int8"), commpass.keep):
        assert scope(Mine) is Mine
        assert (Mine.__name__, Mine.__doc__) == ("Mine", "Of the class.")
        assert (Mine.forward.__name__, Mine.forward.__doc__) == ("forward", "Of forward.")
        assert Mine.forward.__annotations__ == {"x": "int", "scale": "float"}
        wrapped = scope(function)
        assert (wrapped.__name__, wrapped.__doc__, wrapped.__module__) == (
            "function",
            "Of the function.",
            __name__,
        )
        module = Leaf()
        assert scope(module) is module
        assert module.forward.__doc__ == "Gathers."


@pytest.mark.parametrize(
    "scope", [commpass.keep, commpass.compress(codec="int8")], ids=["keep", "compress"]
)
@pytest.mark.parametrize("target", [3, "layers.0"])
def test_objects_without_modules_cannot_be_decorated(scope, target):
    with pytest.raises(PolicyError, match="module class, a module or a function") as error:
        scope(target)
    assert repr(target) in str(error.value)


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({"codec": "int9"}, "did you mean 'int8'?"),
        ({"codec": ["int8", "pf8"]}, "did you mean 'fp8'?"),
        ({"codec": "int8(blok=8)"}, "did you mean 'block'?"),
        ({"algorithm": "two-shot"}, "did you mean 'two_shot'?"),
        ({"max_error": -1}, "max_error=-1"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest_outside_and_inside_compiled_code(said, part):
    with pytest.raises(PolicyError) as error:
        commpass.compress(**said)
    assert part in str(error.value)

    def function(x):
        with commpass.compress(**said):
            return gather(x)

    with pytest.raises(Exception, match="PolicyError") as wrapped:
        compiled(function)(torch.ones(4, 3))
    assert part in str(wrapped.value)


# --- effects of an annotation ---------------------------------------------------------------------


def forced(codec):
    return commpass.compress(codec=codec, force=True)


@pytest.mark.slow
def test_annotation_is_what_is_done_in_both_directions_and_the_reason_says_so():
    @forced("int8")
    def inner(x):
        return gather(x)

    for plan in plans_of(lambda x: gather(inner(gather(x)))):
        assert [site.codec for site in plan] == [NONE, "int8", NONE]
        assert "compress(...)" in plan.sites[1].reason
        assert "custom" in plan.sites[0].reason


@pytest.mark.slow
def test_annotations_beat_rules():
    policy = Policy(codecs="fp8", rules=[Rule(codec="int4", force=True)])

    def function(x):
        x = gather(x)
        with commpass.keep():
            x = gather(x)
        with commpass.compress(codec="int8", force=True):
            return gather(x)

    forward, backward = plans_of(function, policy)
    for sites in (forward.sites, backward.sites[::-1]):
        by_rule, kept, by_word = sites
        assert (by_rule.codec, kept.codec, by_word.codec) == ("int4", NONE, "int8")
        assert "rule 1" in by_rule.reason
        assert kept.reason.startswith("keep")
        assert "compress(...)" in by_word.reason


@pytest.mark.slow
def test_bare_compress_allows_what_the_policy_itself_does_whatever_rules_and_keeps_say():
    policy = Policy(codecs="fp8", max_error=0.1, rules=[Rule(keep=True)])
    decorated = commpass.compress(gather)
    with_arguments = commpass.compress(gather, codec="int8", force=True)

    def function(x):
        x = gather(x)
        with commpass.keep():
            x = decorated(x)
        with commpass.compress(force=True):
            x = gather(x)
        return with_arguments(x)

    forward, backward = plans_of(function, policy)
    for sites in (forward.sites, backward.sites[::-1]):
        by_rule, bare, forced_, named = sites
        assert (by_rule.codec, forced_.codec, named.codec) == (NONE, "fp8", "int8")
        assert by_rule.reason.startswith("rule 1")
        assert bare.annotation == "{}"
        assert "rule" not in bare.reason
        assert "keep" not in bare.reason
        assert "fp8" in bare.reason  # it has 48 bytes: a losing candidate


def test_bare_compress_allows_nothing_where_the_policy_itself_does_not():
    policy = Policy(rules=[Rule(codec="int8", force=True)])
    for plan in plans_of(commpass.compress(gather), policy):
        assert [site.codec for site in plan] == [NONE]


def test_policy_off_ignores_annotations():
    @forced("int8")
    def inner(x):
        return gather(x)

    for plan in plans_of(inner, "off"):
        (site,) = plan
        assert site.annotation
        assert site.codec == NONE
        assert "off" in site.reason


@pytest.mark.slow
def test_lossless_compresses_what_an_annotation_allows_and_nothing_else():
    @forced("int8")
    def inner(x):
        return gather(x)

    for plan in plans_of(lambda x: inner(gather(x)), "lossless"):
        assert sorted(site.codec for site in plan) == ["int8", NONE]


@pytest.mark.slow
def test_decorator_alone_makes_another_plan_of_the_same_code():
    def code(x):
        return gather(x).sin()

    variants = [
        code,
        forced("int8")(code),
        forced("int4")(code),
        commpass.keep(code),
        forced("int8")(code),
    ]
    forwards = [plans_of(variant)[0] for variant in variants]
    assert [plan.sites[0].codec for plan in forwards] == [NONE, "int8", "int4", NONE, "int8"]
    digests = [plan.digest() for plan in forwards]
    assert len(set(digests)) == 3
    assert digests[1] == digests[4]


def test_decorated_module_that_nobody_compiles_computes_what_it_did():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(4, 3)
    expected = model(x)
    expected.sum().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(open_scopes()))
    commpass.apply_policy(
        model, {"0": "int8", "1": commpass.keep(), "2": {"codec": "fp8", "force": True}}
    )
    commpass.keep(model)
    result = model(x)
    result.sum().backward()
    assert torch.equal(result, expected)
    assert torch.equal(model[0].weight.grad, gradient)
    assert seen == [('{"keep":true}',)]
    assert open_scopes() == ()


def test_scope_ends_when_an_exception_leaves_it():
    @commpass.keep
    def fails(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        fails()
    assert open_scopes() == ()
    seen = []
    with pytest.raises(KeyError), commpass.compress(codec="int8"), commpass.keep():
        fails(seen.append(open_scopes()))
    assert [json.loads(word) for word in seen[0]] == [{"codec": ["int8"]}, {"keep": True}]
    assert open_scopes() == ()


# --- apply_policy ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_annotations_are_put_on_modules_by_glob_without_their_source():
    model = Net()
    same = commpass.apply_policy(
        model,
        {
            "layers.*.mlp": "int8",
            "layers.0.attention": ("int8", "fp8"),
            "layers.1.att*": {"codec": "int4", "force": True},
            "head": commpass.keep(),
        },
    )
    assert same is model
    forward, backward = plans_of(model)
    expected = [
        {"codec": ["int8", "fp8"]},
        "int8",
        {"codec": ["int4"], "force": True},
        "int8",
        "keep",
    ]
    raw = [json.loads(site.annotation) for site in forward]
    assert raw[0] == expected[0]
    assert words(forward)[1:] == expected[1:]
    assert [json.loads(site.annotation) for site in backward] == raw[::-1]
    assert [site.module for site in forward] == [
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
        "layers.1.mlp",
        "head",
    ]
    assert (forward.sites[2].codec, forward.sites[4].codec) == ("int4", NONE)
    assert forward_words(Net()) == [None] * 5, "other models of the same classes are as they were"


@pytest.mark.rest_slow(1)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("layers", [True] * 4 + [False]),
        ("layers.*", [True] * 4 + [False]),
        ("layers.?", [True] * 4 + [False]),
        ("layers.0", [True, True, False, False, False]),
        ("layers.*.mlp", [False, True, False, True, False]),
        ("**.mlp", [False, True, False, True, False]),
        ("*", [True] * 5),
        ("**", [True] * 5),
        ("head", [False] * 4 + [True]),
    ],
)
def test_glob_names_modules_and_covers_what_is_inside(pattern, covered):
    model = commpass.apply_policy(Net(), {pattern: "int8"})
    assert [word == "int8" for word in forward_words(model)] == covered


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"layers.0": "int4", "layers.0.mlp": "int8"}, ["int4", "int8", None, None, None]),
        ({"layers": "int4", "layers.0": "int8"}, ["int8", "int8", "int4", "int4", None]),
        (
            {"**": "fp8", "layers.*.mlp": "int8", "layers.1": "int4"},
            ["fp8", "int8", "int4", "int8", "fp8"],
        ),
    ],
)
def test_annotation_of_the_module_inside_counts_whatever_the_order(said, expected):
    for patterns in (list(said), list(said)[::-1]):
        model = commpass.apply_policy(Net(), {pattern: said[pattern] for pattern in patterns})
        assert forward_words(model) == expected


UNKNOWN = {
    "layers.*.mpl": "did you mean 'layers.*.mlp'?",
    "layers.0.attenton": "did you mean 'layers.0.attention'?",
    "haed": "did you mean 'head'?",
    "layers.7": "layers.0",
    "layers.0.mlp.down": "layers.0.mlp",
}


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("pattern", UNKNOWN)
def test_pattern_that_names_no_module_is_refused_with_the_nearest_and_nothing_is_changed(pattern):
    model = Net()
    with pytest.raises(PolicyError) as error:
        commpass.apply_policy(model, {"head": "int8", pattern: "int8"})
    for part in (repr(pattern), "Net", UNKNOWN[pattern]):
        assert part in str(error.value)
    assert forward_words(model) == [None] * 5


@pytest.mark.rest_slow(1)
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("int9", "did you mean 'int8'?"),
        (("int8", "int9"), "did you mean 'int8'?"),
        ({"codec": "int9"}, "did you mean 'int8'?"),
        ({"kodec": "int8"}, "did you mean 'codec'?"),
        ({"keep": True, "codec": "int8"}, "keep=True"),
        (3, "the annotation for 'layers.0' is 3: must be a codec"),
        (None, "the annotation for 'layers.0' is None: must be a codec"),
        ("keep", "write commpass.keep()"),
        (commpass.keep, "write commpass.keep()"),
        (commpass.compress, "write commpass.compress(), or"),
        (Rule(codec="int8", direction="backward"), "put a rule into Policy(rules=[...])"),
    ],
)
def test_annotation_that_cannot_be_meant_is_refused_and_nothing_is_changed(word, part):
    model = Net()
    with pytest.raises(PolicyError) as error:
        commpass.apply_policy(model, {"head": "int8", "layers.0": word})
    assert part in str(error.value)
    assert forward_words(model) == [None] * 5


@pytest.mark.parametrize(
    ("model", "words", "parts"),
    [
        (Net, ["int8"], ["annotations=['int8']", '{"layers.*.mlp": "int8"}']),
        (Net, "int8", ["annotations='int8'", '{"layers.*.mlp": "int8"}']),
        (Net, {"": 5}, ["the annotation for ''", "is 5"]),
        (Net, {3: "int8"}, ["pattern 3", "text"]),
        (lambda: 5, {"head": "int8"}, ["model=5", "must be a module"]),
    ],
)
def test_apply_policy_says_which_argument_cannot_be_meant(model, words, parts):
    with pytest.raises(PolicyError) as error:
        commpass.apply_policy(model(), words)
    for part in parts:
        assert part in str(error.value)


def test_modules_that_are_numbers_alone_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(PolicyError, match=r"names no module of Sequential\. Known: \*, 0, 1\.$"):
        commpass.apply_policy(model, {"layers.*": "int8"})


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("int8", "write compress(codec='int8')"),
        (["int8"], 'write compress(codec="int8")'),
        (5, 'write compress(codec="int8")'),
    ],
)
def test_compress_without_names_says_what_to_write(given, part):
    with pytest.raises(PolicyError) as error:
        commpass.compress(given)
    assert part in str(error.value)


def test_compress_with_an_unnamed_codec_inside_compiled_code_says_what_to_write():
    def function(x):
        with commpass.compress("int8"):
            return gather(x)

    with pytest.raises(Exception, match="PolicyError") as wrapped:
        compiled(function)(torch.ones(4, 3))
    assert "write compress(codec='int8')" in str(wrapped.value)


def test_compress_on_a_function_inside_compiled_code_says_what_to_write():
    def function(x):
        return commpass.compress(gather)(x)

    with pytest.raises(Exception, match="PolicyError") as wrapped:
        compiled(function)(torch.ones(4, 3))
    assert "write `with commpass.compress():` around the call" in str(wrapped.value)


@pytest.mark.slow
def test_annotations_put_on_after_a_first_call_count_from_the_next_one_on():
    model = Net()
    run, seen = compiled(model), len(commpass.plans())
    with torch.no_grad():
        run(torch.ones(4, 3))
        commpass.apply_policy(model, {"head": "int8"})
        run(torch.ones(4, 3))
    assert [words(plan) for plan in commpass.plans()[seen:]] == [[None] * 5, [None] * 4 + ["int8"]]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x), gather(x)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "twin_of",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize(
    "put",
    [
        lambda m: commpass.apply_policy(m, {"0": commpass.keep()}),
        lambda m: commpass.keep(m[0]),
        commpass.keep,
    ],
    ids=["apply_policy", "a module inside", "the module itself"],
)
def test_copy_of_a_model_has_weights_of_its_own_and_the_annotations(put, twin_of):
    model = nn.Sequential(Weighted())
    put(model)
    twin = twin_of(model)
    with torch.no_grad():
        x = torch.ones(2, 3)
        before, _ = model(x)
        twin[0].inner.weight.zero_()
        twin[0].inner.bias.zero_()
        assert torch.equal(model(x)[0], before)
        assert torch.equal(twin(x)[0], torch.zeros(2, 3))
    assert forward_words(model) == ["keep"]
    assert forward_words(twin) == ["keep"]


# --- limits of annotations ------------------------------------------------------------------------


def refused(function, word) -> None:
    """Check that a call raises ScopeError, whose message has the annotation and the alternative."""
    with pytest.raises(ScopeError) as error:
        function()
    for part in (word, "commpass.compress", "apply_policy(model, {...})", "module's class"):
        assert part in str(error.value)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("called_before", [True, False])
@pytest.mark.parametrize(
    ("scope", "word"),
    [(lambda: commpass.compress(codec="int8"), "int8"), (commpass.keep, "keep")],
    ids=["compress", "keep"],
)
def test_scope_around_a_compiled_call_is_refused_and_the_call_works_behind_it(
    scope, word, called_before
):
    run, x = compiled(gather), torch.ones(4, 3)
    if called_before:
        run(x)
    with scope():
        refused(lambda: run(x), word)
    assert run(x).shape == (4 * RANKS, 3)
    assert open_scopes() == ()


@pytest.mark.parametrize("policy", ["off", "lossless", "balanced"])
def test_scope_around_is_refused_whatever_the_policy(policy):
    run = compiled(gather, policy)
    with commpass.keep():
        refused(lambda: run(torch.ones(4, 3)), "keep")
    run(torch.ones(4, 3))


def test_decorated_eager_caller_of_a_compiled_call_is_refused_and_names_the_nearest_annotation():
    run, x = compiled(gather), torch.ones(4, 3)
    caller = commpass.compress(codec="fp8")(run)
    outer = commpass.keep(caller)
    refused(lambda: outer(x), "fp8")
    assert run(x).shape == (4 * RANKS, 3)

    class Eager(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = run

        def forward(self, x):
            return self.inner(x) + 1

    model = commpass.apply_policy(nn.Sequential(Eager()), {"0": "int8"})
    refused(lambda: model(x), "int8")
    assert run(x).shape == (4 * RANKS, 3)


def test_scope_around_a_compiled_backward_is_refused():
    run = compiled(gather)
    loss = run(torch.ones(4, 3, requires_grad=True)).sum()
    with commpass.keep():
        refused(lambda: loss.backward(retain_graph=True), "keep")
    loss.backward()


@pytest.mark.slow
def test_graph_break_inside_a_scope_is_refused_and_named():
    @commpass.compress(codec="int8")
    def broken(x):
        x = gather(x)
        torch._dynamo.graph_break()
        return gather(x)

    with pytest.raises(ScopeError, match="graph break"):
        compiled(broken)(torch.ones(4, 3))
    assert open_scopes() == ()


def test_scope_made_outside_and_entered_inside_is_refused_rather_than_ignored():
    scope = commpass.compress(codec="int8")

    def function(x):
        with scope:
            return gather(x)

    with pytest.raises(ScopeError, match="int8"):
        compiled(function)(torch.ones(4, 3))
    assert open_scopes() == ()


def test_scopes_of_other_threads_do_not_reach_here():
    import threading

    run, opened, done = compiled(gather), threading.Event(), threading.Event()

    def other():
        with commpass.keep():
            opened.set()
            done.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert opened.wait(20)
        assert run(torch.ones(4, 3)).shape == (4 * RANKS, 3)
    finally:
        done.set()
        thread.join()


SECOND = {
    "apply_policy": lambda model: commpass.apply_policy(model, {"head": "int4"}),
    "a module": lambda model: commpass.keep(model.head),
    "what holds it": lambda model: commpass.apply_policy(model, {"layers": "int4"}),
}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("again", SECOND)
def test_second_annotation_that_would_do_nothing_is_refused_and_nothing_is_changed(again):
    model = commpass.apply_policy(Net(), {"head": "int8", "layers": "int8"})
    before = forward_words(model)
    with pytest.raises(PolicyError, match=r"already has the annotation .*int8"):
        SECOND[again](model)
    assert forward_words(model) == before


@pytest.mark.slow
def test_first_of_two_patterns_that_name_one_module_counts():
    model = commpass.apply_policy(Net(), {"layers.0": "int4", "layers.*": "int8"})
    assert forward_words(model)[:4] == ["int4", "int4", "int8", "int8"]


@pytest.mark.slow
def test_keep_for_the_part_of_one_layer_before_an_annotation_for_that_part_of_all():
    model = commpass.apply_policy(Net(), {"layers.0.mlp": commpass.keep(), "layers.*.mlp": "int8"})
    assert forward_words(model) == [None, "keep", None, "int8", None]
    further_out = commpass.apply_policy(
        Net(), {"layers.*.mlp": "int8", "layers.0": commpass.keep()}
    )
    assert forward_words(further_out) == ["keep", "int8", None, "int8", None]
