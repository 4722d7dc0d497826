"""The parts of DDP's buckets and of FSDP2's units, the group and the thread of the integration, and
the layout of residuals."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import commpass
from commpass.distributed import owners
from commpass.distributed.owners import parameter_names
from commpass.errors import PolicyError
from commpass.groups import duplicate, labels, timeout_of
from commpass.parallel.ddp.buckets import parts_of
from commpass.parallel.ddp.worker import Worker
from commpass.parallel.exchange import Exchange, Exchanges
from commpass.parallel.fsdp.parts import parts_of_row
from commpass.parallel.ssfusion.api import _weights
from commpass.policy import Policy
from commpass.policy.annotate import annotations_of
from commpass.policy.rules import Rule


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def parts(policy: Policy, of: nn.Module, group: dist.ProcessGroup):
    parameters = list(of.parameters())
    x = torch.arange(float(sum(p.numel() for p in parameters)))
    found = parts_of(policy, group, x, parameters, parameter_names(of), annotations_of(of))
    return x, found


def test_bucket_under_one_rule_is_one_view(fake_group):
    x, (part,) = parts(Policy(), model(), fake_group(4))
    assert part.of(x).data_ptr() == x.data_ptr()
    assert part.of(x).shape == x.shape
    assert (part.what.module, part.what.flat, part.what.op) == ("", True, "avg")


def test_parameters_under_other_rules_are_sent_apart_and_put_back(fake_group):
    of = model()
    policy = Policy(rules=[Rule(module="1", codec="int8")])
    x, (outer, inner) = parts(policy, of, fake_group(4))
    assert [part.what.module for part in (outer, inner)] == ["", "1"]
    assert outer.ranges == ((0, 20), (40, 20))
    assert inner.ranges == ((20, 20),)
    before = x.clone()
    outer.exchange(lambda piece: piece.mul_(-1), x)
    assert torch.equal(x, torch.cat([-before[:20], before[20:40], -before[40:]]))


def test_rules_that_say_the_same_part_nothing(fake_group):
    policy = Policy(rules=[Rule(module="1", codec="int8"), Rule(codec="int8")])
    _, found = parts(policy, model(), fake_group(4))
    assert len(found) == 1


@pytest.mark.parametrize("term", [{"max_error": 0.001}, {"force": True}, {"chunks": 2}])
def test_rules_of_one_codec_with_other_terms_part_a_bucket(term, fake_group):
    policy = Policy(rules=[Rule(module="1", codec="int8", **term), Rule(codec="int8")])
    _, found = parts(policy, model(), fake_group(4))
    assert [part.what.module for part in found] == ["", "1"]


class Divided(nn.Module):
    """The second of three layers is divided, as torch's DDP sees tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()
        mesh = SimpleNamespace(mesh_dim_names=("tp",), ndim=1)
        for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
            parameter = getattr(self.layers[1], name)
            parameter._st_info = SimpleNamespace(mesh=mesh, placements=(placement,))


@pytest.mark.parametrize(
    ("policy", "ranges"),
    [
        (Policy(rules=[Rule(codec="int8")]), [((0, 20), (36, 24)), ((20, 16),)]),
        (Policy(rules=[Rule(codec="topk")]), [((0, 20), (36, 24)), ((20, 16),)]),
        (Policy(rules=[Rule(codec="exponent")], codecs=("exponent",)), [((0, 60),)]),
        (Policy(rules=[Rule(codec="bf16")], codecs=("bf16",)), [((0, 60),)]),
        (Policy(off=True, name="off"), [((0, 60),)]),
    ],
    ids=["int8", "topk", "lossless", "cast", "off"],
)
def test_divided_parameters_are_sent_apart_from_those_that_all_ranks_hold(
    policy, ranges, fake_group
):
    _, found = parts(policy, Divided(), fake_group(4))
    assert [part.ranges for part in found] == ranges


def test_ssfusion_refuses_parameters_that_are_divided(fake_group):
    with pytest.raises(PolicyError, match=r"layers\.1\.weight is a DTensor"):
        _weights(Divided())


@pytest.mark.parametrize("by_class", [False, True])
def test_words_in_the_model_are_nearer_than_rules(by_class, fake_group):
    class Head(nn.Linear):
        pass

    of = nn.Sequential(nn.Linear(4, 4), Head(4, 4))
    commpass.keep(Head if by_class else of[1])
    _, found = parts(Policy(rules=[Rule(codec="int8")]), of, fake_group(4))
    assert [(part.what.module, part.what.annotation) for part in found][1:] == [
        ("1", '{"keep":true}')
    ]
    assert len(found) == 2


def test_common_module_that_another_rule_means_is_not_named(fake_group):
    of = nn.Module()
    of.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    policy = Policy(rules=[Rule(module="layers.*", codec="int8")])
    (_, (part,)) = parts(policy, of, fake_group(4))
    assert part.what.module == "layers.0"


def test_twin_has_the_labels_of_its_group_and_another_name(fake_group):
    group = fake_group(8)
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    for one in (group, mesh.get_group("dp")):
        made = duplicate(one)
        assert labels(made) == labels(one)
        assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(one)
        assert made.group_name != one.group_name
        assert timeout_of(made) == timeout_of(one)
    assert "dp" in labels(mesh.get_group("dp"))


# --- the thread -----------------------------------------------------------------------------------


def test_jobs_are_done_in_order_in_another_thread():
    worker, done = Worker("test", lambda: None), []

    def job(number: int) -> None:
        time.sleep(0.01 * (3 - number))
        done.append((number, threading.current_thread().name))

    futures = [worker.submit(lambda n=n: job(n), n) for n in range(3)]
    assert [future.wait() for future in futures] == [0, 1, 2]
    assert done == [(0, "test"), (1, "test"), (2, "test")]
    worker.check()


def test_hook_does_nothing_and_waits_for_nothing_after_an_error():
    told, done = [], []

    def told_and_fails() -> None:
        told.append(True)
        raise ValueError("another one")

    worker = Worker("test", told_and_fails)
    assert worker.submit(lambda: {}["gone"], 1).wait() == 1
    assert worker.submit(lambda: done.append(1), 2).wait() == 2
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            worker.check()
    assert told == [True]
    assert done == []


def test_thread_ends_with_the_worker():
    worker = Worker("ends", lambda: None)
    worker.submit(lambda: None, None).wait()
    del worker
    deadline = time.monotonic() + 60
    while any(thread.name == "ends" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- exchanges of hooks ---------------------------------------------------------------------------


def exchanges(policy: Policy | str, inner: str = "eager") -> Exchanges:
    return Exchanges(commpass.backend(policy, inner=inner, strict=True))


def all_reduce(group: dist.ProcessGroup) -> Exchange:
    name, size = group.group_name, group.size()
    return Exchange("all_reduce", name, size, "", "backward", "ddp", "avg", flat=True)


def test_buckets_left_alone_are_not_compiled(fake_group, monkeypatch):
    from torch._inductor import compile_fx

    def compiled(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiled)
    made, group = exchanges("lossless", "inductor"), fake_group(4)
    x = torch.full((64,), 3.0)
    made.run(all_reduce(group), x)
    assert torch.equal(x, torch.full((64,), 0.75))
    with pytest.raises(AssertionError, match="compiled"):
        exchanges(Policy(rules=[Rule(codec="int8", force=True)]), "inductor").run(
            all_reduce(group), torch.ones(4096)
        )


@pytest.mark.slow
def test_residuals_follow_parameters_into_other_buckets(fake_group):
    commpass.reset_state()
    owners._owners.clear()
    of, group = model(), fake_group(4)
    of[1].to(memory_format=torch.contiguous_format)
    made = exchanges(Policy(rules=[Rule(codec="topk(density=0.05)", force=True)], max_error=1.0))
    names = [name for name, _ in of.named_parameters()]

    def send(order: list[int], value: float) -> None:
        held = [list(of.parameters())[number] for number in order]
        x = torch.cat(
            [torch.full((p.numel(),), value + n) for n, p in zip(order, held, strict=True)]
        )
        made.run(all_reduce(group), x, of=held)

    def left() -> dict[str, torch.Tensor]:
        found = {key.split("/")[1]: t for key, t in commpass.state_dict(of).items()}
        return {name: found[name].clone() for name in names if name in found}

    send([0, 1, 2, 3, 4, 5], 1.0)
    first = left()
    assert list(first) == names
    assert all(t.shape == dict(of.named_parameters())[n].shape for n, t in first.items())
    send([5, 3, 4], 0.0)  # other buckets
    send([2, 1, 0], 0.0)
    for number, name in enumerate(names):
        gained = left()[name] - first[name]
        # 5 % of the entries were sent and are 0 now; the others gained a quarter of the gradient.
        assert ((gained - number / 4).abs() < 1e-6).sum() >= 0.5 * gained.numel(), name
    commpass.reset_state(of)
    assert left() == {}
    send([0, 1, 2, 3, 4, 5], 0.0)
    again = left()
    assert float(again["0.weight"].abs().max()) == 0.0
    assert float(again["2.bias"].abs().max()) == 1.25


def test_residual_has_the_layout_of_its_parameter(fake_group):
    """DDP's buckets hold gradients in the memory order of their parameters."""
    commpass.reset_state()
    owners._owners.clear()
    group = fake_group(4)
    of = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    made = exchanges(Policy(rules=[Rule(codec="topk(density=0.05)", force=True)], max_error=1.0))
    what = dataclasses.replace(all_reduce(group), parameters=("weight",))
    made.run(what, torch.arange(1.0, 49), of=[of.weight])
    (left,) = commpass.state_dict(of).values()
    wanted = torch.arange(1.0, 49).reshape(4, 2, 2, 3).permute(0, 3, 1, 2) / 4
    kept = left != 0
    assert 0.5 * left.numel() < kept.sum() < left.numel()
    torch.testing.assert_close(left[kept], wanted[kept])


def test_parameters_that_replace_others_own_what_is_left_of_them(fake_group):
    """One exchange is compiled, for all parameters of a name."""
    commpass.reset_state()
    owners._owners.clear()
    group = fake_group(4)
    made = exchanges(Policy(rules=[Rule(codec="topk(density=0.05)", force=True)], max_error=1.0))
    what = dataclasses.replace(all_reduce(group), parameters=("weight",))
    both = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    for each in both:
        made.run(what, torch.arange(64.0), of=[each.weight])
    first, second = (commpass.state_dict(each) for each in both)
    assert [*first] == [*second]
    for left, wanted in zip(second.values(), first.values(), strict=True):
        assert torch.equal(left, wanted)


@pytest.mark.slow
def test_state_of_parameters_that_are_gone_is_no_others(fake_group):
    """This holds for any numbers (``id``) of new parameters: torch and Python reuse old ones."""
    commpass.reset_state()
    owners._owners.clear()
    group = fake_group(4)
    made = exchanges(Policy(rules=[Rule(codec="topk(density=0.05)", force=True)], max_error=1.0))
    what = dataclasses.replace(all_reduce(group), parameters=("weight",))
    for _ in range(20):
        of = nn.Linear(8, 8, bias=False)
        made.run(what, torch.ones(64), of=[of.weight])
        (left,) = commpass.state_dict(of).values()
        assert 0 < float(left.max()) <= 0.25  # what one step left, and not what earlier steps left
    assert len(made.plans) == 1


def test_exchanges_of_parameters_of_other_names_are_others(fake_group):
    made, group = exchanges("off"), fake_group(4)
    for name in ("first", "second", "first"):
        of = nn.Parameter(torch.ones(64))
        made.run(
            dataclasses.replace(all_reduce(group), parameters=(name,)), torch.ones(64), of=[of]
        )
    assert len(made.plans) == len(made.backend.step_log.entries) == 2
    made.clear()
    assert made.plans == made.backend.step_log.entries == []
    assert len(made.backend.step_log.past) == 2


def test_exchanges_of_a_group_that_ddp_no_longer_has_are_dropped(fake_group):
    """Ranks that join the new group compile them, so those that stay must as well."""
    group = fake_group(4)
    ddp = nn.parallel.DistributedDataParallel(model(), process_group=group)
    integration = commpass.parallel.compress_ddp(ddp, "off")
    integration.exchanges.run(all_reduce(group), torch.ones(64))
    integration._adopt_ddp_state()
    assert len(integration.exchanges.plans) == 1
    ddp._update_process_group(dist.new_group([0, 1]))
    integration._adopt_ddp_state()
    assert integration.exchanges.plans == []
    integration.close()


def sharded(*layouts: tuple[int, str | None]) -> list[SimpleNamespace]:
    """Parameters of FSDP2 of these sizes, divided over a dimension or over none."""
    given = []
    for size, name in layouts:
        mesh = SimpleNamespace(mesh_dim_names=("tp",), ndim=1)
        parameter = nn.Parameter(torch.zeros(size))
        parameter._st_info = SimpleNamespace(
            mesh=mesh, placements=(Shard(0) if name else Replicate(),)
        )
        given.append(
            SimpleNamespace(
                sharded_param=parameter, padded_sharded_param_size=torch.Size((size, 1))
            )
        )
    return given


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ([(4, None), (6, None)], ()),
        ([(4, "tp"), (6, "tp")], ()),
        ([(4, "tp"), (6, None)], (((0, 4),), ((4, 10),))),
        ([(4, "tp"), (1, "tp"), (6, None), (3, "tp")], (((0, 5), (11, 14)), ((5, 11),))),
    ],
)
def test_unit_sends_divided_parameters_apart(layouts, expected):
    sent, length = sharded(*layouts), sum(size for size, _ in layouts)
    assert parts_of_row(sent, length) == expected
    if expected:  # a parameter without a gradient is not in the row
        assert parts_of_row(sent, length - 1) is None
