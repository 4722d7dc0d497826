"""The path of a module: the user's own, whatever wraps the model, in rules, annotations and plans,
forward and backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from tiers import sampled
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpass
from commpass.distributed.state.names import Name, parse
from commpass.errors import PolicyError
from commpass.policy import Policy
from commpass.policy.annotate import annotations_of
from commpass.policy.paths import clean, names
from commpass.policy.rules import Rule

NOTHING = Policy(codecs=())
WHOLE = ["layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp", "head"]
BLOCKS = ["layers.*.attn", "layers.*.mlp", "head"]


@pytest.fixture(autouse=True)
def group(fake_group):
    fake_group(2)


class Leaf(nn.Module):
    """A module with one collective."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return all_gather_tensor_autograd(self.linear(x), 0, dist.group.WORLD)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Leaf(), Leaf()

    def forward(self, x):
        return self.mlp(self.attn(x))


class Net(nn.Module):
    def __init__(self, layer=Layer):
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = Leaf()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Broken(Layer):
    """A layer whose forward is compiled in two parts."""

    def forward(self, x):
        x = self.attn(x)
        torch._dynamo.graph_break()
        return self.mlp(x)


class Adapter(nn.Module):
    """A module around another, like adapters for fine-tuning: it has weights, and its name is part
    of the path."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.low = base_layer, nn.Linear(3, 3)

    def forward(self, x):
        return self.base_layer(x + self.low(x))


class Owner(nn.Module):
    """A model with an attribute named like those of wrappers."""

    def __init__(self):
        super().__init__()
        self.module = Net()

    def forward(self, x):
        return self.module(x)


def mesh():
    return init_device_mesh("cpu", (2,))


def backend(policy=NOTHING):
    return commpass.backend(policy, inner="aot_eager", strict=True)


def compiled(model):
    return torch.compile(model, backend=backend())


def checkpointed(make):
    model = Net()
    model.layers = nn.ModuleList(make(layer) for layer in model.layers)
    model.head = make(model.head)
    return compiled(model)


def sharded(model):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def by_method(model):
    chosen = backend()
    for block in (*model.layers, model.head):
        block.compile(backend=chosen)
    return model


def by_module(model):
    chosen = backend()
    model.layers = nn.ModuleList(torch.compile(layer, backend=chosen) for layer in model.layers)
    model.head = torch.compile(model.head, backend=chosen)
    return model


def in_adapters(model):
    for layer in model.layers:
        layer.mlp = Adapter(layer.mlp)
    return model


def with_words(model):
    return commpass.apply_policy(model, {"layers.0": "int8", "layers.1.attn": commpass.keep()})


class Trainer:
    """Not a module, but it holds one."""

    def __init__(self):
        self.model = Net()

    def step(self, x):
        return self.model(x)


def through_a_global(x):
    return GLOBAL(x)


GLOBAL = Net()

MODELS = {
    "plain": (lambda: compiled(Net()), WHOLE),
    "checkpoint_wrapper": (lambda: checkpointed(checkpoint_wrapper), WHOLE),
    "checkpoint_wrapper of compiled words": (lambda: compiled(with_words(Net())), WHOLE),
    "compiled twice": (lambda: compiled(compiled(Net())), WHOLE),
    "DDP inside": (lambda: compiled(DistributedDataParallel(Net())), WHOLE),
    "DDP outside": (lambda: DistributedDataParallel(compiled(Net())), WHOLE),
    "an attribute called module": (lambda: compiled(Owner()), [f"module.{path}" for path in WHOLE]),
    "DDP around one called module": (
        lambda: DistributedDataParallel(compiled(Owner())),
        [f"module.{path}" for path in WHOLE],
    ),
    "FSDP2": (lambda: compiled(sharded(Net())), BLOCKS),
    "FSDP2, block by block": (lambda: sharded(by_method(Net())), BLOCKS),
    "block by block": (lambda: by_method(Net()), BLOCKS),
    "block by block, as modules": (lambda: by_module(Net()), BLOCKS),
    "block by block in DDP": (lambda: DistributedDataParallel(by_method(Net())), BLOCKS),
    "a break in a layer": (lambda: compiled(Net(Broken)), BLOCKS),
    "adapters": (
        lambda: compiled(in_adapters(Net())),
        [
            "layers.0.attn",
            "layers.0.mlp.base_layer",
            "layers.1.attn",
            "layers.1.mlp.base_layer",
            "head",
        ],
    ),
    "adapters, block by block": (
        lambda: by_method(in_adapters(Net())),
        ["layers.*.attn", "layers.*.mlp.base_layer", "head"],
    ),
    "a function of a model": (lambda: compiled(through_a_global), WHOLE),
    "a method of what holds a model": (lambda: compiled(Trainer().step), WHOLE),
}


def step(model):
    """Return the plans of a training step, in order."""
    torch._dynamo.reset()
    seen = len(commpass.plans())
    with getattr(
        model, "no_sync", contextlib.nullcontext
    )():  # DDP's own hooks cannot work on a fake group
        model(torch.ones(4, 3)).square().sum().backward()
    return commpass.plans()[seen:]


LONG = ("compiled twice", "block by block, as modules", "DDP around one called module")
LONG += ("a method of what holds a model", "checkpoint_wrapper of compiled words")


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("what", sampled(MODELS, lambda what: what not in LONG))
def test_paths_are_those_of_the_model_without_what_wraps_it_in_forward_and_backward(what):
    make, expected = MODELS[what]
    plans = step(make())
    forward = [site.module for plan in plans if plan.direction == "forward" for site in plan]
    backward = [
        site.module
        for plan in plans
        if plan.direction == "backward"
        for site in plan
        if site.kind == "reduce_scatter"
    ]
    assert list(dict.fromkeys(forward)) == expected
    assert set(backward) == set(expected)


@pytest.mark.slow
def test_block_that_is_compiled_and_called_by_itself_has_the_path_that_apply_policy_saw():
    model = Net()
    run = compiled(model.layers[1])
    forward, *_ = step(run)
    # nothing tells which one it belongs to
    assert [site.module for site in forward] == ["attn", "mlp"]
    model = commpass.apply_policy(Net(), {"head": "int8"})
    forward, *_ = step(compiled(model.layers[1]))
    assert [site.module for site in forward] == ["layers.1.attn", "layers.1.mlp"]


@pytest.mark.every
def test_rule_for_all_blocks_reaches_blocks_that_are_compiled_one_by_one():
    policy = Policy(rules=[Rule(module="layers.*.mlp", codec="int8", force=True)])
    model, chosen = Net(), commpass.backend(policy, inner="aot_eager", strict=True)
    for layer in model.layers:
        layer.compile(backend=chosen)
    for plan in step(model):
        assert {site.module for site in plan.compressed} == {"layers.*.mlp"}
        assert len(plan.sites) == 2


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("which", ["layers.0", "layers.1", "layers.1.mlp"])
def test_keep_for_one_of_the_blocks_that_share_a_graph_keeps_it_for_all(which):
    """A graph that serves both layers cannot compress only one: ``keep`` always takes
    precedence."""
    rules = [Rule(module=which, keep=True), Rule(module="layers.*", codec="int8", force=True)]
    model, chosen = Net(), commpass.backend(Policy(rules=rules), inner="aot_eager", strict=True)
    for layer in model.layers:
        layer.compile(backend=chosen)
    compressed = {site.module for plan in step(model) for site in plan.compressed}
    assert compressed == ({"layers.*.attn"} if which.endswith("mlp") else set())


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("L['self'].layers.0.mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0']._orig_mod.mlp", "layers.0.mlp"),
        (
            "L['self'].layers.0.__dict__['_modules']['_checkpoint_wrapped_module'].mlp",
            "layers.0.mlp",
        ),
        ("L['self'].layers.0.forward.args[1].attn.o", "layers.0.attn.o"),
        ("L['self'].forward.args[1].layers[0]", "layers.0"),
        ("getattr(L['self'].layers, '3').mlp", "layers.3.mlp"),
        ("_orig_mod._fsdp_wrapped_module.layers.1", "layers.1"),
        ("L['self'].forward_args.args.1", "forward_args.args.1"),
        ("L['self'].module.layers", "module.layers"),
        (
            "base_model.model.layers.0.q_proj.base_layer",
            "base_model.model.layers.0.q_proj.base_layer",
        ),
        ("G['model']", ""),
        ("", ""),
    ],
)
def test_one_function_cleans_every_form_of_a_name(raw, expected):
    assert clean(raw) == expected
    assert clean(expected) == expected


def test_module_is_left_out_of_paths_for_wrappers_of_torch_alone():
    wrapped = compiled(DistributedDataParallel(Owner()))
    assert "module.layers.0.attn" in dict(names(wrapped))
    assert not any("module.module" in name for name, _ in names(wrapped))
    assert clean("L['self'].net.module.head", ["L['self'].net"]) == "net.head"
    assert clean("L['self'].net.module.head", ["L['self'].nets"]) == "net.module.head"
    wrappers = ["L['self'].net", "L['self'].net.module.inner"]
    assert clean("L['self'].net.module.inner.module.head", wrappers) == "net.inner.head"


# --- apply_policy sees the names that rules see ---------------------------------------------------


WRAPPED = {
    "checkpoint_wrapper": lambda model: _wrap_layers(model, checkpoint_wrapper),
    "DDP": DistributedDataParallel,
    "compile": compiled,
    "FSDP2": lambda model: fully_shard(model, mesh=mesh()),
}


def _wrap_layers(model, wrap):
    model.layers = nn.ModuleList(wrap(layer) for layer in model.layers)
    return model


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_annotations_go_on_modules_by_the_names_that_rules_see(wrapper):
    model = WRAPPED[wrapper](Net())
    commpass.apply_policy(model, {"layers.0.mlp": "int8", "layers.1": commpass.keep()})
    run = model if wrapper == "compile" else compiled(model)
    sites = {
        site.module: site.annotation
        for plan in step(run)
        if plan.direction == "forward"
        for site in plan
    }
    if wrapper == "FSDP2":
        assert set(sites) == set(WHOLE)
    assert sites["layers.0.attn"] is sites["head"] is None
    assert "int8" in sites["layers.0.mlp"]
    assert "keep" in sites["layers.1.attn"]
    assert "keep" in sites["layers.1.mlp"]


def test_pattern_with_a_wrappers_name_is_refused_with_the_name_without():
    with pytest.raises(PolicyError) as error:
        commpass.apply_policy(compiled(Net()), {"_orig_mod.head": "int8"})
    assert "did you mean 'head'?" in str(error.value)


class Tied(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = Leaf()
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "second"])
def test_tied_module_takes_an_annotation_under_each_of_its_names(name):
    forward, backward = step(compiled(commpass.apply_policy(Tied(), {name: "int8"})))
    assert all("int8" in site.annotation for plan in (forward, backward) for site in plan)
    assert len(forward.sites) == 2
    model = commpass.apply_policy(Tied(), {"second": "int8", "first": "int4"})
    forward, _ = step(compiled(model))
    assert all(
        "int8" in site.annotation for site in forward
    )  # the first of two patterns for one module counts


@pytest.mark.slow
def test_annotations_distinguish_blocks_that_are_compiled_one_by_one():
    model = commpass.apply_policy(Net(), {"layers.0.mlp": commpass.keep(), "layers.1.mlp": "int8"})
    plans = step(by_method(model))
    words = [
        [site.annotation for site in plan]
        for plan in plans
        if plan.direction == "forward" and len(plan.sites) == 2
    ]
    assert [row[0] for row in words] == [None, None]
    assert ["keep" in row[1] for row in words] == [True, False]
    assert "int8" in words[1][1]


# --- unusual names --------------------------------------------------------------------------------

ODD = [
    *("a b", "x\ny", "a-b", "[red]x[/red]", "a|b", "*", "a/b", "<b>", "a\\b", "'q'", '"dq"'),
    *("\x1b[31mred", "é漢", "l" * 300, "self", "L", "G", "L__self__", "getattr(x, 'y')", "0"),
]


class Sent(nn.Module):
    def forward(self, x):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x * 2, "sum", dist.group.WORLD.group_name))


def with_odd_names() -> nn.Module:
    model = nn.Sequential()
    for name in ODD:
        model.add_module(name, nn.Sequential(Sent()))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_module_may_be_called_anything_and_rules_find_it(keeps):
    rule = Rule(keep=True) if keeps else Rule(codec="int8", force=True)
    policy = Policy(codecs=("int8",), max_error=0.1, rules=[rule])
    backend = commpass.backend(policy, inner="aot_eager", profile=commpass.ethernet(0.01))
    torch.compile(with_odd_names(), backend=backend)(torch.randn(64, 64))
    sites = commpass.plans()[-1].sites
    assert [site.module for site in sites] == [f"{name}.0" for name in ODD]
    assert {site.codec for site in sites} == {"none" if keeps else "int8"}


def test_rule_and_an_annotation_name_one_of_them():
    for name in ODD:
        if "*" not in name:
            model = commpass.apply_policy(with_odd_names(), {name: commpass.keep()})
            rule = Rule(module=name, codec="int8", force=True)
            assert [path for path, _ in names(model) if rule._is_about(path)] == [name, f"{name}.0"]
            assert set(annotations_of(model)) == {name, f"{name}.0"}


def test_state_of_a_parameter_may_be_called_anything(fake_group):
    for name in ODD:
        kept = Name(f"{name}.weight", "ddp", "gradient/0", "sum", "world", 0, 2)
        assert parse(str(kept)) == kept
    before = "commpass.v2/50%.weight/ddp/gradient/0/sum/world/0of2"
    assert parse(before).parameter == "50%.weight"
